"""What a call is about to overwrite in a layer's slots, so that it can be taken back."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.layer.slots import Layout, Slots, rows_at
from kvpass.storage import Rows
from kvpass.storage.base import Parts, Place


@dataclasses.dataclass(frozen=True)
class Kept:
    """Slots, and what was in them.

    Attributes:
        slots: the buffers.
        place: where one row of each head was copied, None if all rows were.
        key, value: the rows as they are stored, each [B, Hkv, ...] or [B, Hkv, C, ...].
        others: all metadata, in the order of `Slots.metadata`.
    """

    slots: Slots
    place: Place | None
    key: Parts
    value: Parts
    others: tuple[Tensor, ...]

    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def before_step(layout: Layout, slots: Slots) -> Kept:
        """Before one token is decoded in place.

        It is written to the free slot, and no other row changes, unless the policy merges or repairs rows: then all
        are copied.
        """
        rewrites = layout.policy.merges or layout.policy.aligns in ("step", "sweep")
        place = None if rewrites else rows_at(slots.free.clone(), layout.heads)
        others = tuple(tensor.clone() for tensor in slots.metadata)
        return Kept(slots, place, _copied(slots.key, place), _copied(slots.value, place), others)

    @torch.inference_mode(False)
    @torch.no_grad()
    def restored(self) -> Slots:
        """The slots with what was in them."""
        for rows, parts in ((self.slots.key, self.key), (self.slots.value, self.value)):
            for buffer, part in zip(rows.parts, parts, strict=True):
                buffer[slice(None) if self.place is None else self.place] = part
        for buffer, other in zip(self.slots.metadata, self.others, strict=True):
            buffer.copy_(other)
        return self.slots


def _copied(rows: Rows, place: Place | None) -> Parts:
    return tuple(part.clone() if place is None else part[place] for part in rows.parts)


@dataclasses.dataclass(frozen=True)
class Untouched:
    """Slots that a chunk left alone, as it was taken into others."""

    slots: Slots

    def restored(self) -> Slots:
        return self.slots
