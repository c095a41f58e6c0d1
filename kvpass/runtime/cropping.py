"""What a call leaves behind so that its last tokens can be taken back: see `LayerCache.crop`.

A step overwrites one row of each head, which is copied before it.  A chunk is taken into other slots, and what it
brought stays until the next call: without its end it is taken in again, from the slots that were there before.
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
from kvpass.policies.base import Attention
from kvpass.runtime.caches import take_in
from kvpass.runtime.kv_store import TakenIn
from kvpass.runtime.padding import places_of


@dataclasses.dataclass(frozen=True)
class TakenChunk:
    """A chunk that was taken into slots.

    Attributes:
        chunk: its rows.
        spec: what its statistics are made of, None if the policy asks for none.
        into: the slots that it was taken into.
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
    """A chunk that can be taken in again with fewer tokens."""

    taken: TakenIn

    def first(self, cache: LayerCache, count: int) -> LayerCache:
        """See `history.Again`."""
        taken, before = self.taken.first(count), cache.seen
        call = _before(cache, count, chunk=True)
        taken.take_into(cache)
        padding = ~taken.chunk.valid
        if bool(padding.any()):
            cache.absent = torch.cat([cache.absent, places_of(padding, before)], 1)
        cache.seen += count
        cache.calls = (dataclasses.replace(call, again=RepeatedPrompt(taken)),)
        return cache


def calls_before(caches: list[LayerCache], queries: int) -> list[history.PastCall]:
    """For each layer the call that is about to be made; none if nothing is to be taken back."""
    if not caches[0].backend.crop:
        return []
    roomy = all(cache.slots.capacity == cache.layout.capacity for cache in caches)
    return [_before(cache, queries, chunk=queries > 1 or not roomy) for cache in caches]


def _before(cache: LayerCache, queries: int, chunk: bool) -> history.PastCall:
    """A call; that of a chunk leaves the slots alone, and its tokens are taken in after it."""
    kept = cache.backend.kv_store.kept(cache, chunk)
    return history.PastCall(queries, kept, None, cache.layout, cache.seen, cache.clocks, cache.absent)


def remember(caches: list[LayerCache], calls: list[history.PastCall], taken: Sequence[TakenIn | None]) -> None:
    """Note the calls once they have been made, and what they took in."""
    for index, (cache, call) in enumerate(zip(caches, calls, strict=False)):
        chunk = taken[index]
        again = RepeatedPrompt(chunk) if chunk is not None and call.new > 1 else None
        cache.calls = history.followed(cache.calls, dataclasses.replace(call, again=again), cache.backend.crop)


def take_results(cache: LayerCache, site: AttentionSite, results: list[Tensor]) -> TakenIn:
    """Take in a chunk from what the graph of a step gives for a layer: `StepRewrite.chunks`."""
    key, value, valid, *beside = results
    policy, layout = cache.layout.policy, cache.layout
    sums, made_of = beside[: len(policy.statistics)], beside[len(policy.statistics) :]
    probs = as_attention(policy, sums, valid, layout.spread) if sums else Attention()
    take_in(cache, Chunk(key, value, valid, probs), _spare(cache) if cache.backend.crop else None)
    return TakenChunk(Chunk(key, value, valid, Attention()), _spec(cache, site, made_of), cache.slots)


def _spec(cache: LayerCache, site: AttentionSite, made_of: list[Tensor]) -> StatisticsSpec | None:
    """What the statistics of a chunk are made of, from what `layer.step.extend_step` gives for it."""
    if not made_of:
        return None
    query, key, mask, *sink_logit = made_of
    common = (False, site.scale, site.cap, cache.layout.heads, cache.layout.spread)
    return StatisticsSpec(query, key, mask, sink_logit[0] if sink_logit else None, *common)


def _spare(cache: LayerCache) -> Slots:
    """Slots for a chunk: those from before the last one, which is forgotten now, or new ones."""
    known = [call.kept.slots for call in cache.calls if isinstance(call.kept, UnchangedSlots)]
    fitting = [slots for slots in known if slots.capacity == cache.layout.capacity and slots is not cache.slots]
    return fitting[0] if fitting else Slots.empty(cache.layout)
