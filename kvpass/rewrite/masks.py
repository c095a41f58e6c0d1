"""A site's mask on slots, whichever way its graph has it."""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.expansion import Expansion
from kvpass.instantiate import MaskSlice, as_allowed


@dataclasses.dataclass(frozen=True)
class MaskOnSlots:
    """A mask on slots: the nodes that it reads and how."""

    nodes: list[fx.Node]
    queries: int

    @property
    def tells_padding(self) -> bool:
        return True

    @property
    def facts(self) -> tuple[fx.Node, ...]:
        """What it reads of the stored rows."""
        return ()

    def on_slots(
        self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor], facts: list[Tensor]
    ) -> Tensor:
        raise NotImplementedError

    def of_new(self, length: Tensor, tensors: list[Tensor]) -> Tensor:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SlicedMask(MaskOnSlots):
    """A mask that is computed from a key index.

    Attributes:
        shifted: the model counts keys from the first that it stores; the first node is that one's place.
        expansion: where it reads stored rows, what makes its facts of the new tokens' key and value, which are the
            last nodes but for those that the expansion binds.
    """

    piece: MaskSlice
    shifted: bool
    expansion: Expansion | None = None

    @property
    def facts(self) -> tuple[fx.Node, ...]:
        return self.piece.facts

    @property
    def tells_padding(self) -> bool:
        return bool(self.piece.columns)

    def on_slots(
        self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor], facts: list[Tensor]
    ) -> Tensor:
        first, columns, bound, _ = self._sorted(tensors)
        ones = [torch.ones_like(column[:, :1]) for column in columns]
        return self.piece.on_slots(index, position, first, heads, ones, bound, facts)

    def of_new(self, length: Tensor, tensors: list[Tensor]) -> Tensor:
        first, columns, bound, new = self._sorted(tensors)
        facts = self.expansion.on_slots(new[0], new[1], new[2:])[2] if self.expansion else []
        return self.piece.of_new(length, first, self.queries, columns, bound, facts)

    def _sorted(self, tensors: list[Tensor]) -> tuple[Tensor | int, list[Tensor], list[Tensor], list[Tensor]]:
        start, count, bound = int(self.shifted), len(self.piece.columns), len(self.piece.slice.bound)
        ends = (start + count, start + count + bound)
        return tensors[0] if start else 0, tensors[start : ends[0]], tensors[ends[0] : ends[1]], tensors[ends[1] :]


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

    def of_new(self, length: Tensor, tensors: list[Tensor]) -> Tensor:
        mask = tensors[0]
        offset = mask.shape[-1] - self.queries
        mask = mask.expand(-1, -1, self.queries, -1)
        return as_allowed(mask[:, 0].diagonal(offset, -2, -1))
