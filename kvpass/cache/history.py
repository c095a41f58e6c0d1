"""Record the last calls on a layer's cache, so that they can be undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvpass.cache.slots import Layout
from kvpass.errors import CacheHandleError


class Restorable(Protocol):
    """Slots that can be restored to their content before a call."""

    def restored(self) -> Any:
        """Return the slots with their earlier content."""
        ...


Repeat = Callable[[Any, int], Any]
"""Return a layer's cache after the first tokens of a call, as many as given, from the cache before the call."""


@dataclasses.dataclass(frozen=True)
class PastCall:
    """One call, and the state of a layer's cache before it.

    Attributes:
        new: the number of its tokens.
        snapshot: the slots before the call; None before a prompt, which has none.
        repeat: admits a part of its tokens; None for a single token.
        layout, seen, clocks, absent, limits: as of `LayerCache`.
    """

    new: int
    snapshot: Restorable | None
    repeat: Repeat | None
    layout: Layout
    seen: int
    clocks: tuple[Any, ...]
    absent: Tensor
    limits: tuple[int, ...]

    @property
    def croppable(self) -> int:
        """The number of its tokens that can be cropped; the first token of a prompt stays."""
        return self.new if self.snapshot is not None else self.new - 1

    def before(self, cache: Any) -> Any:
        """Return the cache as it was before the call."""
        slots = cache.slots if self.snapshot is None else self.snapshot.restored()
        fields: dict[str, Any] = dict(layout=self.layout, seen=self.seen, clocks=self.clocks, limits=self.limits)
        return dataclasses.replace(cache, slots=slots, calls=(), absent=self.absent, **fields)


Calls = tuple[PastCall, ...]


def recorded(calls: Calls, call: PastCall, most: int) -> Calls:
    """Return the calls to remember after another one, so that up to `most` tokens can be cropped.

    A prompt is then forgotten, because its record holds every token.  So are all calls before a chunk, which has its
    own slots.
    """
    if call.new > 1:
        return (call,)
    remembered = tuple(past for past in (*calls, call) if past.snapshot is not None)
    while sum(past.new for past in remembered[1:]) >= most:
        remembered = remembered[1:]
    return remembered


def check(calls: Sequence[PastCall], count: int, most: int) -> None:
    """Check that `count` tokens can be cropped, of at most the backend's `crop`.

    Raises:
        CacheHandleError: only fewer can; the message says how many and what to change.
    """
    croppable = min(most, sum(call.croppable for call in calls))
    if count <= croppable:
        return
    if not most:
        reason = f"pass crop={count} to kvpass, which then remembers what the last tokens overwrote"
    elif count > most:
        reason = f"crop={most} remembers no more: pass crop={count}"
    else:
        reason = (
            "what came before is not remembered: a prompt keeps its first token and is remembered until the next call, "
            "and nothing is from before a call of several tokens, or from before rows were picked or copied"
        )
    raise CacheHandleError(f"{count} tokens of a cache were to be cropped, and {croppable} can be: {reason}")
