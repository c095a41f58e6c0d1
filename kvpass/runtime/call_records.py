"""Record the calls on the caches of all layers, so that a cache can drop its last tokens again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from kvpass.cache.admission import TokensToAdmit, attention_of_classes
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.past_calls import PastCall, append_call
from kvpass.cache.slots import AnySlots, hold_whole_prompt
from kvpass.runtime.cache_changes import admit_chunk
from kvpass.runtime.padding_tracker import true_indices


@dataclasses.dataclass(frozen=True)
class AdmittedChunk:
    """A chunk that was admitted to slots."""

    tokens: TokensToAdmit
    into: AnySlots

    def first_tokens(self, count: int) -> AdmittedChunk:
        """Return the first `count` tokens of the chunk."""
        return AdmittedChunk(self.tokens.first_tokens(count), self.into)

    @torch.no_grad()
    def admit_again(self, cache: LayerCache) -> None:
        """Admit the chunk again to a cache in the state from before the chunk."""
        policy, valid, operands = cache.layout.policy, self.tokens.valid, self.tokens.operands
        parts = zip(operands, cache.layout.by_class, cache.slots.by_class, strict=bool(operands))
        attention_by_class = [
            spec.attention(policy, valid, layout.budget_in(slots.state)) for spec, layout, slots in parts
        ]
        admit_chunk(
            cache, dataclasses.replace(self.tokens, attention=attention_of_classes(attention_by_class)), self.into
        )


def _admit_first(admitted: AdmittedChunk, cache: LayerCache, count: int) -> LayerCache:
    """Return the cache after the first `count` tokens of an admitted chunk, from the cache before it."""
    taken = admitted.first_tokens(count)
    call = _record_call(cache, count, chunk=True)
    taken.admit_again(cache)
    cache.absent = torch.cat([cache.absent, true_indices(~taken.tokens.valid, cache.length)], 1)
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
    return PastCall.on(cache, queries, cache.slots.snapshot(cache.layout, chunk))


def record_calls(caches: list[LayerCache], calls: list[PastCall], taken: Sequence[AdmittedChunk | None]) -> None:
    """Store the records of calls that have run, together with the chunks that they admitted."""
    if not calls:  # cropping is off
        return
    for cache, call, admitted in zip(caches, calls, taken, strict=True):
        again = functools.partial(_admit_first, admitted) if admitted is not None and call.token_count > 1 else None
        cache.calls = append_call(cache.calls, dataclasses.replace(call, repeat=again), cache.backend.crop)
