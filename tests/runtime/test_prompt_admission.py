"""Test how the layers of a prompt share the budget, and that a prompt's parts and rows are admitted as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import kvpass
import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.backend import Backend
from kvpass.cache.admission import TokensToAdmit
from kvpass.cache.layer_cache import LayerCache
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Attention
from kvpass.policies.window import Window
from kvpass.runtime.call_context import pinning
from kvpass.runtime.padding_tracker import true_indices
from tests.architectures import zoo
from tests.models import prompt
from tests.runtime.prompts import HEADS, admitted, content, pending_prompt, positions, rows_of, valid_rows

CROP = 6
WHOLE_OPTIONS: dict[str, dict[str, Any]] = {
    "streaming": {"sinks": 2}, "window": {}, "knorm": {}, "h2o": {}, "tova": {}, "snapkv": {"window": 2}, "roco": {},
    "cascade": {"cascades": 2, "sinks": 2}, "d2o": {"sinks": 1},
}  # fmt: skip
BY_TOKEN = ["streaming", "window", "knorm"]
"""Policies whose choice among tokens does not depend on the order in which they were admitted."""


def backend(policy: str, budget: float = 8, **options: Any) -> Backend:
    return kvpass.backend(policy, budget=budget, inner="eager", **{**WHOLE_OPTIONS.get(policy, {}), **options})


padded = st.lists(st.integers(0, 5), min_size=1, max_size=3)
some_policies = pytest.mark.parametrize("policy", WHOLE_OPTIONS)


def state_of(cache: LayerCache) -> tuple[Any, ...]:
    tensors = [tensor.tolist() for tensor in cache.slots.metadata]
    return cache.layout, cache.length, cache.row_budgets, cache.clocks, cache.absent.tolist(), tensors, content(cache)


@pytest.mark.few(5)
@some_policies
@given(length=st.integers(8, 24), cropped=st.integers(1, CROP), padding=padded, budget=st.sampled_from([8, 0.6]))
def test_a_cropped_prompt_is_a_shorter_prompt(
    policy: str, length: int, cropped: int, padding: list[int], budget: float
) -> None:
    chosen = backend(policy, budget, crop=CROP)
    caches = admitted(chosen, length, padding)
    expected = admitted(chosen, length - cropped, padding)
    for cache, shorter in zip([cache.crop(cropped, "keys") for cache in caches], expected, strict=True):
        assert state_of(cache) == state_of(shorter)


@pytest.mark.few(5)
@some_policies
@given(length=st.integers(10, 24), padding=padded, budget=st.sampled_from([8, 0.6]))
def test_a_row_of_a_batch_is_as_alone(policy: str, length: int, padding: list[int], budget: float) -> None:
    chosen = backend(policy, budget)
    together = admitted(chosen, length, padding)
    for row in range(len(padding)):
        alone = admitted(chosen, length, padding, only_row=row)
        for cache, single in zip(together, alone, strict=True):
            heads = slice(HEADS * row, HEADS * (row + 1))
            assert positions(cache)[heads] == positions(single)
            for tokens, expected in zip(content(cache)[heads], content(single), strict=True):
                torch.testing.assert_close(tokens, expected, atol=1e-5, rtol=1e-5)
            assert cache.row_budgets[row] == single.row_budgets[0]
            assert (cache.clocks or single.clocks)[: row + 1][-1:] == (single.clocks or cache.clocks)[:1]


def admit_part(cache: LayerCache, layer: int, start: int, stop: int, padding: list[int], pins: Pins | None) -> None:
    """Admit tokens of a prompt to a cache as the runtime does with the results of a chunk's graph."""
    store = kvpass.backend("full").kv_store
    _, key, value = (tensor[:, :, start:stop] for tensor in rows_of(layer, stop, padding))
    valid = valid_rows(stop, padding)[:, start:]
    site: Any = None  # read for statistics alone
    with pinning(pins):
        if pins is not None:
            store.make_room_for_pins(cache, pins)
        store.admit_step(cache, site, [key, value, valid])
    cache.absent = torch.cat([cache.absent, true_indices(~valid, start)], 1)
    cache.length = stop


@pytest.mark.parametrize("policy", BY_TOKEN)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    padding=padded,
    pinned=st.sampled_from([None, "inside", "on top"]),
    seed=st.integers(0, 99),
)
def test_a_prompt_in_parts_is_admitted_as_the_whole_prompt(
    policy: str, lengths: list[int], padding: list[int], pinned: str | None, seed: int
) -> None:
    chosen, length, on_top = backend(policy), sum(lengths), pinned == "on top"
    mask = torch.zeros(len(padding), length, dtype=torch.bool)
    if pinned:
        drawn = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1) < 3
        mask = drawn & valid_rows(length, padding)
    whole = admitted(chosen, length, padding, pins=mask if pinned else None, on_top=on_top)
    first = lengths[0]
    parts = admitted(chosen, first, padding, pins=mask[:, :first] if pinned else None, on_top=on_top)
    for layer, cache in enumerate(parts):
        start = first
        for count in lengths[1:]:
            pins = Pins.of(mask, start, start + count, on_top) if pinned else None
            admit_part(cache, layer, start, start + count, padding, pins)
            start += count
        assert content(cache) == content(whole[layer])
        assert (cache.length, cache.row_budgets) == (length, whole[layer].row_budgets)
        assert [sorted(set(row) - {-1}) for row in cache.absent.tolist()] == [
            sorted(set(row) - {-1}) for row in whole[layer].absent.tolist()
        ]


