"""Storage of cached tokens in slots; `kvpass.runtime.reference_store` has the lists of the eager reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.handle import LayerCache
from kvpass.cache.history import Restorable
from kvpass.cache.slots import Chunk, Layout, Slots, admit
from kvpass.cache.snapshot import SlotSnapshot, UnchangedSlots
from kvpass.cache.statistics import StatisticsSpec, as_attention
from kvpass.capture.canonical import AttentionSite
from kvpass.policies.budgets import Plan
from kvpass.policies.pinned_tokens import PINNED, Pins, check_pinned
from kvpass.policies.types import Attention, Clock
from kvpass.rewrite.context import Pass
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.runtime.caches import adapt, keep_address, pins_for, room_on_top, take_in, valid_counts
from kvpass.runtime.cropping import TakenChunk, TakenIn


@dataclasses.dataclass(frozen=True)
class KVStore:
    """Storage in slots: a decode step writes them in place, a prompt or chunk is admitted to them.

    Equal stores belong to backends that can continue each other's caches.

    Attributes:
        is_reference: whether tokens are in lists of the eager reference.  A prompt graph then returns its queries, keys
            and masks even if the policy needs no statistics, a step's masks read per-token inputs at full length, no
            step is run on made-up slots, and no heads are sharded over processes.
        passes: the passes over a step graph.
    """

    is_reference = False

    @property
    def passes(self) -> Sequence[Pass]:
        return STEP_PASSES

    def admitted(
        self, layout: Layout, chunk: Chunk, spec: StatisticsSpec | None, site: AttentionSite, plan: Plan
    ) -> tuple[Any, tuple[int, ...], tuple[Clock, ...]]:
        """Return the storage of a prompt's tokens (`LayerCache.slots`), and the host's `limits` and `clocks`."""
        row_budgets = plan.budgets_of_rows(layout.batch)
        slots = admit(layout, None, chunk, row_budgets)
        keep_address(slots)
        row_budgets = chunk.raised(layout.policy, row_budgets)
        counts = zip(valid_counts(layout.policy, chunk.valid), row_budgets, strict=False)
        return slots, row_budgets, tuple(layout.policy.clock((), *row) for row in counts)

    def make_room(self, cache: LayerCache, pins: Pins) -> None:
        """Prepare a cache for a call that pins some of its new tokens, before anything of the call runs.

        Raises:
            BudgetError: the pinned tokens leave less of the budget than the policy needs.
        """
        layout, slots = cache.layout, cache.slots
        policy, capacity = layout.policy, layout.capacity
        new = torch.full_like(pins.later, pins.mask.shape[1]) if policy.keep_prompt else pins.mask.sum(-1) + pins.later
        if pins.on_top:
            most = max(limit + more for limit, more in zip(cache.limits, new.tolist(), strict=True))
            capacity = max(capacity, policy.capacity(layout.budget + room_on_top(most - layout.budget)))
        elif PINNED in slots.state or bool(new.any()):
            held = (slots.state[PINNED] & (slots.position >= 0)).sum(-1).amax(-1) if PINNED in slots.state else 0
            counts = (held + new).tolist()
            rest, pinned = min((limit - count, count) for limit, count in zip(cache.limits, counts, strict=True))
            check_pinned(policy, pinned, rest)
        wanted = layout.with_pins(pins.on_top)
        adapt(cache, pins=wanted.pins, row_budgets=wanted.row_budgets, capacity=capacity)

    def pin(self, cache: LayerCache, pins: Pins) -> None:
        """Pin the token of a decode step, before the step writes it to the free slot."""
        cache.slots.pin_next(pins)
        if pins.on_top:
            cache.limits = tuple(limit + int(more) for limit, more in zip(cache.limits, pins.mask[:, 0], strict=True))

    def prepare(self, cache: LayerCache, valid: Callable[[], Tensor]) -> None:
        """Prepare a cache for a step; the graph of a step on slots frees a slot itself.

        Args:
            valid: returns bool [B, q], False for padding among the new tokens.
        """

    def kept(self, cache: LayerCache, chunk: bool) -> Restorable:
        """Return the record that restores the cache after a step, or after a chunk, that is about to run."""
        return UnchangedSlots(cache.slots) if chunk else SlotSnapshot.before_step(cache.layout, cache.slots)

    def take_in(self, cache: LayerCache, site: AttentionSite, results: list[Tensor]) -> TakenIn | None:
        """Admit the new tokens that a step graph returned (`StepRewrite.chunks`).

        Returns:
            The admitted chunk, or None for a single token on slots, which the graph itself has written.
        """
        if not results:
            return None
        layout, policy = cache.layout, cache.layout.policy
        key, value, valid, *others = results
        sums, operands = others[: len(policy.statistics)], others[len(policy.statistics) :]
        attention = as_attention(policy, sums, valid, layout.spread) if sums else Attention()
        spec = None
        if operands:  # see `cache.step.extend_step`
            query, keys, mask, *sink = operands
            common = (False, site.scale, site.cap, layout.heads, layout.spread)
            spec = StatisticsSpec(query, keys, mask, sink[0] if sink else None, *common)
        chunk = Chunk(key, value, valid, attention, pins_for(cache))
        take_in(cache, chunk, _spare(cache) if cache.backend.crop else None)
        return TakenChunk(dataclasses.replace(chunk, attention=Attention()), spec, cache.slots)


def _spare(cache: LayerCache) -> Slots:
    """Return slots for a chunk: those from before the last chunk, whose record is dropped now, or new ones."""
    known = [call.snapshot.slots for call in cache.calls if isinstance(call.snapshot, UnchangedSlots)]
    alike = [slots for slots in known if slots.state.keys() == cache.slots.state.keys() and slots is not cache.slots]
    fitting = [slots for slots in alike if slots.capacity == cache.layout.capacity]
    return fitting[0] if fitting else Slots.empty(cache.layout)
