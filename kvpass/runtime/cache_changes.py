"""Change the layer caches between graphs: more slots, other layouts, the admission of a chunk."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.admission import TokensToAdmit, admit
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.slots import AnySlots, Slots
from kvpass.errors import BudgetError
from kvpass.runtime.clocks import clocks_after
from kvpass.torch_private import dynamo
from kvpass.user_budget import slots_for


def mark_addresses_static(slots: AnySlots) -> None:
    for tensor in slots.tensors():
        dynamo.mark_static_address(tensor)


def grow_for(caches: list[LayerCache], query_len: int) -> None:
    """Double the slots of policies that never evict when `query_len` new tokens exceed slots without a budget.

    Every entry to a step calls this once, before anything that depends on layouts or slots.
    """
    for cache in caches:
        layout, backend = cache.layout, cache.backend
        if layout.policy.evicts or cache.length + query_len <= layout.capacity:
            continue
        if layout.policy is backend.policy and backend.budget is not None:
            raise BudgetError(
                f"policy {layout.policy.name!r} keeps every token and its budget of {layout.budget} is full: "
                "raise the budget, leave it out, or choose a policy that evicts"
            )
        capacity = slots_for(layout.policy, None, cache.length + query_len)
        change_layout(cache, budget=capacity, capacity=capacity)
        cache.row_budgets = (capacity,) * layout.batch


def equalize_layouts(one: LayerCache, other: LayerCache) -> None:
    """Give one layer of two conversations the same state, and the larger of both capacities if it may vary."""
    layouts = (one.layout, other.layout)
    pins, row_budgets = any(layout.pins for layout in layouts), any(layout.row_budgets for layout in layouts)
    most = max(layout.capacity for layout in layouts)
    for cache in (one, other):
        grows = cache.layout.exact_capacity or row_budgets
        change_layout(cache, pins=pins, row_budgets=row_budgets, capacity=most if grows else cache.layout.capacity)


def change_layout(cache: LayerCache, **changes: Any) -> None:
    """Change fields of a cache's layout: its capacity, which may only grow, or the entries of its state."""
    layout, slots = dataclasses.replace(cache.layout, **changes), cache.slots
    if layout == cache.layout:
        return
    assert isinstance(slots, Slots)  # layouts with classes of heads do not change
    slots = slots.with_state_of(layout, cache.row_budgets)
    cache.layout, cache.slots = layout, slots.enlarge(layout) if slots.capacity < layout.capacity else slots
    mark_addresses_static(cache.slots)


def admit_chunk(cache: LayerCache, chunk: TokensToAdmit, into: AnySlots | None) -> None:
    """Admit a chunk to the cache's slots, and update its clocks; see `admit`."""
    before = cache.slots
    cache.slots = admit(cache.layout, before, chunk, cache.row_budgets, into)
    if cache.slots is not before:
        mark_addresses_static(cache.slots)
    cache.row_budgets = chunk.raised_budgets(cache.layout.policy, cache.row_budgets)
    cache.clocks = clocks_after(cache.layout, cache.clocks, chunk.valid, cache.row_budgets)


def longer_placeholder(past: Tensor, dim: int, count: int) -> Tensor:
    """Return a NaN placeholder for `past` that is `count` longer along `dim`.

    The placeholder is an expanded scalar without memory for its elements, because no graph may read its values.
    """
    shape = list(past.shape)
    shape[dim] += count
    empty = past.new_full((), torch.nan).expand(shape)
    dynamo.mark_dynamic_dim(empty, dim)
    return empty
