"""A site's mask on slots, whichever way its graph has it."""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.instantiate import MaskSlice, as_allowed


@dataclasses.dataclass(frozen=True)
class MaskOnSlots:
    """A mask on slots: the nodes that it reads and how."""

    nodes: list[fx.Node]
    queries: int

    @property
    def tells_padding(self) -> bool:
        return True

    def on_slots(self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def of_new(self, length: Tensor, tensors: list[Tensor]) -> Tensor:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SlicedMask(MaskOnSlots):
    """A mask that is computed from a key index.

    Attributes:
        shifted: the model counts keys from the first that it stores; the second node is that one's place.
    """

    piece: MaskSlice
    shifted: bool

    @property
    def tells_padding(self) -> bool:
        return bool(self.piece.columns)

    def on_slots(self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor]) -> Tensor:
        first, columns, bound = self._sorted(tensors)
        ones = [torch.ones_like(column[:, :1]) for column in columns]
        return self.piece.on_slots(index, position, first, heads, ones, bound)

    def of_new(self, length: Tensor, tensors: list[Tensor]) -> Tensor:
        first, columns, bound = self._sorted(tensors)
        return self.piece.of_new(length, first, self.queries, columns, bound)

    def _sorted(self, tensors: list[Tensor]) -> tuple[Tensor | int, list[Tensor], list[Tensor]]:
        start, count = int(self.shifted), len(self.piece.columns)
        return tensors[0] if start else 0, tensors[start : start + count], tensors[start + count :]


@dataclasses.dataclass(frozen=True)
class ColumnMask(MaskOnSlots):
    """A mask whose size does not grow (the length was traced as a number): its columns are picked."""

    def on_slots(self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor]) -> Tensor:
        mask = tensors[0]  # [B or 1, Hq or 1, q, S]
        rows, groups, _ = index.shape
        mask = mask.expand(rows, -1, self.queries, -1)
        mask = mask[:, :, None] if mask.shape[1] == 1 else torch.unflatten(mask, 1, (heads, -1))  # [B, h, g, q, S]
        mask = mask.expand(-1, max(mask.shape[1], groups), -1, -1, -1)
        chosen = index.clamp(0, mask.shape[-1] - 1).expand(-1, mask.shape[1], -1)[:, :, None, None]
        return mask.gather(-1, chosen.expand(-1, -1, mask.shape[2], self.queries, -1))

    def of_new(self, length: Tensor, tensors: list[Tensor]) -> Tensor:
        mask = tensors[0]
        offset = mask.shape[-1] - self.queries
        mask = mask.expand(-1, -1, self.queries, -1)
        return as_allowed(mask[:, 0].diagonal(offset, -2, -1))
