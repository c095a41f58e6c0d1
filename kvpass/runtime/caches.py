"""Bookkeeping of layer caches around the graphs: capacity, counts, clocks, pinned tokens, admission of chunks."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.cache.admission import Chunk, admit
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.cache.slots import AnySlots
from kvpass.errors import BudgetError, CacheHandleError
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Clock
from kvpass.torch_private import dynamo
from kvpass.user_budget import slots_for


def mark_addresses_static(slots: AnySlots) -> None:
    for tensor in slots.tensors():
        dynamo.mark_in_place(tensor)


def grow_for(cache: LayerCache, queries: int) -> None:
    """Double the slots of a policy that never evicts when `queries` new tokens exceed slots without a budget."""
    layout, backend = cache.layout, cache.backend
    if layout.policy.evicts or cache.seen + queries <= layout.capacity:
        return
    if layout.policy is backend.policy and backend.budget is not None:
        raise BudgetError(
            f"policy {layout.policy.name!r} keeps every token and its budget of {layout.budget} is full; "
            "give it more, or none, or choose a policy that evicts"
        )
    capacity = slots_for(layout.policy, None, cache.seen + queries)
    change_layout(cache, budget=capacity, capacity=capacity)
    cache.row_budgets = (capacity,) * layout.batch


def equalize_layouts(one: LayerCache, other: LayerCache) -> None:
    """Give one layer of two conversations the same state, and the larger of both capacities if that may vary."""
    layouts = (one.layout, other.layout)
    pins, rows = any(layout.pins for layout in layouts), any(layout.row_budgets for layout in layouts)
    most = max(layout.capacity for layout in layouts)
    for cache in (one, other):
        grows = cache.layout.exact_capacity or rows
        change_layout(cache, pins=pins, row_budgets=rows, capacity=most if grows else cache.layout.capacity)


def change_layout(cache: LayerCache, **changes: Any) -> None:
    """Change fields of a cache's layout: its capacity, which may only grow, or what its state holds."""
    layout, slots = dataclasses.replace(cache.layout, **changes), cache.slots
    if layout == cache.layout:
        return
    slots = slots.with_state_of(layout, cache.row_budgets)
    cache.layout, cache.slots = layout, slots.enlarge(layout) if slots.capacity < layout.capacity else slots
    mark_addresses_static(cache.slots)


def tick(
    caches: list[LayerCache], valid: Sequence[Sequence[bool] | None] | None = None
) -> tuple[bool, list[tuple[Any, ...]]]:
    """Return whether the policy compacts at this decode step, and the policy clocks after the step.

    The answer follows from counts on the host, so the host does not wait for the device.

    Args:
        valid: for each layer, one bool per row that is False where the token is padding, which the clocks do not
            count; None if no row has padding.

    Returns:
        Whether any row of any layer is due for compaction, and for each layer the clocks of its rows.
    """
    if not any(cache.clocks for cache in caches):
        return False, [()] * len(caches)
    known: dict[Any, list[tuple[bool, Any]]] = {}  # most layers have equal clocks, so compute each case once
    ticked = []
    for cache, counts in zip(caches, valid or [None] * len(caches), strict=True):
        layout, real_rows = cache.layout, counts or itertools.repeat(True)
        rows = tuple(zip(cache.clocks, cache.row_budgets, real_rows, strict=False))  # none without a clock
        alike = (id(layout.policy), layout.classes, rows)
        if alike not in known:
            known[alike] = [tick_of(layout, clock, limit) if real else (False, clock) for clock, limit, real in rows]
        ticked.append(known[alike])
    compact = any(due for layer in ticked for due, _ in layer)
    return compact, [tuple(clock for _, clock in layer) for layer in ticked]


def clock_by_class(layout: Layout, clock: Clock, budget: int) -> list[tuple[Clock, int]]:
    """Return the count, if any, and the budget of each class of heads; for equal heads those of the row."""
    return [(clock[i : i + 1], each.budget) for i, each in enumerate(layout.classes)] or [(clock, budget)]


def clock_of(layout: Layout, clock: Clock, new: int, budget: int) -> Clock:
    """Return `Policy.clock` of a row with a budget; classes of heads count for themselves."""
    parts = clock_by_class(layout, clock, budget)
    return tuple(count for own, limit in parts for count in layout.policy.clock(own, new, limit))


def tick_of(layout: Layout, clock: Clock, budget: int) -> tuple[bool, Clock]:
    """Return `Policy.tick` of a row, see `clock_of`; a step compacts if it is due in a class."""
    ticked = [layout.policy.tick(own, limit) for own, limit in clock_by_class(layout, clock, budget)]
    return any(due for due, _ in ticked), tuple(count for _, after in ticked for count in after)


