"""Record the last calls on a layer's cache, so that they can be undone.

A decode step overwrites one slot of each head, so its vectors are copied before the step.  A chunk is admitted to other
slots, and its keys and values are kept until the next call.  To crop a chunk, its first tokens are admitted again to
the slots from before the chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvpass.cache.slots import SlotSnapshot
from kvpass.errors import CacheHandleError

AdmitAgain = Callable[[Any, int], Any]
"""Return a layer's cache after the first tokens of a call, as many as given, from the cache before the call."""


@dataclasses.dataclass(frozen=True)
class PastCall:
    """One call, and the state of a layer's cache before it.

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
    def on(cache: Any, token_count: int, snapshot: SlotSnapshot | None, repeat: AdmitAgain | None = None) -> PastCall:
        """Return the record of a call on a layer's cache in its present state."""
        names = ("layout", "length", "clocks", "absent", "row_budgets")
        return PastCall(token_count, snapshot, repeat, {name: getattr(cache, name) for name in names})

    def undo(self, cache: Any) -> Any:
        """Return the cache as it was before the call."""
        slots = cache.slots if self.snapshot is None else self.snapshot.restore()
        return dataclasses.replace(cache, slots=slots, calls=(), **self.state)


Calls = tuple[PastCall, ...]


def append_call(calls: Calls, call: PastCall, max_tokens: int) -> Calls:
    """Return the calls to remember after another one, so that up to `max_tokens` tokens can be cropped.

    A prompt is then forgotten, because its record holds every token.  So are all calls before a chunk, which has its
    own slots.
    """
    if call.token_count > 1:
        return (call,)
    remembered = tuple(past for past in (*calls, call) if past.snapshot is not None)
    while sum(past.token_count for past in remembered[1:]) >= max_tokens:
        remembered = remembered[1:]
    return remembered


def check_croppable(calls: Sequence[PastCall], count: int, max_tokens: int) -> None:
    """Raise CacheHandleError if fewer than `count` tokens can be cropped; `max_tokens` is the backend's `crop`."""
    # The first token of a prompt, which has no snapshot, stays.
    croppable = min(max_tokens, sum(call.token_count - (call.snapshot is None) for call in calls))
    if count <= croppable:
        return
    if not max_tokens:
        reason = f"pass crop={count} to kvpass, which then remembers what the last tokens overwrote"
    elif count > max_tokens:
        reason = f"crop={max_tokens} remembers no more: pass crop={count}"
    else:
        reason = (
            "what came before is not remembered: a prompt keeps its first token and is remembered until the next call, "
            "and nothing is from before a call of several tokens, from before rows were picked or copied, or from "
            "before the cache was loaded"
        )
    raise CacheHandleError(f"{count} tokens of a cache were to be cropped, and {croppable} can be: {reason}")
