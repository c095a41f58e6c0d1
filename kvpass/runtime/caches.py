"""What is done to caches around the graphs: room, counts, clocks, and the tokens of a chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import budget as budgets
from kvpass.cache.handle import LayerCache
from kvpass.cache.slots import Chunk, Layout, Slots, admit
from kvpass.errors import BudgetError
from kvpass.policies.base import Policy
from kvpass.torch_private import dynamo


def keep_address(slots: Slots) -> None:
    for tensor in slots.tensors():
        dynamo.mark_in_place(tensor)


def make_room(cache: LayerCache, queries: int) -> None:
    """A policy that never evicts needs a slot for every token: double the slots, or say that the budget is spent."""
    layout, backend = cache.layout, cache.backend
    if layout.policy.evicts or cache.seen + queries <= layout.capacity:
        return
    if layout.policy is backend.policy and backend.budget is not None:
        raise BudgetError(
            f"policy {layout.policy.name!r} keeps every token and its budget of {layout.budget} is full; "
            "give it more, or none, or choose a policy that evicts"
        )
    capacity = budgets.slots_for(layout.policy, None, cache.seen + queries)
    _grow(cache, dataclasses.replace(layout, budget=capacity, capacity=capacity))
    cache.limits = (capacity,) * layout.batch


def even_out(one: LayerCache, other: LayerCache) -> None:
    """Give the same layer of two conversations as many slots as either has, if their capacities are their own."""
    most = max(one.layout.capacity, other.layout.capacity)
    for cache in (one, other):
        if cache.layout.exact_capacity and cache.layout.capacity < most:
            _grow(cache, dataclasses.replace(cache.layout, capacity=most))


def _grow(cache: LayerCache, layout: Layout) -> None:
    cache.layout, cache.slots = layout, cache.slots.grown(layout)
    keep_address(cache.slots)


def tick(
    caches: list[LayerCache], valid: Sequence[Sequence[bool] | None] | None = None
) -> tuple[bool, list[tuple[Any, ...]]]:
    """Whether this step is one with the policy's sweep, from the host's counts, and the counts after it.

    Args:
        valid: for each layer which rows' tokens are not padding, which does not count; None for all.
    """
    if not any(cache.clocks for cache in caches):
        return False, [()] * len(caches)
    known: dict[Any, list[tuple[bool, Any]]] = {}  # layers mostly count alike
    ticked = []
    for cache, rows in zip(caches, valid or [None] * len(caches), strict=True):
        alike = (id(cache.layout.policy), cache.limits, cache.clocks, None if rows is None else tuple(rows))
        known[alike] = known.get(alike) or _ticked(cache, rows)
        ticked.append(known[alike])
    compact = any(due for layer in ticked for due, _ in layer)
    return compact, [tuple(clock for _, clock in layer) for layer in ticked]


def _ticked(cache: LayerCache, valid: Sequence[bool] | None) -> list[tuple[bool, Any]]:
    """For each row whether its sweep is due, and its clock afterwards; the reference counts by itself."""
    if not cache.clocks:
        return []
    tick, counts = cache.layout.policy.tick, valid or [True] * len(cache.clocks)
    rows = zip(cache.clocks, cache.limits, counts, strict=True)
    return [tick(clock, limit) if new else (False, clock) for clock, limit, new in rows]


def kind(caches: list[LayerCache]) -> Any:
    """What a step of one token depends on beside the contents of tensors; equal for two that can replace each other."""
    compact, _ = tick(caches)
    windows = tuple(cache.stored < cache.seen for cache in caches if cache.window is not None)
    return compact, windows, tuple(id(cache.slots) for cache in caches), dynamo.hooks_so_far()


def count(caches: list[LayerCache], queries: int, clocks: Sequence[tuple[Any, ...]]) -> None:
    """What the host knows of a conversation, after so many more tokens."""
    for cache, clock in zip(caches, clocks, strict=True):
        cache.interrupted = False
        cache.seen += queries
        if queries == 1:
            cache.clocks = clock


def keeps_clock(policy: Policy) -> bool:
    """Whether the host counts for a policy."""
    return bool(policy.clock((), 1, 1 << 30))


def valid_counts(policy: Policy, valid: Tensor) -> list[int]:
    """Real tokens of each row, for policies that keep a clock; reading them waits for the device."""
    if not keeps_clock(policy):
        return []
    counts: list[int] = valid.sum(-1).tolist()
    return counts


def take_in(cache: LayerCache, chunk: Chunk, into: Slots | None = None) -> None:
    """Take in a chunk; see `admit`."""
    policy, before = cache.layout.policy, cache.slots
    cache.slots = admit(cache.layout, before, chunk, cache.limits, into)
    if cache.slots is not before:
        keep_address(cache.slots)
    counts = valid_counts(policy, chunk.valid)
    rows = zip(cache.clocks, counts, cache.limits, strict=False)
    cache.clocks = tuple(policy.clock(clock, new, limit) for clock, new, limit in rows)


def lengthened(past: Tensor, dim: int, count: int) -> Tensor:
    """A tensor that is longer by so much and holds no data, as nothing may read it."""
    shape = list(past.shape)
    shape[dim] += count
    empty = past.new_full((), torch.nan).expand(shape)
    dynamo.mark_growing(empty, dim)
    return empty