class StepKey(NamedTuple):
    """A key that is equal for two decode steps with the same code and the same buffers."""

    compacts: bool
    windows: tuple[bool, ...]  # whether each layer with a window of its own is full
    slots: tuple[int, ...]  # the id of each layer's
    hooks: int  # registered so far, on any module


def step_key(caches: list[LayerCache]) -> StepKey:
    """Return the key of the next decode step."""
    compact, _ = tick(caches)
    windows = tuple(cache.stored_tokens < cache.seen for cache in caches if cache.window is not None)
    return StepKey(compact, windows, tuple(id(cache.slots) for cache in caches), dynamo.registered_hooks())


def advance_counts(caches: list[LayerCache], queries: int, clocks: Sequence[tuple[Any, ...]]) -> None:
    """Advance the host's counts of a conversation by `queries` tokens and set the policy clocks."""
    for cache, clock in zip(caches, clocks, strict=True):
        cache.interrupted = False
        cache.seen += queries
        if queries == 1:
            cache.clocks = clock


def clocks_after(layout: Layout, clocks: Iterable[Clock], valid: Tensor, budgets: Sequence[int]) -> tuple[Clock, ...]:
    """Return the clocks of rows after a chunk, of which `valid` marks the real tokens; none without a clock."""
    if not layout.policy.keeps_clock:
        return ()
    rows = zip(clocks, valid.sum(-1).tolist(), budgets, strict=False)  # waits for the device
    return tuple(clock_of(layout, *row) for row in rows)


def admit_chunk(cache: LayerCache, chunk: Chunk, into: AnySlots | None) -> None:
    """Admit a chunk to the cache's slots, and update its clocks; see `admit`."""
    before = cache.slots
    cache.slots = admit(cache.layout, before, chunk, cache.row_budgets, into)
    if cache.slots is not before:
        mark_addresses_static(cache.slots)
    cache.row_budgets = chunk.raised_budgets(cache.layout.policy, cache.row_budgets)
    cache.clocks = clocks_after(cache.layout, cache.clocks, chunk.valid, cache.row_budgets)


def longer_placeholder(past: Tensor, dim: int, count: int) -> Tensor:
    """Return a NaN placeholder for `past` that is `count` longer along `dim`.

    The placeholder is an expanded scalar without storage of its own, because no graph may read its values.
    """
    shape = list(past.shape)
    shape[dim] += count
    empty = past.new_full((), torch.nan).expand(shape)
    dynamo.mark_growing(empty, dim)
    return empty


_CALL_PINS: contextvars.ContextVar[Pins | None] = contextvars.ContextVar("kvpass_pins", default=None)


@contextlib.contextmanager
def pinning(pins: Pins | None) -> Iterator[None]:
    """Return a context in which calls of a compiled model pin the new tokens that `pins` marks.

    A model's forward has no argument for pins, and its graph must not depend on them.
    """
    token = _CALL_PINS.set(pins)
    try:
        yield
    finally:
        _CALL_PINS.reset(token)


def call_pins() -> Pins | None:
    """Return the pins of the call that is running, None if it pins nothing."""
    return _CALL_PINS.get()


def output_weight_by_head(weight: Tensor, heads: int, dim: int) -> Tensor:
    """Return the weight [E, Hq Dv] of an output projection as `Chunk.output_projection`, [1, Hkv, G, Dv, E]."""
    return torch.unflatten(weight.T, 0, (1, heads, -1, dim))


def output_projection_of(cache: LayerCache) -> Tensor | None:
    """Return `Chunk.output_projection` for a chunk of a layer; None for a policy that does not read it."""
    if not cache.layout.policy.projects:
        return None
    weight = None if cache.output_projection is None else cache.output_projection()
    if weight is None:
        raise CacheHandleError(
            f"{cache.layout.policy.name!r} weighs the tokens of a turn by the model's output projection, which is not "
            "known of a cache from a file or of a model that is gone: start again with the whole conversation"
        )
    return output_weight_by_head(weight.detach(), cache.layout.heads, cache.layout.value_dim)


def pinned_headroom(tokens: int) -> int:
    """Return the slots for `tokens` pinned tokens beside the budget: a power of two, so that prompts share graphs."""
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has free; None if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    file = Path("/proc/meminfo")
    lines = file.read_text(encoding="ascii").splitlines() if device.type == "cpu" and file.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
