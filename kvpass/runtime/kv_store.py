"""Storage of cached tokens in slots, and the records of calls that let a cache drop its last tokens again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpass.cache.admission import NewRows, admit, attention_of_chunk, attention_of_classes, split_by_class
from kvpass.cache.chunk_step import chunk_spec
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.cache.past_calls import PastCall, SlotSnapshot, append_call
from kvpass.cache.slots import AnySlots, empty_slots, hold_whole_prompt
from kvpass.capture.canonical import AttentionSite, SiteFacts
from kvpass.lowering.attention_statistics import StatisticsOperands
from kvpass.policies.budgets import Plan
from kvpass.policies.pinned_tokens import PINNED, Pins, check_pinned
from kvpass.policies.types import Attention, Clock
from kvpass.rewrite.context import Pass
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.runtime.cache_changes import admit_chunk, change_layout, mark_addresses_static, output_projection_of
from kvpass.runtime.call_pins import call_pins, pinned_headroom
from kvpass.runtime.clocks import clocks_after
from kvpass.runtime.padding_tracker import true_indices

if TYPE_CHECKING:
    from kvpass.reference.layer import ReferenceRows


@dataclasses.dataclass(frozen=True)
class AdmittedRows:
    """A chunk that was admitted to slots."""

    chunk: NewRows
    specs: tuple[StatisticsOperands, ...]  # for each class of heads; () if the policy needs no statistics
    into: AnySlots

    def first(self, count: int) -> AdmittedRows:
        """Return the first `count` tokens of the chunk."""
        return AdmittedRows(self.chunk.first(count), tuple(spec.first(count) for spec in self.specs), self.into)

    @torch.no_grad()
    def admit_again(self, cache: LayerCache) -> None:
        """Admit the chunk again to a cache in the state from before the chunk."""
        policy, valid = cache.layout.policy, self.chunk.valid
        parts = zip(self.specs, cache.layout.by_class, cache.slots.by_class, strict=bool(self.specs))
        found = [spec.attention(policy, valid, layout.budget_in(slots.state)) for spec, layout, slots in parts]
        admit_chunk(cache, dataclasses.replace(self.chunk, attention=attention_of_classes(found)), self.into)


def _admit_first(admitted: AdmittedRows | ReferenceRows, cache: LayerCache, count: int) -> LayerCache:
    """Return the cache after the first `count` tokens of an admitted chunk, from the cache before it."""
    taken = admitted.first(count)
    call = _record_call(cache, count, chunk=True)
    taken.admit_again(cache)
    cache.absent = torch.cat([cache.absent, true_indices(~taken.chunk.valid, cache.length)], 1)
    cache.length += count
    cache.calls = (dataclasses.replace(call, repeat=functools.partial(_admit_first, taken)),)
    return cache


def calls_before(caches: list[LayerCache], queries: int) -> list[PastCall]:
    """Return a record of the call about to run for each layer; an empty list if cropping is off."""
    if not caches[0].backend.crop:
        return []
    as_chunk = queries > 1 or any(hold_whole_prompt(cache.slots, cache.layout) for cache in caches)
    return [_record_call(cache, queries, as_chunk) for cache in caches]


def _record_call(cache: LayerCache, queries: int, chunk: bool) -> PastCall:
    """Return the record of one call; with `chunk` the graph leaves the slots unchanged, so they are not copied."""
    owner: Any = cache.backend  # a `BackendBase`, whose module imports this one
    return PastCall.on(cache, queries, owner.kv_store.snapshot(cache, chunk))


def record_calls(
    caches: list[LayerCache], calls: list[PastCall], taken: Sequence[AdmittedRows | ReferenceRows | None]
) -> None:
    """Store the records of calls that have run, together with the chunks that they admitted."""
    if not calls:  # cropping is off
        return
    for cache, call, chunk in zip(caches, calls, taken, strict=True):
        again = functools.partial(_admit_first, chunk) if chunk is not None and call.token_count > 1 else None
        cache.calls = append_call(cache.calls, dataclasses.replace(call, repeat=again), cache.backend.crop)


@dataclasses.dataclass(frozen=True)
class KVStore:
    """Storage in slots: a decode step writes them in place, a prompt or chunk is admitted to them.

    Equal stores belong to backends that can continue each other's caches.

    Attributes:
        is_reference: whether tokens are in lists of the eager reference.  A prompt graph then returns its queries, keys
            and masks even if the policy needs no statistics, a step's masks read per-token inputs at full length, no
            step is run on synthetic slots, and no heads are sharded over processes.
        passes: the passes over a step graph.
    """

    is_reference = False

    @property
    def passes(self) -> Sequence[Pass]:
        return STEP_PASSES

    def admit_prompt(
        self, layout: Layout, chunk: NewRows, spec: StatisticsOperands | None, site: SiteFacts, plan: Plan
    ) -> tuple[Any, tuple[int, ...], tuple[Clock, ...]]:
        """Return the storage of a prompt's tokens (`LayerCache.slots`), the rows' budgets, and their clocks."""
        row_budgets = plan.budgets_of_rows(layout.batch)
        slots = admit(layout, None, chunk, row_budgets)
        mark_addresses_static(slots)
        row_budgets = chunk.raised_budgets(layout.policy, row_budgets)
        return slots, row_budgets, clocks_after(layout, itertools.repeat(()), chunk.valid, row_budgets)

    def make_room_for_pins(self, cache: LayerCache, pins: Pins) -> None:
        """Prepare a cache for a call that pins tokens, or raise BudgetError if they leave too little of the budget."""
        layout, slots = cache.layout, cache.slots
        policy, capacity = layout.policy, layout.capacity
        new = torch.full_like(pins.later, pins.mask.shape[1]) if policy.keep_prompt else pins.mask.sum(-1) + pins.later
        if pins.on_top:
            most = max(limit + more for limit, more in zip(cache.row_budgets, new.tolist(), strict=True))
            capacity = max(capacity, policy.capacity(layout.budget + pinned_headroom(most - layout.budget)))
        elif PINNED in slots.state or bool(new.any()):
            pinned_before = (
                (slots.state[PINNED] & (slots.position >= 0)).sum(-1).amax(-1) if PINNED in slots.state else 0
            )
            counts = (pinned_before + new).tolist()
            rest, pinned = min((limit - count, count) for limit, count in zip(cache.row_budgets, counts, strict=True))
            check_pinned(policy, pinned, rest)
        wanted = layout.with_pins(pins.on_top)
        change_layout(cache, pins=wanted.pins, row_budgets=wanted.row_budgets, capacity=capacity)

    def pin(self, cache: LayerCache, pins: Pins) -> None:
        """Pin the token of a decode step, before the step writes it to the free slot."""
        cache.slots.pin_next(pins)
        if pins.on_top:
            pinned = pins.mask[:, 0].tolist()
            cache.row_budgets = tuple(limit + more for limit, more in zip(cache.row_budgets, pinned, strict=True))

    def evict_before_step(self, cache: LayerCache, valid: Callable[[], Tensor]) -> None:
        """Do nothing: the graph of a step on slots frees a slot itself."""

    def snapshot(self, cache: LayerCache, chunk: bool) -> SlotSnapshot:
        """Return the record that restores the cache after a step, or after a chunk, that is about to run."""
        return SlotSnapshot(cache.slots) if chunk else SlotSnapshot.before_step(cache.layout, cache.slots)

    def admit_step(
        self, cache: LayerCache, site: AttentionSite, results: list[Tensor]
    ) -> AdmittedRows | ReferenceRows | None:
        """Admit the chunk that a step graph returned; None for a single token, which the graph itself has written."""
        if not results:
            return None
        layout, policy = cache.layout, cache.layout.policy
        key, value, valid, *others = results
        divided, specs = split_by_class(layout, others), list[StatisticsOperands]()
        for part, own in zip(layout.by_class, divided, strict=True):
            operands = own[len(policy.statistics) :]
            if operands:  # query, keys, mask and sink, see `cache.chunk_step.chunk_step`
                specs.append(chunk_spec(part, site.scale, site.cap, *operands))
        attention = attention_of_chunk(layout, divided, valid)
        pins = call_pins() if policy is cache.backend.policy else None
        chunk = NewRows(key, value, valid, attention, pins, output_projection_of(cache))
        admit_chunk(cache, chunk, _spare_slots(cache) if cache.backend.crop else None)
        return AdmittedRows(dataclasses.replace(chunk, attention=Attention()), tuple(specs), cache.slots)


def _spare_slots(cache: LayerCache) -> AnySlots:
    """Return slots for a chunk: those from before the last chunk, whose record is dropped now, or new ones."""
    known = [call.snapshot.slots for call in cache.calls if call.snapshot and not call.snapshot.saved]
    form = (cache.slots.names, cache.layout.capacity)
    fitting = (slots for slots in known if slots is not cache.slots and (slots.names, slots.capacity) == form)
    return next(fitting, None) or empty_slots(cache.layout)
