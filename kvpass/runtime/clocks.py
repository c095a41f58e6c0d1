"""Count the tokens of each row on the host, and say when a decode step compacts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.policies.types import Clock


def next_clocks(
    caches: list[LayerCache], valid: Sequence[Sequence[bool] | None] | None = None
) -> tuple[bool, list[tuple[Any, ...]]]:
    """Return whether the policy compacts at this decode step, and the policy clocks after the step.

    The answer follows from counts on the host, so the host does not wait for the device.

    Args:
        valid: for each layer one bool per row, False if the token is padding, which clocks do not count; None if no
            row has padding.

    Returns:
        Whether any row of any layer is due for compaction, and for each layer the clocks of its rows.
    """
    if not any(cache.clocks for cache in caches):
        return False, [()] * len(caches)
    ticks_by_case: dict[Any, list[tuple[bool, Any]]] = {}  # most layers have equal clocks, so compute each case once
    ticked = []
    for cache, counts in zip(caches, valid or [None] * len(caches), strict=True):
        layout, budgets = cache.layout, cache.row_budgets
        case = (id(layout.policy), layout.classes, budgets, cache.clocks, counts and tuple(counts))
        if case not in ticks_by_case:
            rows = zip(cache.clocks, budgets, counts or itertools.repeat(True), strict=False)  # none without a clock
            ticks_by_case[case] = [
                next_clock(layout, clock, budget) if real else (False, clock) for clock, budget, real in rows
            ]
        ticked.append(ticks_by_case[case])
    compact = any(due for layer in ticked for due, _ in layer)
    return compact, [tuple(clock for _, clock in layer) for layer in ticked]


def clock_of(layout: Layout, clock: Clock, new: int, budget: int) -> Clock:
    """Return `Policy.clock` of a row with a budget; each class of heads counts separately."""
    parts = clock_by_class(layout, clock, budget)
    return tuple(count for own, limit in parts for count in layout.policy.clock(own, new, limit))


def next_clock(layout: Layout, clock: Clock, budget: int) -> tuple[bool, Clock]:
    """Return `Policy.tick` of a row, see `clock_of`; a step compacts if it is due in a class."""
    ticked = [layout.policy.tick(own, limit) for own, limit in clock_by_class(layout, clock, budget)]
    return any(due for due, _ in ticked), tuple(count for _, after in ticked for count in after)


def advance_counts(caches: list[LayerCache], query_len: int, clocks: Sequence[tuple[Any, ...]]) -> None:
    """Advance the host's counts of a conversation by `query_len` tokens and set the policy clocks."""
    for cache, clock in zip(caches, clocks, strict=True):
        cache.interrupted = False
        cache.length += query_len
        if query_len == 1:
            cache.clocks = clock


def clock_by_class(layout: Layout, clock: Clock, budget: int) -> list[tuple[Clock, int]]:
    """Return the clock and budget of each class of heads, or of a whole row of equal heads."""
    return [(clock[i : i + 1], each.budget) for i, each in enumerate(layout.classes)] or [(clock, budget)]


def clocks_after(layout: Layout, clocks: Iterable[Clock], valid: Tensor, budgets: Sequence[int]) -> tuple[Clock, ...]:
    """Return the clocks of rows after a chunk whose real tokens `valid` marks; none without a clock."""
    if not layout.policy.keeps_clock:
        return ()
    rows = zip(clocks, valid.sum(-1).tolist(), budgets, strict=False)  # waits for the device
    return tuple(clock_of(layout, *row) for row in rows)
