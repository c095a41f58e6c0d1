"""Test models that read, store or rotate by the length of the call: held at every length, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from tests.adversary.models import DIM, INDICES, Attend, Past, Small, causal, keys, new, plain, sdpa, seen
from tests.adversary.oracle import Case, judge

Pick = Callable[[Tensor], Tensor]


def read_by(pick: Pick) -> Attend:
    """Attend to pick(x) of keys and values [B, H, S, D], without a mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, pick(k), pick(v))

    return attend


def keys_by(change: Pick, values_by: Pick = lambda v: v) -> Attend:
    """Attend causally to keys and values that are changed at read."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, change(k), values_by(v), attn_mask=causal(i, j))

    return attend


# -- A: attention to some of the keys --------------------------------------------------------------------------------

PARTS: dict[str, Pick] = {
    "last": lambda x: x[:, :, -64:],
    "first": lambda x: x[:, :, :64],
    "last-if-longer": lambda x: x[:, :, -64:] if x.shape[2] > 64 else x,
    "narrow-if-longer": lambda x: x.narrow(2, x.shape[2] - 64, 64) if x.shape[2] > 64 else x,
    "last-then-repeated": lambda x: x.repeat_interleave(1, 1)[..., -64:, :].contiguous(),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("pieces", [(62, 1, 1, 1, 1), (60, 1, 3, 3), (66, 1)], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_attention_to_a_part_of_the_keys_is_refused(part: str, pieces: tuple[int, ...]) -> None:
    """Check the refusal: a subscript selects keys by the length, which small sizes do not show.

    Each operation on the way is compared with the symbolic size that Dynamo recorded for it, whose guards give the
    lengths of the graph. A selection is smaller than the cache at some of these lengths, or it selects all keys.
    """
    verdict = judge(Case(Small(read_by(PARTS[part])), pieces=pieces))
    assert verdict.kind == "refused", verdict
    assert "test_lengths.py:" in verdict.detail


@pytest.mark.few(1)
@pytest.mark.parametrize("part", PARTS)
def test_a_subscript_that_takes_all_keys_is_no_part(part: str) -> None:
    verdict = judge(Case(Small(read_by(PARTS[part])), pieces=(20, 1, 1, 3)))
    assert verdict.kind == "held", verdict


# -- K: storing some of the tokens -----------------------------------------------------------------------------------


class Storing(Small):
    """A model that returns only some of the tokens that it attended to."""

    store: Callable[[Tensor, Past], Tensor]

    def forward(self, ids: Tensor, past: Past = None, **inputs: Any) -> Any:
        x, present = Small.forward(self, ids, past, **inputs)
        return x, [(self.store(k, past), self.store(v, past)) for k, v in present]


STORED: dict[str, Callable[[Tensor, Past], Tensor]] = {
    "once-longer": lambda x, past: x[:, :, -12:] if x.shape[2] > 12 else x,
    "in-steps": lambda x, past: x if past is None else x[:, :, -12:],
    "narrow": lambda x, past: x.narrow(2, x.shape[2] - 12, 12) if x.shape[2] > 12 else x,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("pieces", [(10, 1, 1, 1, 1), (5, 1, 9, 1)], ids=str)
@pytest.mark.parametrize("stored", STORED)
def test_a_window_that_begins_after_the_prompt_is_refused(stored: str, pieces: tuple[int, ...]) -> None:
    """Check the refusal: a layer's slots are planned from the tokens that its prompt stores.

    Every step compares the window of its graph with the window that the cache was made with, before it writes. So a
    layer cannot start to drop tokens later.
    """
    model = Storing(plain)
    model.store = STORED[stored]
    verdict = judge(Case(model, pieces=pieces))
    assert verdict.kind == "refused", verdict


# -- I: rotary embeddings that depend on the call --------------------------------------------------------------------


Factor = Callable[[Tensor, Tensor, int], Any]
"""(position ids [B, q], the number of tokens as an input, and as a size) -> a divisor of frequencies."""


class LongRope(Small):
    """A model that rotates by position ids [B, q], with frequencies divided by factor(position ids, tokens, length)."""

    factor: Factor

    def forward(self, ids: Tensor, past: Past = None, *, p: Tensor, tokens: Tensor, **_: Any) -> Any:
        x, start = self.embed(ids), 0 if past is None else past[0][0].shape[-2]
        q, k, v = self.project[0](x).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(3, 1)
        angle = p[:, None, :, None] / (
            10.0 ** torch.arange(0, 1, 2 / DIM) * self.factor(p, tokens, start + ids.shape[1])
        )
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        q, k = (x * cos + torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1) * sin for x in (q, k))
        if past is not None:
            k, v = self.grow(past[0][0], k), self.grow(past[0][1], v)
        i, j = torch.arange(start, start + ids.shape[1])[:, None], torch.arange(k.shape[-2])
        return plain(q, k, v, i, j).transpose(1, 2).flatten(2), [(k, v)]


FACTORS: dict[str, Factor] = {
    "largest": lambda p, tokens, length: torch.where(p.max() >= 8, 3.0, 1.0),
    "largest-of-the-row": lambda p, tokens, length: torch.where(p.amax(-1)[:, None, None, None] >= 8, 3.0, 1.0),
    "last": lambda p, tokens, length: torch.where(p[:, -1:, None, None] >= 8, 3.0, 1.0),
    "number-of-tokens": lambda p, tokens, length: torch.where(tokens >= 9, 3.0, 1.0),
    "running": lambda p, tokens, length: 1.0 + p.cumsum(-1)[:, None, :, None] / 100,
}
POSITIONS = torch.arange(14).expand(2, -1)


def long_rope(factor: Factor, pieces: tuple[int, ...]) -> Case:
    model = LongRope(plain)
    model.factor = factor
    return Case(model, {"p": new(POSITIONS), "tokens": lambda start, stop: torch.tensor(stop)}, pieces)


@pytest.mark.few(2)
@pytest.mark.parametrize("pieces", [(5, 1, 1, 1, 1, 1), (1, 1, 6, 1, 1), (10, 1)], ids=str)
@pytest.mark.parametrize("factor", FACTORS)
def test_angles_of_other_tokens_are_not_computed_at_read(factor: str, pieces: tuple[int, ...]) -> None:
    """Check the refusal: a cached key rotated at read would get the factor of the later call.

    The dimensions of positions and of the raw key are followed to the rotated key by the table of operators. If one is
    lost, or another input has a token dimension, it is unproven that the rotation depends on the token's own position.
    """
    verdict = judge(long_rope(FACTORS[factor], pieces), "streaming", positions="cache")
    assert verdict.kind == "refused", verdict
    assert "positions='absolute'" in verdict.detail


@pytest.mark.few(1)
@pytest.mark.parametrize("factor", FACTORS)
def test_angles_of_other_tokens_stay_absolute_by_default(factor: str) -> None:
    """Check the fallback to absolute positions, with the model's own factors."""
    verdict = judge(long_rope(FACTORS[factor], (5, 1, 1, 1, 1, 1)), "streaming")
    assert verdict.kind == "held", verdict


