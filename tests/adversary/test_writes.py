"""Test models that write in place: to cached rows, to state of their own, and to tensors of the caller."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from tests.adversary.models import Small, additive, causal, keys, logits, plain, queries, sdpa, seen
from tests.adversary.oracle import Case, judge

Write = Callable[[Tensor, Tensor], object]
IDS = torch.randint(0, 16, (2, 12), generator=torch.Generator().manual_seed(0))
PIECES = ((0, 4), (4, 5), (5, 6), (6, 7), (7, 8))


@torch.library.custom_op("kvpass_tests::halve", mutates_args={"x"})
def halve(x: Tensor) -> None:
    """Halve a tensor in place, as an operator of another library."""
    x.mul_(0.5)


def after_attention(write: Callable[[Tensor, Tensor], object]) -> Callable[..., Tensor]:
    """Return attention after which the model writes to the grown keys and values."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **_: Any) -> Tensor:
        out = plain(q, k, v, i, j)
        write(k, v)
        return out

    return attend


def clamped(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **_: Any) -> Tensor:
    """Clamp the newest key in the cache, which changes few keys."""
    k[:, :, -1:].clamp_(-6, 6)
    return plain(q, k, v, i, j)


def decomposed(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **_: Any) -> Tensor:
    out: Tensor = logits(lambda a, i, j: a.masked_fill(j > i, -1e9))(q, k, v, i, j)
    v[:, :, :-1].mul_(0.9)
    return out


CACHE_WRITES: dict[str, Callable[..., Tensor]] = {
    "values of earlier tokens": after_attention(lambda k, v: v[:, :, :-1].mul_(0.9)),
    "the first key": after_attention(lambda k, v: k[:, :, 0].zero_()),
    "all values": after_attention(lambda k, v: v.mul_(0.9)),
    "through data": after_attention(lambda k, v: v.data.mul_(0.9)),
    "several at once": after_attention(lambda k, v: torch._foreach_mul_([k, v], 0.9)),
    "by an activation": after_attention(lambda k, v: F.relu(v, inplace=True)),
    "by an activation's position": after_attention(lambda k, v: F.hardtanh(v, -0.5, 0.5, True)),
    "by an operator of a library": after_attention(lambda k, v: torch.ops.kvpass_tests.halve(v)),
    "the newest key, before attention": clamped,
    "after decomposed attention": decomposed,
}


@pytest.mark.parametrize("name", CACHE_WRITES)
def test_writes_to_cached_keys_and_values_are_refused(name: str) -> None:
    found = judge(Case(Small(CACHE_WRITES[name]), pieces=(5, 1, 1)), "full")
    assert found.kind == "refused"
    assert "written to" in found.detail or "is updated" in found.detail


STATE_WRITES: dict[str, Write] = {
    "method": lambda state, x: state.lerp_(x, 0.3),
    "out": lambda state, x: torch.lerp(state, x, 0.3, out=state),
    "foreach": lambda state, x: torch._foreach_add_([state], [x]),
    "as_strided": lambda state, x: state.as_strided((16,), (1,)).add_(x),
    "unfold": lambda state, x: state.unfold(0, 8, 8)[0].add_(x[:8]),
    "data": lambda state, x: state.data.add_(x),
    "hsplit": lambda state, x: torch.hsplit(state, 2)[0].add_(x[:8]),
    "inplace": lambda state, x: F.relu(state.add_(x), inplace=True),
    "inplace by position": lambda state, x: F.leaky_relu(state.add_(x), 0.1, True),
    "operator of a library": lambda state, x: torch.ops.kvpass_tests.halve(state.add_(x)),
    "overload of an operator": lambda state, x: torch.ops.kvpass_tests.halve.default(state.add_(x)),
    "view_as_real": lambda state, x: torch.view_as_real(torch.view_as_complex(state.view(-1, 2))).add_(1),
    "atleast_2d": lambda state, x: torch.atleast_2d(state).add_(x),
}


class WithState(Small):
    """A model with state, in a buffer or a parameter, that each call reads and then writes."""

    def __init__(self, write: Write, parameter: bool = False) -> None:
        super().__init__(plain)
        self.write = write
        if parameter:
            self.state = nn.Parameter(torch.zeros(16), requires_grad=False)
        else:
            self.register_buffer("state", torch.zeros(16))

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        x, present = super().forward(ids, past, **inputs)
        y = x - self.state
        self.write(self.state, x.mean((0, 1)))
        return y, present


