"""What a call is about to overwrite in a layer's slots, so that it can be taken back."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.cache.slots import Layout, Slots, rows_at
from kvpass.lowering.formats import Rows
from kvpass.lowering.formats.base import Parts, SlotIndices


@dataclasses.dataclass(frozen=True)
class SlotSnapshot:
    """Slots, and what was in them.

    Attributes:
        slots: the buffers.
        slot_index: where one row of each head was copied, None if all rows were.
        key, value: the rows as they are stored, each [B, Hkv, ...] or [B, Hkv, C, ...].
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
        """Before one token is decoded in place.

        It is written to the free slot, and no other row changes, unless the policy merges or repairs rows: then all
        are copied.
        """
        rewrites = layout.policy.merges or layout.policy.aligns in ("step", "compact")
        slot_index = None if rewrites else rows_at(slots.free.clone(), layout.heads)
        others = tuple(tensor.clone() for tensor in slots.metadata)
        return SlotSnapshot(slots, slot_index, _copied(slots.key, slot_index), _copied(slots.value, slot_index), others)

    @torch.inference_mode(False)
    @torch.no_grad()
    def restored(self) -> Slots:
        """The slots with what was in them."""
        for rows, parts in ((self.slots.key, self.key), (self.slots.value, self.value)):
            for buffer, part in zip(rows.parts, parts, strict=True):
                buffer[slice(None) if self.slot_index is None else self.slot_index] = part
        for buffer, other in zip(self.slots.metadata, self.others, strict=True):
            buffer.copy_(other)
        return self.slots


def _copied(rows: Rows, slot_index: SlotIndices | None) -> Parts:
    return tuple(part.clone() if slot_index is None else part[slot_index] for part in rows.parts)


@dataclasses.dataclass(frozen=True)
class UnchangedSlots:
    """Slots that a chunk left alone, as it was taken into others."""

    slots: Slots

    def restored(self) -> Slots:
        return self.slots
