"""Record the calls on the caches of all layers, so that a cache can drop its last tokens again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from kvpass.cache.admission import TokensToAdmit, attention_of_classes
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.slots import AnySlots
from kvpass.cache.undo_records import UndoRecord, append_record
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
            each.attention(policy, valid, layout.budget_in(slots.state)) for each, layout, slots in parts
        ]
        admit_chunk(
            cache, dataclasses.replace(self.tokens, attention=attention_of_classes(attention_by_class)), self.into
        )


def _admit_first(admitted: AdmittedChunk, cache: LayerCache, count: int) -> LayerCache:
    """Return the cache after the first `count` tokens of an admitted chunk, from the cache before it."""
    taken = admitted.first_tokens(count)
    record = _record_before(cache, count, chunk=True)
    taken.admit_again(cache)
    cache.absent = torch.cat([cache.absent, true_indices(~taken.tokens.valid, cache.length)], 1)
    cache.length += count
    cache.undo_records = (dataclasses.replace(record, repeat=functools.partial(_admit_first, taken)),)
    return cache


def undo_records_before(caches: list[LayerCache], query_len: int) -> list[UndoRecord]:
    """Return a record of the call about to run for each layer; an empty list if cropping is off."""
    if not caches[0].backend.crop:
        return []
    return [_record_before(cache, query_len, chunk=query_len > 1) for cache in caches]


def _record_before(cache: LayerCache, query_len: int, chunk: bool) -> UndoRecord:
    """Return the record of a call about to run; slots are copied unless `chunk`, whose graph leaves them unchanged."""
    return UndoRecord.on(cache, query_len, cache.slots.snapshot(cache.layout, chunk))


def store_undo_records(
    caches: list[LayerCache], records: list[UndoRecord], taken: Sequence[AdmittedChunk | None]
) -> None:
    """Store the records of calls that have run, together with the chunks that they admitted."""
    if not records:  # cropping is off
        return
    for cache, record, admitted in zip(caches, records, taken, strict=True):
        again = functools.partial(_admit_first, admitted) if admitted is not None and record.token_count > 1 else None
        cache.undo_records = append_record(
            cache.undo_records, dataclasses.replace(record, repeat=again), cache.backend.crop
        )