def test_angles_of_a_tokens_own_position_are_computed_at_read() -> None:
    case = long_rope(lambda p, tokens, length: torch.arange(1.0, 1 + DIM // 2), (5, 1, 1, 3))
    assert judge(case, "streaming", positions="cache").kind == "held"


@pytest.mark.few(1)
@pytest.mark.parametrize(("pieces", "kind"), [((7, 1, 1, 1), "refused"), ((10, 1, 1), "held"), ((5, 1, 1), "held")])
def test_a_length_that_decides_on_the_angles_is_noticed(pieces: tuple[int, ...], kind: str) -> None:
    """Check that a length that selects the graph is noticed, because neither graph shows the other.

    The rotation of a few positions is computed in every graph, and compared along each conversation.
    """
    case = long_rope(lambda p, tokens, length: 3.0 if length >= 9 else 1.0, pieces)
    verdict = judge(case, "streaming", positions="cache")
    assert verdict.kind == kind, verdict


# -- J: positions that the model computes ----------------------------------------------------------------------------

PADDED: dict[str, Any] = {
    "right": [[1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [1] * 10],
    "hole": [[1, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 10],
    "in-a-chunk": [[1, 1, 1, 1, 1, 1, 0, 1, 1, 1], [1] * 10],
    "in-a-step": [[1, 1, 1, 1, 1, 0, 1, 1, 1, 1], [1] * 10],
}


def masked(i: Tensor, j: Tensor, p: Tensor) -> Tensor:
    return causal(i, j) & keys(p).bool()


def padded(shape: str, mask: Any) -> Case:
    """Return a case with positions of a shape in `INDICES`, under a padding mask."""
    return Case(Small(sdpa(masked), rotary=shape), {"p": seen(mask)}, (5, 1, 3, 1), real=seen(mask))


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", PADDED)
def test_indices_in_a_padded_sequence_are_not_taken_for_ranks(mask: str) -> None:
    """Check the refusal: padding between real tokens is a distance to the model, but not to ranks.

    The model's position ids are computed from the arguments of every call. They must count the real tokens of a row,
    one by one, from the row's first position.
    """
    verdict = judge(padded("[1, 1, q, 1]", PADDED[mask]), "streaming", positions="cache")
    assert verdict.kind == "refused", verdict


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", PADDED)
def test_positions_that_count_real_tokens_are_ranks(mask: str) -> None:
    assert judge(padded("[B, 1, q, 1]", PADDED[mask]), "streaming", positions="cache").kind == "held"


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", PADDED)
def test_indices_in_a_padded_sequence_work_as_absolute_positions(mask: str) -> None:
    assert judge(padded("[1, 1, q, 1]", PADDED[mask]), "streaming", positions="absolute").kind == "held"


STRANGE: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "doubled": lambda i, p: i[None, None] * 2,
    "clamped": lambda i, p: i[None, None].clamp(max=6),
    "backwards": lambda i, p: 50 - i[None, None],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STRANGE)
def test_positions_that_do_not_go_on_one_by_one_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INDICES, name, STRANGE[name])
    verdict = judge(Case(Small(plain, rotary=name), pieces=(5, 1, 1, 1, 1)), "streaming", positions="cache")
    assert verdict.kind == "refused", verdict


# -- caches of a fixed size ------------------------------------------------------------------------------------------

ROOM = 24


class Preallocated(Small):
    """A model that writes new tokens to their positions among `ROOM`, by write(past, new, positions)."""

    write: Callable[[Tensor, Tensor, Tensor], Tensor]

    def forward(self, ids: Tensor, past: Past = None, *, at: Tensor, **_: Any) -> Any:
        assert past is not None
        q, k, v = self.project[0](self.embed(ids)).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(3, 1)
        places = at + torch.arange(ids.shape[1])
        k, v = self.write(past[0][0], k, places), self.write(past[0][1], v, places)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(places[:, None], torch.arange(ROOM)))
        return out.transpose(1, 2).flatten(2), [(k, v)]


def by_where(past: Tensor, new: Tensor, places: Tensor) -> Tensor:
    slot = torch.arange(ROOM)
    here = ((slot >= places[0]) & (slot <= places[-1]))[:, None]
    return torch.where(here, new[:, :, (slot - places[0]).clamp(0, new.shape[2] - 1)], past)


def by_product(past: Tensor, new: Tensor, places: Tensor) -> Tensor:
    chosen = F.one_hot(places, ROOM).to(past.dtype)  # [q, ROOM]
    return past * (1 - chosen.sum(0))[:, None] + chosen.T @ new


def by_copy(past: Tensor, new: Tensor, places: Tensor) -> Tensor:
    return past.index_copy(2, places, new)


def empty(model: Any) -> Callable[..., Any]:
    """Wrap a model so that its first call gets an empty cache."""

    def call(ids: Tensor, past: Any, at: Tensor) -> Any:
        return model(ids, past or [(torch.zeros(2, 2, ROOM, DIM), torch.zeros(2, 2, ROOM, DIM))], at=at)

    return call


@pytest.mark.few(1)
@pytest.mark.parametrize("write", [by_where, by_product, by_copy])
def test_a_cache_of_a_fixed_size_is_refused_however_it_is_written(write: Callable[..., Tensor]) -> None:
    """Check the refusal: such a cache does not grow, so it must not pass as a layer without a cache.

    It is recognised by shape alone: returned keys and values that depend on an input of the same shape.
    """
    model = Preallocated(plain)
    model.write = write
    case = Case(model, {"at": lambda start, stop: torch.tensor(start)}, (5, 1), wrap=empty)
    verdict = judge(case)
    assert verdict.kind == "refused", verdict
    assert "preallocated" in verdict.detail


# -- keys and values that change at read -----------------------------------------------------------------------------

AT_READ: dict[str, Case] = {
    "widened": Case(Small(keys_by(Tensor.float, Tensor.float), kept=torch.bfloat16)),
    "widened-for-groups": Case(
        Small(
            keys_by(lambda k: k.float().repeat_interleave(2, 1), lambda v: v.float().repeat_interleave(2, 1)),
            heads=4,
            kv_heads=2,
            kept=torch.float16,
        )
    ),
    "scaled": Case(Small(keys_by(lambda k: k * 0.7))),
    "scaled-both": Case(Small(keys_by(lambda k: k * 0.7, lambda v: v / 3))),
    "normalized": Case(Small(keys_by(lambda k: F.normalize(k, dim=-1)))),
    "norm": Case(Small(keys_by(lambda k: k / k.norm(dim=-1, keepdim=True).clamp(min=1e-6)))),
    "vector-norm": Case(Small(keys_by(lambda k: k / (torch.linalg.vector_norm(k, dim=3, keepdim=True) + 1e-6)))),
    "spelled-and-widened": Case(
        Small(
            lambda q, k, v, i, j: (q @ k.float().mT / 3).masked_fill(~causal(i, j), -torch.inf).softmax(-1) @ v.float(),
            kept=torch.bfloat16,
        )
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["full", "h2o"])
@pytest.mark.parametrize("name", AT_READ)
def test_keys_and_values_computed_from_cached_vectors_are_read(name: str, policy: str) -> None:
    """Check that functions of each cached token alone are computed from slots, by the model's own code.

    The cached vectors are found before such computations, also in a prompt, which has no concatenation.
    """
    verdict = judge(AT_READ[name], policy)
    assert verdict.kind == "held", verdict


class OneMask(nn.Module):
    """Two layers that fill one mask into their logits, made by the length of the first layer's cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.project = nn.Embedding(16, 16), nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, ids: Tensor, past: Past = None) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        seen, x, present = 0 if past is None else past[0][0].shape[2], self.embed(ids), []
        later = torch.arange(seen + ids.shape[1]) > torch.arange(seen, seen + ids.shape[1])[:, None]
        for layer, project in enumerate(self.project):
            q, k, v = project(x).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(3, 1)
            if past is not None:
                k, v = torch.cat([past[layer][0], k], 2), torch.cat([past[layer][1], v], 2)
            present.append((k, v))
            x = x + ((q @ k.mT / 3).masked_fill(later, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x, present


@pytest.mark.parametrize("pieces", [(3, 4, 1, 1, 3), (4, 1, 6, 1), (3, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_lengths_of_layers_that_only_guards_make_equal_are_equal(pieces: tuple[int, ...], policy: str) -> None:
    verdict = judge(Case(OneMask(), pieces=pieces), policy)
    assert verdict.kind == "held", verdict


@pytest.mark.parametrize(("pieces", "kind"), [((1, 1, 1), "refused"), ((2, 1, 1), "held"), ((1, 2, 1), "refused")])
def test_a_refusal_of_computed_keys_names_the_prompt_of_one_token(pieces: tuple[int, ...], kind: str) -> None:
    """Check the remedy: torch takes the length of a cache of one token for a constant."""
    verdict = judge(dataclasses.replace(AT_READ["normalized"], pieces=pieces))
    assert verdict.kind == kind, verdict
    assert kind == "held" or "after a prompt of one token, begin with two" in verdict.detail


@pytest.mark.few(1)
@pytest.mark.parametrize("dim", [2, 0, None])
def test_norms_over_tokens_or_rows_are_refused(dim: int | None) -> None:
    def normal(k: Tensor) -> Tensor:
        return k / k.norm() if dim is None else F.normalize(k, dim=dim)

    verdict = judge(Case(Small(keys_by(normal))))
    assert verdict.kind == "refused", verdict


def test_explain_says_that_a_fixed_cache_is_refused() -> None:
    model = Preallocated(plain)
    model.write = by_where
    past = [(torch.zeros(2, 2, ROOM, DIM), torch.zeros(2, 2, ROOM, DIM))]
    report = kvpass.explain(model, "full")(torch.ones(2, 5, dtype=torch.int64), past, at=torch.tensor(0))
    assert [site.verdict for site in report.sites] == ["refused"]
    assert "torch.where(here" in report.refused[0].reason
