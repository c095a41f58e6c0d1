"""Record the last calls on a layer's cache, so that they can be undone.

A decode step overwrites one slot of each head, so its vectors are copied before the step.  A chunk is admitted to other
slots, and its keys and values are kept until the next call.  To crop a chunk, its first tokens are admitted again to
the slots from before the chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.layout import Layout
from kvpass.cache.slots import AnySlots, Slots, row_indices
from kvpass.errors import CacheHandleError
from kvpass.lowering.formats import EncodedVectors
from kvpass.lowering.formats.base import Parts, SlotIndices


@dataclasses.dataclass(frozen=True)
class SavedContent:
    """A copy of the content that a decode step overwrites in the slots of a layer."""

    slot_index: SlotIndices | None  # of each head's vector; None if all slots are saved
    key: Parts
    value: Parts
    others: tuple[Tensor, ...]  # all metadata, in the order of `Slots.metadata`

    @staticmethod
    def of(layout: Layout, slots: Slots) -> SavedContent:
        """Save the vectors in the free slot of each head; all slots if the policy merges or aligns."""
        rewrites = layout.policy.merges or layout.policy.aligns in ("step", "compact")
        slot_index = None if rewrites else row_indices(slots.free.clone(), layout.heads)
        others = tuple(tensor.clone() for tensor in slots.metadata)
        return SavedContent(
            slot_index, _clone_vectors(slots.key, slot_index), _clone_vectors(slots.value, slot_index), others
        )

    def write_to(self, slots: Slots) -> None:
        for rows, parts in ((slots.key, self.key), (slots.value, self.value)):
            for buffer, part in zip(rows.parts, parts, strict=True):
                buffer[slice(None) if self.slot_index is None else self.slot_index] = part
        for buffer, other in zip(slots.metadata, self.others, strict=True):
            buffer.copy_(other)


def _clone_vectors(rows: EncodedVectors, slot_index: SlotIndices | None) -> Parts:
    return tuple(part.clone() if slot_index is None else part[slot_index] for part in rows.parts)


@dataclasses.dataclass(frozen=True)
class SlotSnapshot:
    """The slots of a layer before a call.

    Attributes:
        slots: the buffers.
        saved: for each class of heads what a step overwrites; () if the call leaves these slots unchanged, as a chunk
            does, which is admitted to others.
    """

    slots: AnySlots
    saved: tuple[SavedContent, ...] = ()

    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def before_step(layout: Layout, slots: AnySlots) -> SlotSnapshot:
        """Save what a decode step overwrites in place."""
        return SlotSnapshot(slots, tuple(map(SavedContent.of, layout.by_class, slots.by_class)))

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> AnySlots:
        """Restore the content and return the slots."""
        for saved, slots in zip(self.saved, self.slots.by_class if self.saved else (), strict=True):
            saved.write_to(slots)
        return self.slots


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
