"""Records of calls that let a cache drop its last tokens again: see `LayerCache.crop`.

A decode step overwrites one row of each head, so that row is copied before the step.  A chunk is admitted to other
slots, and its rows are kept until the next call.  To crop a chunk, its first tokens are admitted again to the slots
from before the chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.cache import history
from kvpass.cache.handle import LayerCache
from kvpass.cache.slots import Chunk, Slots
from kvpass.cache.snapshot import UnchangedSlots
from kvpass.cache.statistics import StatisticsSpec, as_attention
from kvpass.capture.sites import AttentionSite
from kvpass.policies.types import Attention
from kvpass.runtime.caches import take_in
from kvpass.runtime.kv_store import TakenIn
from kvpass.runtime.padding import places_of
from kvpass.runtime.pins import pins_for


@dataclasses.dataclass(frozen=True)
class TakenChunk:
    """A chunk that was admitted to slots.

    Attributes:
        chunk: the rows of the chunk.
        spec: the tensors from which its attention statistics are computed; None if the policy needs no statistics.
        into: the slots that the chunk was admitted to.
    """

    chunk: Chunk
    spec: StatisticsSpec | None
    into: Slots

    def first(self, count: int) -> TakenChunk:
        return TakenChunk(self.chunk.first(count), self.spec and self.spec.first(count), self.into)

    @torch.no_grad()
    def take_into(self, cache: LayerCache) -> None:
        layout, valid = cache.layout, self.chunk.valid
        budget = layout.budget_in(cache.slots.state)
        probs = self.spec.attention(layout.policy, valid, budget) if self.spec else Attention()
        take_in(cache, dataclasses.replace(self.chunk, attention=probs), self.into)


@dataclasses.dataclass(frozen=True)
class RepeatedPrompt:
    """An admitted chunk that can be admitted again with fewer tokens: a `history.Repeatable`."""

    taken: TakenIn

    def first(self, cache: LayerCache, count: int) -> LayerCache:
        """Return the cache after the first `count` tokens; see `history.Repeatable`."""
        taken, before = self.taken.first(count), cache.seen
        call = _before(cache, count, chunk=True)
        taken.take_into(cache)
        padding = ~taken.chunk.valid
        if bool(padding.any()):
            cache.absent = torch.cat([cache.absent, places_of(padding, before)], 1)
        cache.seen += count
        cache.calls = (dataclasses.replace(call, repeat=RepeatedPrompt(taken)),)
        return cache


def calls_before(caches: list[LayerCache], queries: int) -> list[history.PastCall]:
    """Return a record of the call about to run for each layer; an empty list if cropping is off."""
    if not caches[0].backend.crop:
        return []
    roomy = all(cache.slots.capacity == cache.layout.capacity for cache in caches)
    return [_before(cache, queries, chunk=queries > 1 or not roomy) for cache in caches]


def _before(cache: LayerCache, queries: int, chunk: bool) -> history.PastCall:
    """Return the record of one call; with `chunk` the graph leaves the slots unchanged, so they are not copied."""
    kept = cache.backend.kv_store.kept(cache, chunk)
    return history.PastCall(queries, kept, None, cache.layout, cache.seen, cache.clocks, cache.absent, cache.limits)


def remember(caches: list[LayerCache], calls: list[history.PastCall], taken: Sequence[TakenIn | None]) -> None:
    """Store the records of calls that have run, together with the chunks that they admitted."""
    for index, (cache, call) in enumerate(zip(caches, calls, strict=False)):
        chunk = taken[index]
        again = RepeatedPrompt(chunk) if chunk is not None and call.new > 1 else None
        cache.calls = history.recorded(cache.calls, dataclasses.replace(call, repeat=again), cache.backend.crop)


def take_results(cache: LayerCache, site: AttentionSite, results: list[Tensor]) -> TakenIn:
    """Admit a chunk from the results of a step graph for one layer: see `StepRewrite.chunks`."""
    key, value, valid, *beside = results
    policy, layout = cache.layout.policy, cache.layout
    sums, made_of = beside[: len(policy.statistics)], beside[len(policy.statistics) :]
    probs = as_attention(policy, sums, valid, layout.spread) if sums else Attention()
    chunk = Chunk(key, value, valid, probs, pins_for(cache))
    take_in(cache, chunk, _spare(cache) if cache.backend.crop else None)
    return TakenChunk(dataclasses.replace(chunk, attention=Attention()), _spec(cache, site, made_of), cache.slots)


def _spec(cache: LayerCache, site: AttentionSite, made_of: list[Tensor]) -> StatisticsSpec | None:
    """Return the statistics spec of a chunk from the extra results of `cache.step.extend_step`."""
    if not made_of:
        return None
    query, key, mask, *sink_logit = made_of
    common = (False, site.scale, site.cap, cache.layout.heads, cache.layout.spread)
    return StatisticsSpec(query, key, mask, sink_logit[0] if sink_logit else None, *common)


def _spare(cache: LayerCache) -> Slots:
    """Return slots for a chunk: those from before the last chunk, whose record is dropped now, or new ones."""
    known = [call.snapshot.slots for call in cache.calls if isinstance(call.snapshot, UnchangedSlots)]
    alike = [slots for slots in known if slots.state.keys() == cache.slots.state.keys() and slots is not cache.slots]
    fitting = [slots for slots in alike if slots.capacity == cache.layout.capacity]
    return fitting[0] if fitting else Slots.empty(cache.layout)