@torch.no_grad()
def check_equal(model: nn.Module, compiled: Any) -> None:
    """Check that a compiled model equals an uncompiled one in a few calls."""
    past = expected_past = None
    for start, end in PIECES:
        expected, expected_past = model(IDS[:, start:end], expected_past)
        out, past = compiled(IDS[:, start:end].contiguous(), past)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("how", STATE_WRITES)
def test_state_of_a_model_is_written_once_in_each_call(how: str, parameter: bool) -> None:
    """Check that no spelling of a write is lost, and that validation writes to no state."""
    model = WithState(STATE_WRITES[how], parameter)
    ours = copy.deepcopy(model)
    check_equal(model, torch.compile(ours, backend=kvpass.backend("full", inner="eager")))
    torch.testing.assert_close(ours.state, model.state)


def shown_by(write: Write) -> Callable[..., Tensor]:
    """Return a mask from an input that hides tokens, after a write which shows them again."""

    def mask(i: Tensor, j: Tensor, hidden: Tensor, shown: Tensor) -> Tensor:
        mark = hidden.clone()
        write(mark, shown)
        return causal(i, j) & keys(mark).bool()

    return mask


@pytest.mark.parametrize("how", ["out", "foreach", "as_strided"])
def test_a_write_that_shows_tokens_again_is_part_of_the_proof_of_padding(how: str) -> None:
    hidden = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    shown = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0], [0] * 8])
    write: Write = {
        "out": lambda mark, more: torch.add(mark, more, out=mark),
        "foreach": lambda mark, more: torch._foreach_add_([mark], [more]),
        "as_strided": lambda mark, more: mark.as_strided(mark.shape, mark.stride()).add_(more),
    }[how]
    inputs = {"hidden": seen(hidden), "shown": lambda start, stop: (shown * (stop > 6))[:, :stop].contiguous()}
    case = Case(Small(sdpa(shown_by(write))), inputs, (5, 1, 1, 1), real=seen(hidden))
    assert judge(case).kind == "refused"


SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [1] * 7 + [2] * 3])
WEIGHTS = torch.tensor([[1.0] * 6 + [0.25] * 4, [1.0] * 7 + [0.5] * 3])
MARKS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], Any]] = {
    "segments": (
        sdpa(lambda i, j, s: causal(i, j) & (keys(s) == queries(s, i)) & (keys(s) > 0)),
        {"s": seen(SEGMENTS)},
        seen(SEGMENTS > 0),
    ),
    "segments, additive": (
        sdpa(lambda i, j, s: additive(causal(i, j) & (keys(s) == queries(s, i)) & (keys(s) > 0))),
        {"s": seen(SEGMENTS)},
        seen(SEGMENTS > 0),
    ),
    "weights": (
        sdpa(lambda i, j, w: torch.where(causal(i, j) & (keys(w) > 0), keys(w).log(), -torch.inf)),
        {"w": seen(WEIGHTS)},
        None,
    ),
}


@pytest.mark.parametrize("pieces", [(5, 1, 1, 1, 1), (5, 1, 3, 1), (6, 3, 1)], ids=str)
@pytest.mark.parametrize("name", MARKS)
def test_a_new_token_has_the_mark_that_the_caller_gives_it(name: str, pieces: tuple[int, ...]) -> None:
    """Check marks of padding with other values than zero and one, which first come with a new token."""
    attend, inputs, real = MARKS[name]
    assert judge(Case(Small(attend), inputs, pieces, real=real)).kind == "held"


