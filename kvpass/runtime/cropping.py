"""Records of calls that let a cache drop its last tokens again: see `LayerCache.crop`.

A decode step overwrites one row of each head, so that row is copied before the step.  A chunk is admitted to other
slots, and its rows are kept until the next call.  To crop a chunk, its first tokens are admitted again to the slots
from before the chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvpass.cache import history
from kvpass.cache.handle import LayerCache
from kvpass.cache.slots import Chunk, Slots
from kvpass.cache.statistics import StatisticsSpec
from kvpass.policies.types import Attention
from kvpass.runtime.caches import take_in
from kvpass.runtime.padding import indices_of


class TakenIn(Protocol):
    """A chunk that a store has admitted.

    Attributes:
        chunk: the rows of the chunk.
    """

    @property
    def chunk(self) -> Chunk: ...

    def first(self, count: int) -> TakenIn:
        """Return the first `count` tokens of the chunk."""
        ...

    def take_into(self, cache: Any) -> None:
        """Admit the chunk again to a cache in the state from before the chunk."""
        ...


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


def _repeat(taken: TakenIn, cache: LayerCache, count: int) -> LayerCache:
    """Return the cache after the first `count` tokens of a chunk, from the cache before it: a `history.Repeat`."""
    taken, before = taken.first(count), cache.seen
    call = _before(cache, count, chunk=True)
    taken.take_into(cache)
    padding = ~taken.chunk.valid
    if bool(padding.any()):
        cache.absent = torch.cat([cache.absent, indices_of(padding, before)], 1)
    cache.seen += count
    cache.calls = (dataclasses.replace(call, repeat=functools.partial(_repeat, taken)),)
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
        again = functools.partial(_repeat, chunk) if chunk is not None and call.new > 1 else None
        cache.calls = history.recorded(cache.calls, dataclasses.replace(call, repeat=again), cache.backend.crop)