@given(length=st.integers(9, 24), padding=padded, budget=st.sampled_from([8, 0.4]))
def test_a_plan_gives_each_layer_its_budget(length: int, padding: list[int], budget: float) -> None:
    """Test `pyramid_kv`, whose lower layers get more slots; no row keeps more than its own budget in a layer."""
    caches = admitted(backend("pyramid_kv", budget, window=2, beta=2), length, padding, windows=[None] * 4)
    budgets = [cache.row_budgets for cache in caches]
    assert budgets == sorted(budgets, reverse=True)
    for cache in caches:
        counts = [len(row) for row in positions(cache)]
        real = [length - left for left in padding for _ in range(HEADS)]
        limits = [limit for limit in cache.row_budgets for _ in range(HEADS)]
        assert counts == [min(pair) for pair in zip(real, limits, strict=True)]
        assert cache.layout.row_budgets


@given(length=st.integers(2, 24), window=st.integers(1, 30))
@example(length=12, window=8)
@example(length=12, window=9)
def test_a_layer_with_a_window_of_its_own_evicts_only_if_the_window_exceeds_the_budget(
    length: int, window: int
) -> None:
    chosen = backend("h2o")
    caches = admitted(chosen, length, windows=[None, window])
    assert caches[0].layout.policy is chosen.policy
    governed = window > 8
    assert caches[1].layout.policy == (chosen.policy if governed else Window())
    assert (caches[1].layout.budget, caches[1].window) == (8 if governed else window, window)
    if not governed:
        assert positions(caches[1]) == [list(range(max(0, length - window), length))] * HEADS


def test_layers_are_released_as_they_are_admitted_unless_the_prompt_can_be_cropped() -> None:
    for crop in (0, CROP):
        pending = pending_prompt(backend("streaming", crop=crop), 12)
        before = list(pending.layers)
        numbers = [cache.number for cache in pending.admit_layers()]
        assert numbers == sorted(numbers)
        assert pending.layers == (before if crop else [None, None])


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_budget_of_a_policy_that_keeps_all_is_refused() -> None:
    assert positions(admitted(backend("full", 12), 12)[0]) == [list(range(12))] * HEADS
    with pytest.raises(BudgetError, match="keeps every token: a prompt of 13 exceeds its budget of 12"):
        admitted(backend("full", 12), 13)


def test_layers_of_different_budgets_cannot_count_positions_by_cache() -> None:
    chosen = backend("pyramid_kv", 8, window=2, beta=2, positions="cache")
    with pytest.raises(PolicyError, match="gives the layers different budgets"):
        admitted(chosen, 24, windows=[None] * 4)
    with pytest.raises(PolicyError, match="gives the layers different budgets"):
        admitted(backend("streaming", positions="cache"), 24, windows=[None, 4])


def test_a_window_within_the_budgets_of_some_rows_is_refused() -> None:
    shares = backend("h2o", 0.5)
    with pytest.raises(BudgetError, match=r"gives the rows \[10, 6\] tokens, .* sliding window of 8 tokens"):
        admitted(shares, 20, (0, 8), windows=[None, 8])
    for window in (6, 11):
        assert len(admitted(shares, 20, (0, 8), windows=[None, window])) == 2


@torch.no_grad()
def test_a_window_of_the_models_own_within_the_share_of_some_rows_is_refused() -> None:
    """Test a window of eight tokens, with shares of six tokens for one row and ten for another."""
    ids, mask = prompt(2, 20, (8, 0))
    model = torch.compile(zoo.build("mistral"), backend=kvpass.backend("h2o", budget=0.5, inner="eager"))
    with pytest.raises(kvpass.BudgetError, match=r"gives the rows \[6, 10\] tokens, .* sliding window of 7 tokens"):
        model(ids, attention_mask=mask, use_cache=True)


def test_a_chunk_has_the_statistics_of_its_first_tokens_after_a_crop() -> None:
    layer = pending_prompt(backend("h2o", crop=CROP), 12).layers[0]
    shorter, expected = layer.crop(4, 8), pending_prompt(backend("h2o", crop=CROP), 8).layers[0]
    assert isinstance(shorter.tokens, TokensToAdmit)
    for attention in (shorter.tokens.attention, expected.tokens.attention):
        assert isinstance(attention, Attention)
    torch.testing.assert_close(shorter.tokens.attention.total, expected.tokens.attention.total)
