"""Save the part of a layer's slots that a call overwrites, so that the call can be undone."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.cache.slots import Layout, Slots, rows_at
from kvpass.lowering.formats import Rows
from kvpass.lowering.formats.base import Parts, SlotIndices


@dataclasses.dataclass(frozen=True)
class SlotSnapshot:
    """Slots and their content before a step.

    Attributes:
        slots: the buffers.
        slot_index: the saved row of each head, None if all rows are saved.
        key, value: the saved rows as stored, each [B, Hkv, ...] or [B, Hkv, C, ...].
        others: all metadata, in the order of `Slots.metadata`.
    """

    slots: Slots
    slot_index: SlotIndices | None
    key: Parts
    value: Parts
    others: tuple[Tensor, ...]

    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def before_step(layout: Layout, slots: Slots) -> SlotSnapshot:
        """Save what a decode step overwrites in place.

        The step writes one row per head, at the free slot.  All rows are saved if the policy merges or aligns rows.
        """
        rewrites = layout.policy.merges or layout.policy.aligns in ("step", "compact")
        slot_index = None if rewrites else rows_at(slots.free.clone(), layout.heads)
        others = tuple(tensor.clone() for tensor in slots.metadata)
        return SlotSnapshot(slots, slot_index, _cloned(slots.key, slot_index), _cloned(slots.value, slot_index), others)

    @torch.inference_mode(False)
    @torch.no_grad()
    def restored(self) -> Slots:
        """Restore the content and return the slots."""
        for rows, parts in ((self.slots.key, self.key), (self.slots.value, self.value)):
            for buffer, part in zip(rows.parts, parts, strict=True):
                buffer[slice(None) if self.slot_index is None else self.slot_index] = part
        for buffer, other in zip(self.slots.metadata, self.others, strict=True):
            buffer.copy_(other)
        return self.slots


def _cloned(rows: Rows, slot_index: SlotIndices | None) -> Parts:
    return tuple(part.clone() if slot_index is None else part[slot_index] for part in rows.parts)


@dataclasses.dataclass(frozen=True)
class UnchangedSlots:
    """Slots that a chunk left unchanged, because it was admitted to other slots."""

    slots: Slots

    def restored(self) -> Slots:
        return self.slots
