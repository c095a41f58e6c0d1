"""Test hand-written models that cache keys and values as [B, S, H, D]."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvpass
from kvpass.cache.handle import Handle
from tests import on_reference
from tests.drawing import EXAMPLES
from tests.own_llama import ATTENDS, ROTATES, Output, OwnLlama, Way

HEADS_FIRST = Way(2, 2)


def tokens(rows: int, count: int) -> Tensor:
    return torch.randint(0, 128, (rows, count), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def fed(model: Any, ids: Tensor, pieces: Sequence[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """Return the logits of all tokens, fed in pieces from an empty cache, and the cache."""
    logits, cache, start = [], None, 0
    for count in pieces:
        stop = start + count
        given: dict[str, Any] = {}
        if mask is not None:
            position = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
            given = dict(attention_mask=mask[:, :stop].contiguous(), position_ids=position.contiguous())
        out = model(ids[:, start:stop].contiguous(), past_key_values=cache, **given)
        logits, cache, start = [*logits, out.logits], out.past_key_values, stop
    return torch.cat(logits, 1), cache


def compiled(model: OwnLlama, policy: str = "full", **settings: Any) -> Any:
    torch._dynamo.reset()
    settings = {"inner": "eager", **settings}
    return torch.compile(model, backend=on_reference.backend(policy, **settings))


def both(way: Way, **sizes: Any) -> tuple[OwnLlama, OwnLlama]:
    """Return the model, and the same model with caches [B, H, S, D]."""
    model = OwnLlama(way, **sizes)
    other = OwnLlama(Way(2, 2, way.attend, way.rotate, way.empty, way.late), **sizes)
    other.load_state_dict(model.state_dict())
    return model, other


WAYS = [*(Way(attend=attend) for attend in ATTENDS), Way(rotate="complexes"), Way(empty=True), Way(2, 1), Way(1, 2)]


@pytest.mark.few(7)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, dataclasses.astuple(way))))
def test_until_something_is_evicted_it_is_the_uncompiled_model(way: Way) -> None:
    """Test a prompt, steps and a chunk, with padded rows."""
    model, ids = OwnLlama(way), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    pieces = (5, 1, 1, 3, 1, 1)
    for padding in (None, mask):
        ours, cache = fed(compiled(model, "h2o", budget=16), ids, pieces, padding)
        theirs, shown = fed(model, ids, pieces, padding)
        real = mask.bool() if padding is not None else torch.ones_like(ids).bool()
        assert torch.allclose(ours[real], theirs[real], atol=1e-5)
        assert all(isinstance(part, Handle) for pair in cache for part in pair)
        assert [part.shape for pair in cache for part in pair] == [part.shape for pair in shown for part in pair]


@settings(max_examples=max(4, EXAMPLES // 2))
@given(
    way=st.builds(
        Way,
        key_dim=st.sampled_from([1, 1, 1, 2]),
        value_dim=st.just(1),
        attend=st.sampled_from(list(ATTENDS)),
        rotate=st.sampled_from(list(ROTATES)),
        empty=st.booleans(),
    ),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 4),
    rows=st.integers(1, 2),
    pieces=st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=2, max_size=3),
)
def test_generated_shapes(way: Way, groups: int, kv_heads: int, rows: int, pieces: list[int]) -> None:
    """Test prompts of one token, prompts with as many tokens as heads, and single heads."""
    heads, ids = groups * kv_heads, tokens(rows, sum(pieces))
    model = OwnLlama(way, width=8 * heads, heads=heads, kv_heads=kv_heads)
    ours, cache = fed(compiled(model), ids, pieces)
    assert torch.allclose(ours, fed(model, ids, pieces)[0], atol=1e-5)
    assert all(isinstance(part, Handle) for pair in cache for part in pair)


def test_keys_that_are_computed_from_the_cache() -> None:
    """Test keys that are normalized at every read; the prompt has no concatenation."""
    model, ids, pieces = OwnLlama(Way(late=True)), tokens(2, 10), (5, 1, 1, 2, 1)
    ours, cache = fed(compiled(model, "h2o", budget=16), ids, pieces)
    assert torch.allclose(ours, fed(model, ids, pieces)[0], atol=1e-5)
    assert all(isinstance(part, Handle) for pair in cache for part in pair)


POLICIES: dict[str, dict[str, Any]] = {
    "h2o": {},
    "streaming": {"positions": "cache"},
    "snapkv": {"window": 3, "kernel": 3},
    "tova": {},
}


@pytest.mark.few(5)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inner", ["eager", "reference"])
def test_eviction_does_not_depend_on_the_order_of_dimensions(policy: str, inner: str) -> None:
    """Check that the same tokens are held as with caches [B, H, S, D], on slots and by the reference."""
    pieces, ids = (9, 1, 1, 4, 1, 1), tokens(2, 17)
    settings = dict(budget=8, inner=inner, **POLICIES[policy])
    held = []
    for model in both(Way()):
        logits, cache = fed(compiled(model, policy, **settings), ids, pieces)
        held.append((logits, [layer.positions for layer in kvpass.inspect(cache).layers]))
    (ours, mine), (theirs, others) = held
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(mine, others, strict=True))


def test_positions_in_the_cache() -> None:
    """Check keys that are stored before their rotation, which the model applies as [B, S, H, D]."""
    ids = tokens(1, 12)
    for count in (5, 2):  # 2 tokens equal the number of heads
        model = compiled(OwnLlama(Way()), "streaming", budget=8, positions="cache")
        ours, cache = fed(model, ids, (count, *[1] * 6))
        other = compiled(OwnLlama(HEADS_FIRST), "streaming", budget=8, positions="absolute")
        theirs, _ = fed(other, ids, (count, *[1] * 6))
        assert kvpass.inspect(cache).layers
        assert torch.allclose(ours[:, : 8 - 1], theirs[:, : 8 - 1], atol=1e-5)


@pytest.mark.slow
def test_generated_code() -> None:
    model, ids, pieces = OwnLlama(Way()), tokens(1, 12), (5, 1, 1, 3, 1, 1)
    ours, _ = fed(compiled(model, "h2o", budget=16, inner="inductor"), ids, pieces)
    assert torch.allclose(ours, fed(model, ids, pieces)[0], atol=1e-5)


def test_rows_are_selected_copied_and_cropped() -> None:
    model, ids = OwnLlama(Way()), tokens(2, 12)
    run = compiled(model, "h2o", budget=16, crop=4)
    _, cache = fed(run, ids, (5, 1, 1, 1))
    kept = copy.deepcopy(cache)
    swapped = [tuple(part.index_select(0, torch.tensor([1, 0])) for part in pair) for pair in cache]
    cropped = [tuple(part[:, :6] for part in pair) for pair in cache]
    assert [tuple(part.shape) for part in cropped[0]] == [(2, 6, 2, 8)] * 2
    expected, _ = fed(model, ids, (6, 2))
    with torch.no_grad():
        after = run(ids[:, 6:8], past_key_values=tuple(cropped)).logits
        assert torch.allclose(after, expected[:, 6:8], atol=1e-5)
        _, plain = fed(model, ids, (8,))
        wanted = model(ids[:, 8:9], past_key_values=plain).logits
        assert torch.allclose(run(ids[:, 8:9], past_key_values=kept).logits, wanted, atol=1e-5)
        assert torch.allclose(run(ids[[1, 0], 8:9], past_key_values=tuple(swapped)).logits, wanted[[1, 0]], atol=1e-5)


def test_a_saved_cache_goes_on(tmp_path: Path) -> None:
    model, ids = OwnLlama(Way()), tokens(1, 12)
    run = kvpass.compile(copy.deepcopy(model), "h2o", budget=16, inner="eager")
    _, cache = fed(run, ids, (5, 1, 1))
    kvpass.save_cache(cache, tmp_path / "cache")
    loaded = kvpass.load_cache(tmp_path / "cache", run)
    assert [part.shape for pair in loaded for part in pair] == [part.shape for pair in cache for part in pair]
    with torch.no_grad():
        expected = run(ids[:, 7:8], past_key_values=cache).logits
        assert torch.equal(run(ids[:, 7:8], past_key_values=loaded).logits, expected)


def test_a_decode_loop() -> None:
    model, ids = OwnLlama(Way(), layers=2), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    made = []
    for each in (model, both(Way(), layers=2)[1]):
        torch._dynamo.reset()
        loop = kvpass.DecodeLoop(each, "h2o", budget=8, inner="eager")
        loop.prompt(ids, mask)
        made.append((loop.generate(12), loop.cache[0][0].shape))
    (ours, shape), (theirs, other) = made
    assert torch.equal(ours, theirs)
    assert (shape[1], shape[2]) == (other[2], other[1])


def test_a_prompt_that_ran_uncompiled_is_adopted() -> None:
    model, ids = OwnLlama(Way()), tokens(1, 12)
    run = compiled(model, "streaming", budget=16)
    with torch.no_grad():
        out = model(ids[:, :5])
        later = [run(ids[:, 5:7], past_key_values=out.past_key_values)]
        later.append(run(ids[:, 7:8], past_key_values=later[-1].past_key_values))
    expected, _ = fed(model, ids, (5, 2, 1))
    assert torch.allclose(torch.cat([each.logits for each in later], 1), expected[:, 5:8], atol=1e-5)
    assert isinstance(later[-1].past_key_values[0][0], Handle)


# -- refusals ----------------------------------------------------------------------------------------------


def refusal(model: Any, pieces: Sequence[int] = (5, 1, 1)) -> str:
    with pytest.raises(kvpass.KVPassError, match=r"\.py:\d+|cache") as error:
        fed(compiled(model), tokens(2, sum(pieces)), pieces)
    return str(error.value)


class Elsewhere(OwnLlama):
    """A layer whose cache has its tokens along another dimension, or is read through `pick`."""

    def __init__(self, dim: int = 1, pick: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__(Way())
        self.dim_of_tokens, self.pick = dim, pick

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **_: Any) -> Output:  # type: ignore[override]
        layer, past, dim = self.layers[0], past_key_values, self.dim_of_tokens
        x = layer.norm(self.embed(input_ids))
        q, k, v = (each(x).unflatten(-1, (-1, 8)) for each in (layer.q, layer.k, layer.v))
        k, v = k.movedim(1, dim), v.movedim(1, dim)
        if past is not None:
            k, v = torch.cat([past[0][0], k], dim), torch.cat([past[0][1], v], dim)
        keys, values = self.pick(k.movedim(dim, 1)), self.pick(v.movedim(dim, 1))
        i, j = torch.arange(k.shape[dim] - q.shape[1], k.shape[dim]), torch.arange(keys.shape[1])
        attended = ATTENDS["sdpa"](q, keys, values, (j <= i[:, None])[None, None])
        return Output(self.head(attended.flatten(2)), ((k, v),))


@pytest.mark.parametrize("dim", [0, 3])
def test_tokens_along_other_dimensions_are_refused(dim: int) -> None:
    assert "not a concatenation along dimension -2 of [B, H, S, D] or 1 of [B, S, H, D]" in refusal(Elsewhere(dim))


@pytest.mark.parametrize("pick", [lambda x: x.flip(2), lambda x: x.repeat(1, 1, 2, 1)])
def test_heads_in_another_order_are_computed_from_the_cache(pick: Callable[[Tensor], Tensor]) -> None:
    model, pieces = Elsewhere(pick=pick), (5, 1, 1)
    ours, _ = fed(compiled(model), tokens(2, 7), pieces)
    assert torch.allclose(ours, fed(model, tokens(2, 7), pieces)[0], atol=1e-5)


def test_a_part_of_the_tokens_is_refused() -> None:
    assert "prunes or pools its keys" in refusal(Elsewhere(pick=lambda x: x[:, -4:]))


def test_a_window_that_the_model_cuts_from_its_cache_is_refused() -> None:
    """Test a window of a cache [B, S, H, D], which is not supported."""

    class Windowed(Elsewhere):
        def forward(self, input_ids: Tensor, past_key_values: Any = None, **_: Any) -> Output:  # type: ignore[override]
            out = super().forward(input_ids, past_key_values)
            cut = tuple((key[:, -6:], value[:, -6:]) for key, value in out.past_key_values)
            return Output(out.logits, cut)

    assert "not a concatenation with the past" in refusal(Windowed())


def test_a_cache_of_the_other_order_is_refused() -> None:
    """Test as many tokens as heads, where shapes do not show the order."""
    model, other = both(Way(), heads=4, kv_heads=4)
    torch._dynamo.reset()
    chosen, ids = kvpass.backend("full", inner="eager"), tokens(1, 8)
    run, otherwise = (torch.compile(each, backend=chosen) for each in (model, other))
    with torch.no_grad():
        _, cache = fed(run, ids, (3, 1))
        otherwise(ids[:, :2], past_key_values=fed(otherwise, ids, (4,))[1])
        with pytest.raises(kvpass.CacheHandleError, match="in another dimension"):
            otherwise(ids[:, 4:6], past_key_values=cache)
