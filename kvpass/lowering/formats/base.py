"""Rows of keys or of values, in any format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvpass.lowering.formats.sections import Sections

BLOCK = 4096  # rows that are encoded at a time: what it takes in between is several times their size

Parts = tuple[Tensor, ...]
"""The tensors of rows [B, H, N, D]: each [B, H, N, ...], the one with the numbers or their codes first."""

SlotIndices = tuple[Tensor, Tensor, Tensor]
"""One slot of every head: indices of rows, heads and slots, broadcastable to [B, H]."""


class Format(Protocol):
    """What tensors hold rows, and how attention works on them; equal to another that stores alike."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors behind the first."""

    @property
    def bits(self) -> int:
        """Of a code; 0 where rows are numbers."""

    @property
    def exact(self) -> bool:
        """Whether what was read and is stored again is what it was."""

    @property
    def transforms(self) -> bool:
        """Whether codes are of transformed rows, so that `prepared_query` does something."""

    def layout(self) -> list[tuple[int, torch.dtype]]:
        """The last dimension and the dtype of each tensor."""

    def encode(self, rows: Tensor) -> Parts:
        """Rows [..., D] as they are stored."""

    def decode(self, parts: Parts) -> Tensor:
        """Stored rows as they are attended to, [..., D]: the model's numbers, or as `wide` has them."""

    def sections(self, parts: Parts) -> Sequence[Tensor]:
        """The same in consecutive sections of D, as they can be read without moving numbers."""

    def ordered(self, parts: Parts) -> Parts:
        """The same with numbers in their order, whatever the device that they are on has them lie like."""

    def to_device_layout(self, parts: Parts) -> Parts:
        """And back, as they lie on the device that they are on."""

    def prepared_query(self, query: Tensor) -> Tensor:
        """Queries [..., D] as what the codes stand for is to be multiplied with; for code that reads codes itself."""

    def products(self, query: Tensor, parts: Parts) -> Tensor:
        """Of queries [B, H, R, D] and stored keys: [B, H, R, N]."""

    def weighted_sum(self, probs: Tensor, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Of stored values, by probabilities [B, H, R, N] as `wide` has them: [B, H, R, D] in a dtype."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows [B, H, N, D] in a format."""

    format: Format
    parts: Parts

    @staticmethod
    def empty(format: Format, shape: tuple[int, int, int], device: torch.device) -> Rows:
        """B rows of N zeros for H heads."""
        parts = [torch.zeros(*shape, last, dtype=kind, device=device) for last, kind in format.layout()]
        return Rows(format, tuple(parts))

    @staticmethod
    def of(format: Format, rows: Tensor) -> Rows:
        """Rows [B, H, N, D] as they are to be stored."""
        if rows.shape[2] <= BLOCK or format.exact:
            return Rows(format, format.encode(rows))
        blocks = [format.encode(block) for block in torch.split(rows, BLOCK, 2)]
        return Rows(format, tuple(torch.cat(part, 2) for part in zip(*blocks, strict=True)))

    @property
    def codes(self) -> Tensor:
        """The tensor with the numbers or their codes."""
        return self.parts[0]

    @property
    def shape(self) -> torch.Size:
        """Of the first tensor."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def read(self) -> Tensor:
        """All rows as they are attended to."""
        return self.format.decode(self.parts)

    def read_as(self, dtype: torch.dtype) -> Tensor:
        """All rows for code that is the model's own or a policy's, which expects the model's dtype."""
        return self.parts[0] if self.format.exact else self.read().to(dtype)

    def in_sections(self, dtype: torch.dtype) -> Sections:
        """The same for code that works on sections."""
        return Sections(tuple(x.to(dtype) for x in self.format.sections(self.parts)), self.read_as(dtype))

    def elsewhere(self, move: Callable[[Tensor], Tensor]) -> Rows:
        """These rows moved to another kind of device, where codes may lie otherwise."""
        return Rows(self.format, self.format.to_device_layout(tuple(map(move, self.format.ordered(self.parts)))))

    def at(self, index: SlotIndices) -> Tensor:
        """One row of each head, [B, H, D]."""
        return self.format.decode(tuple(part[index] for part in self.parts))

    def put(self, index: SlotIndices, new: Rows, only: Tensor | None = None) -> None:
        """Overwrite one row of each head with those of `new` [B, H, 1, D], where `only` [B or 1, H or 1, 1] is true."""
        for part, fresh in zip(self.parts, new.parts, strict=True):
            row = fresh[:, :, 0]
            part.index_put_(index, row if only is None else torch.where(only, row, part[index]))

    def replace(self, rows: Tensor, only: Tensor) -> None:
        """Overwrite the rows for which `only` [B, H, N] is true with those of [B, H, N, D] and leave the others.

        A format that is `exact` is given the others as they were read.
        """
        for part, fresh in zip(self.parts, self.format.encode(rows), strict=True):
            part.copy_(fresh if self.format.exact else torch.where(only[..., None], fresh, part))

    def fill(self, rows: Rows) -> None:
        """Overwrite the first rows."""
        for part, fresh in zip(self.parts, rows.parts, strict=True):
            part[:, :, : fresh.shape[2]] = fresh

    def scattered(self, indices: Tensor, count: int) -> Rows:
        """The same at places [n] of so many rows, the others of zeros."""
        spread = Rows.empty(self.format, (*self.shape[:2], count), self.device)
        for part, fresh in zip(spread.parts, self.parts, strict=True):
            part[:, :, indices] = fresh
        return spread

    def gathered(self, chosen: Tensor) -> Rows:
        """The rows at places [B, H', n]."""
        indices = chosen.expand(-1, self.shape[1], -1)[..., None]
        return Rows(
            self.format, tuple(part.gather(2, indices.expand(-1, -1, -1, part.shape[-1])) for part in self.parts)
        )

    def beside(self, others: Rows) -> Rows:
        """These rows, then others."""
        joined = zip(self.parts, others.parts, strict=True)
        return Rows(self.format, tuple(torch.cat(pair, 2) for pair in joined))
