"""A site's mask on slots, whichever way its graph has it."""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.instantiate import MaskSlice


@dataclasses.dataclass(frozen=True)
class MaskOnSlots:
    """A mask on slots: the nodes that it reads and how."""

    nodes: list[fx.Node]
    queries: int

    @property
    def facts(self) -> tuple[fx.Node, ...]:
        """What it reads of the stored rows."""
        return ()

    def on_slots(
        self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor], facts: list[Tensor]
    ) -> Tensor:
        """See `kvpass.step.Mask`; `tensors` are the values of `nodes`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SlicedMask(MaskOnSlots):
    """A mask that is computed from a key index, and from what belongs to the key's token.

    Attributes:
        shifted: the model counts keys from the first that it stores; the first node is that one's place.
        whole: the nodes of its entries are the tensors in which to look up, and not what was found for each slot.
    """

    piece: MaskSlice
    shifted: bool
    whole: bool = False

    @property
    def facts(self) -> tuple[fx.Node, ...]:
        return self.piece.facts

    def on_slots(
        self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor], facts: list[Tensor]
    ) -> Tensor:
        start, count = int(self.shifted), len(self.piece.entries)
        first = tensors[0] if start else 0
        length, given, bound = tensors[start], tensors[start + 1 :][:count], tensors[start + 1 + count :]
        if self.whole:
            entries = [entry.at(full, index) for entry, full in zip(self.piece.entries, given, strict=True)]
        else:
            entries = [_in_slots(x, index, length, self.queries) for x in given]
        return self.piece.on_slots(index, position, first, heads, entries, bound, facts)


def _in_slots(entries: Tensor, index: Tensor, length: Tensor, queries: int) -> Tensor:
    """Entries [B, H', C + q, ...] of the slots and the new tokens, as `index` [B, H', N] has them.

    A chunk is beside the slots, N = C + q; a single token has taken one of them, N = C.
    """
    if index.shape[-1] == entries.shape[2]:
        return entries
    held, new = entries[:, :, :-queries], entries[:, :, -queries:]
    fresh = (index == length).view(*index.shape, *[1] * (entries.ndim - 3))
    return torch.where(fresh, new, held)


@dataclasses.dataclass(frozen=True)
class ColumnMask(MaskOnSlots):
    """A mask whose size does not grow (the length was traced as a number): its columns are picked."""

    def on_slots(
        self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor], facts: list[Tensor]
    ) -> Tensor:
        mask = tensors[0]  # [B or 1, Hq or 1, q, S]
        rows, groups, _ = index.shape
        mask = mask.expand(rows, -1, self.queries, -1)
        mask = mask[:, :, None] if mask.shape[1] == 1 else torch.unflatten(mask, 1, (heads, -1))  # [B, h, g, q, S]
        mask = mask.expand(-1, max(mask.shape[1], groups), -1, -1, -1)
        chosen = index.clamp(0, mask.shape[-1] - 1).expand(-1, mask.shape[1], -1)[:, :, None, None]
        return mask.gather(-1, chosen.expand(-1, -1, mask.shape[2], self.queries, -1))
