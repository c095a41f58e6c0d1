"""Record the last calls on a layer's cache, so that they can be undone.

A decode step overwrites one slot of each head, so its vectors are copied before the step.  A chunk is admitted to other
slots, and its keys and values are kept while a crop may reach it.  To crop a chunk, its first tokens are admitted
again to the slots from before the chunk; those of a prompt, to new slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvpass.cache.slots import SlotSnapshot
from kvpass.errors import CacheHandleError

AdmitAgain = Callable[[Any, int], Any]
"""Return a layer's cache after a number of the first tokens of a call, from the cache before the call."""


@dataclasses.dataclass(frozen=True)
class UndoRecord:
    """The state of a layer's cache before a call, and how to admit a part of its tokens again.

    Attributes:
        token_count: the number of its tokens.
        snapshot: the slots before the call; None before a prompt, which has none.
        repeat: admits a part of its tokens; None for a single token.
        state: the fields of `LayerCache` that calls change, with their values before the call.
    """

    token_count: int
    snapshot: SlotSnapshot | None
    repeat: AdmitAgain | None
    state: dict[str, Any]

    @staticmethod
    def on(cache: Any, token_count: int, snapshot: SlotSnapshot | None, repeat: AdmitAgain | None = None) -> UndoRecord:
        """Return the record of a call on a layer's cache in its present state."""
        names = ("layout", "length", "clocks", "absent", "row_budgets")
        return UndoRecord(token_count, snapshot, repeat, {name: getattr(cache, name) for name in names})

    def undo(self, cache: Any) -> Any:
        """Return the cache as it was before the call."""
        slots = cache.slots if self.snapshot is None else self.snapshot.restore()
        return dataclasses.replace(cache, slots=slots, undo_records=(), **self.state)


UndoRecords = tuple[UndoRecord, ...]


def append_record(records: UndoRecords, last: UndoRecord, max_tokens: int) -> UndoRecords:
    """Return the records to keep after a new call, enough to crop `max_tokens` tokens.

    Records before a chunk are dropped, because a chunk is admitted to other slots.
    """
    if last.token_count > 1:
        return (last,)
    kept = (*records, last)
    while sum(record.token_count for record in kept[1:]) >= max_tokens:
        kept = kept[1:]
    return kept


def check_croppable(records: Sequence[UndoRecord], count: int, max_tokens: int) -> None:
    """Raise CacheHandleError if fewer than `count` tokens can be cropped; `max_tokens` is the backend's `crop`."""
    # The first token of a prompt, which has no snapshot, stays.
    croppable = min(max_tokens, sum(record.token_count - (record.snapshot is None) for record in records))
    if count <= croppable:
        return
    if not max_tokens:
        reason = f"pass crop={count} to kvpass, which then records the slots that the last tokens overwrite"
    elif count > max_tokens:
        reason = f"crop={max_tokens} records no more: pass crop={count}"
    else:
        reason = (
            "earlier tokens have no record: records begin at the last call of several tokens, at a selection or copy "
            "of rows, or when the cache was loaded; the first token of a prompt stays"
        )
    raise CacheHandleError(f"{count} tokens of a cache were to be cropped, and {croppable} can be: {reason}")
