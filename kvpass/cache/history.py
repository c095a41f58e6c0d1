"""The last calls on a layer's cache, each with what it takes to take it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from kvpass.cache.slots import Layout
from kvpass.errors import CacheHandleError


class Restorable(Protocol):
    """Slots as they were before a call."""

    def restored(self) -> Any:
        """They are again what they were."""
        ...


class Repeatable(Protocol):
    """A call of several tokens that can be made again with fewer."""

    def first(self, cache: Any, count: int) -> Any:
        """A layer's cache as it is once the first tokens of the call are taken in.

        Args:
            cache: as it was before the call.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PastCall:
    """One call, and how a layer's cache was before it.

    Attributes:
        new: how many tokens it had.
        kept: the slots; None before a prompt, when there were none.
        again: takes a part of its tokens in; None for a single token.
        layout, seen, clocks, absent: as of `LayerCache`.
    """

    new: int
    kept: Restorable | None
    again: Repeatable | None
    layout: Layout
    seen: int
    clocks: tuple[Any, ...]
    absent: Tensor

    @property
    def undoes(self) -> int:
        """How many of its tokens can be taken back: of a prompt the first one stays."""
        return self.new if self.kept is not None else self.new - 1

    def before(self, cache: Any) -> Any:
        """The cache as it was."""
        slots = cache.slots if self.kept is None else self.kept.restored()
        was = dict(layout=self.layout, seen=self.seen, clocks=self.clocks, absent=self.absent)
        return dataclasses.replace(cache, slots=slots, calls=(), **was)


Calls = tuple[PastCall, ...]


def followed(calls: Calls, call: PastCall, most: int) -> Calls:
    """The calls to remember once another one came, so that up to `most` tokens can be taken back.

    A prompt is forgotten then, as it holds every token.  So is all before a chunk, as that has slots of its own.
    """
    if call.new > 1:
        return (call,)
    kept = tuple(one for one in (*calls, call) if one.kept is not None)
    while sum(one.new for one in kept[1:]) >= most:
        kept = kept[1:]
    return kept


def check(calls: Sequence[PastCall], count: int, most: int) -> None:
    """Whether so many tokens can be taken back.

    Args:
        most: the backend's `crop`.

    Raises:
        CacheHandleError: they cannot; says how many can, and what to change.
    """
    can = min(most, sum(call.undoes for call in calls))
    if count <= can:
        return
    if not most:
        why = f"pass crop={count} to kvpass, which then remembers what the last tokens overwrote"
    elif count > most:
        why = f"crop={most} remembers no more: pass crop={count}"
    else:
        why = (
            "what came before is not remembered: a prompt keeps its first token and is remembered until the next call, "
            "and nothing is from before a call of several tokens, or from before rows were picked or copied"
        )
    raise CacheHandleError(f"{count} tokens of a cache were to be cropped, and {can} can be: {why}")