class Preallocated(nn.Module):
    """Attention on a cache of fixed size, which is written through a view."""

    def __init__(self, write: Callable[[Tensor, int, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.embed, self.project = write, nn.Embedding(16, 16), nn.Linear(16, 48)
        self.register_buffer("k", torch.zeros(2, 2, 64, 8))
        self.register_buffer("v", torch.zeros(2, 2, 64, 8))

    def forward(self, ids: Tensor, start: int) -> Tensor:
        q, k, v = self.project(self.embed(ids)).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(3, 1)
        end = start + ids.shape[1]
        self.write(self.k, start, k)
        self.write(self.v, start, v)
        mask = torch.arange(end) <= torch.arange(start, end)[:, None]
        return F.scaled_dot_product_attention(q, self.k[:, :, :end], self.v[:, :, :end], attn_mask=mask)


PREALLOCATED: dict[str, Callable[[Tensor, int, Tensor], object]] = {
    "copy_": lambda cache, start, new: cache[:, :, start : start + new.shape[2]].copy_(new),
    "narrow": lambda cache, start, new: cache.narrow(2, start, new.shape[2]).copy_(new),
    "select": lambda cache, start, new: cache.select(0, 0)[:, start : start + new.shape[2]].copy_(new[0]),
}


@pytest.mark.parametrize("how", PREALLOCATED)
def test_a_preallocated_cache_is_refused_however_it_is_written(how: str) -> None:
    backend = kvpass.backend("streaming", budget=6, inner="eager")
    compiled = torch.compile(Preallocated(PREALLOCATED[how]), backend=backend)

    def converse() -> None:
        for start, end in PIECES:
            compiled(IDS[:, start:end].contiguous(), start)

    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="cannot be rewritten"):
        converse()


class AllocatedByPrompt(nn.Module):
    """Attention on a cache of fixed size that the prompt allocates, attends to as a whole, and returns."""

    def __init__(self, write: Callable[[Tensor, int, Tensor], object], returned: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.returned, self.embed, self.project = write, returned, nn.Embedding(16, 16), nn.Linear(16, 48)

    def forward(self, ids: Tensor, start: int, past: Any = None) -> Any:
        q, k, v = self.project(self.embed(ids)).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(3, 1)
        keys, values = past[0] if past is not None else (torch.zeros(2, 2, 64, 8), torch.zeros(2, 2, 64, 8))
        self.write(keys, start, k)
        self.write(values, start, v)
        mask = torch.arange(64) <= torch.arange(start, start + ids.shape[1])[:, None]
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return attended, [(self.returned(keys), self.returned(values))]


@pytest.mark.parametrize("returned", [lambda x: x, lambda x: x.view(4, 64, 8)], ids=["whole", "view"])
@pytest.mark.parametrize("how", PREALLOCATED)
def test_a_cache_of_fixed_size_that_the_prompt_allocates_is_refused(
    how: str, returned: Callable[[Tensor], Tensor]
) -> None:
    backend = kvpass.backend("streaming", budget=6, inner="eager")
    compiled = torch.compile(AllocatedByPrompt(PREALLOCATED[how], returned), backend=backend)
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="cannot be rewritten"):
        compiled(IDS[:, :6].contiguous(), 0)


class FilledInPlace(nn.Module):
    """Attention whose new keys are written in place, by `fill`, before they are stored or attended to."""

    def __init__(self, fill: Callable[[Tensor, Tensor], Tensor], dim: int, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fill, self.dim, self.late, self.embed, self.project = (
            fill,
            dim,
            late,
            nn.Embedding(16, 16),
            nn.Linear(16, 48),
        )

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        seen = 0 if past is None else past[0][0].shape[self.dim]
        i = torch.arange(seen, seen + ids.shape[1])
        q, k, v = self.project(self.embed(ids)).unflatten(-1, (-1, 8)).chunk(3, 2)
        k, turn = self.fill(k, (i[:, None, None] * 0.1).cos()), (1, 2) if self.dim == 2 else (0, 0)
        k, v = k.transpose(*turn), v.transpose(*turn)
        if past is not None:
            k, v = torch.cat([past[0][0], k], self.dim), torch.cat([past[0][1], v], self.dim)
        read, values = (x if self.dim == 2 else x.transpose(1, 2) for x in (k * 1.0 if self.late else k, v))
        if self.late:
            k[..., 0] = 7.0
        mask = torch.arange(k.shape[self.dim]) <= i[:, None]
        return F.scaled_dot_product_attention(q.transpose(1, 2), read, values, attn_mask=mask).transpose(1, 2), [(k, v)]


def of_pairs(k: Tensor, turn: Tensor) -> Tensor:
    out = torch.empty_like(k)
    out[..., ::2], out[..., 1::2] = k[..., ::2] * turn, k[..., 1::2] - turn
    return out


def of_a_part(k: Tensor, turn: Tensor) -> Tensor:
    out = k.clone()
    out[..., :4] = out[..., :4] * turn
    return out


def of_halves(k: Tensor, turn: Tensor) -> Tensor:
    out = torch.zeros(k.shape)
    out[..., :4].copy_(k[..., :4] * turn)
    out.narrow(-1, 4, 4).add_(k[..., 4:])
    return out


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("fill", [of_pairs, of_a_part, of_halves])
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_new_keys_may_be_written_in_place_before_they_are_stored(
    fill: Callable[[Tensor, Tensor], Tensor], dim: int, policy: str
) -> None:
    assert judge(Case(FilledInPlace(fill, dim)), policy).kind == "held"


@pytest.mark.parametrize("dim", [1, 2])
def test_new_keys_that_are_written_after_attention_has_read_them_are_refused(dim: int) -> None:
    found = judge(Case(FilledInPlace(of_pairs, dim, late=True)))
    assert (found.kind, "call 0" in found.detail) == ("refused", True)
    assert "is updated at" in found.detail


class Counting(Small):
    """A model that counts its tokens in a tensor of the caller."""

    def forward(self, ids: Tensor, past: Any = None, counts: Any = None, **inputs: Any) -> Any:
        x, present = super().forward(ids, past, **inputs)
        x = x * (1 + 0.1 * counts.sum(-1))[:, None, None]
        counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=counts.dtype))
        return x, present


@pytest.mark.parametrize(
    "made",
    [lambda: torch.zeros(2, 16), lambda: torch.zeros(2, 32)[:, :16], lambda: torch.zeros(4, 16)[:2]],
    ids=["whole", "columns", "rows"],
)
def test_a_tensor_of_the_caller_is_written_also_if_it_is_a_view(made: Callable[[], Tensor]) -> None:
    model = Counting(plain)
    ours, counts, expected = copy.deepcopy(model), made(), made()
    kvpass.compile(ours, "full", inner="eager")
    check_equal(
        lambda ids, past: model(ids, past, counts=expected),  # type: ignore[arg-type]
        lambda ids, past: ours(ids, past, counts=counts),
    )
    torch.testing.assert_close(counts, expected)


class Remembering(Small):
    """A model that adds to a memory of the caller, whose length differs from conversation to conversation."""

    def forward(self, ids: Tensor, past: Any = None, memory: Any = None, **inputs: Any) -> Any:
        x, present = super().forward(ids, past, **inputs)
        y = x + memory.mean(1)[:, None, None]
        memory.add_(0.1 * x.mean((1, 2))[:, None])
        return y, present


def test_writes_to_a_tensor_of_the_caller_are_kept_or_refused() -> None:
    """Check a memory of a second length, of which a step would get a copy, as its strides are dynamic then."""
    model = Remembering(plain)
    ours = torch.compile(copy.deepcopy(model), backend=kvpass.backend("full", inner="eager"))

    def converse(length: int) -> None:
        memory, expected = torch.zeros(2, length), torch.zeros(2, length)
        check_equal(
            lambda ids, past: model(ids, past, memory=expected),  # type: ignore[arg-type]
            lambda ids, past: ours(ids, past, memory=memory),
        )
        torch.testing.assert_close(memory, expected)

    converse(4)
    with pytest.raises(kvpass.UnsupportedGraph, match="writes in place to an input whose sizes change"):
        converse(6)


class Drifting(nn.Module):
    """Rotary attention whose frequencies change a little in each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.project = nn.Embedding(16, 16), nn.Linear(16, 48)
        self.register_buffer("frequency", 1 / 10.0 ** torch.arange(0, 1, 0.25))

    def rotated(self, x: Tensor, i: Tensor) -> Tensor:
        angle = i[None, None, :, None].float() * self.frequency
        angle = torch.cat([angle, angle], -1)
        one, two = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        q, k, v = self.project(self.embed(ids)).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(3, 1)
        before = 0 if past is None else past[0].shape[2]
        i = torch.arange(before, before + ids.shape[1])
        q, k = self.rotated(q, i), self.rotated(k, i)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mask = torch.arange(k.shape[2]) <= i[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2), (k, v)


@torch.no_grad()
def calls_of(model: Drifting, step: float) -> Iterator[int]:
    """Yield the number of each call of a conversation, after which the frequencies change."""
    past, backend = None, kvpass.backend("streaming", budget=32, inner="eager", positions="cache")
    compiled = torch.compile(model, backend=backend)
    for call in range(12):
        _, past = compiled(IDS[:, call : call + 1] if call else IDS[:, :4], past)
        yield call
        model.frequency.mul_(1 - step)


def test_frequencies_that_stay_are_allowed() -> None:
    assert list(calls_of(Drifting(), 0.0)) == list(range(12))


@pytest.mark.parametrize("step", [1e-7, 1.5e-7])
def test_frequencies_that_drift_slowly_are_noticed(step: float) -> None:
    """Check that differences which are small in each call do not add up without notice."""
    calls = calls_of(Drifting(), step)
    assert [next(calls), next(calls)] == [0, 1]  # one small difference is rounding
    with pytest.raises(kvpass.UnsupportedGraph, match="rotates keys by other angles"):
        list(calls)
