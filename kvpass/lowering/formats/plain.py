"""Store rows in the model's own dtype."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.lowering.formats.base import Parts


@dataclasses.dataclass(frozen=True)
class Plain:
    """Rows in the model's dtype."""

    dim: int
    dtype: torch.dtype
    names = ()
    bits = 0
    exact = True
    transforms = False

    def layout(self) -> list[tuple[int, torch.dtype]]:
        return [(self.dim, self.dtype)]

    def encode(self, rows: Tensor) -> Parts:
        return (rows.to(self.dtype),)

    def decode(self, parts: Parts) -> Tensor:
        return parts[0]

    def sections(self, parts: Parts) -> list[Tensor]:
        return [parts[0]]

    def ordered(self, parts: Parts) -> Parts:
        return parts

    def to_device_layout(self, parts: Parts) -> Parts:
        return parts

    def prepared_query(self, query: Tensor) -> Tensor:
        return query

    def products(self, query: Tensor, parts: Parts) -> Tensor:
        return torch.matmul(query, parts[0].transpose(-1, -2))

    def weighted_sum(self, probs: Tensor, parts: Parts, dtype: torch.dtype) -> Tensor:
        return torch.matmul(probs.to(parts[0].dtype), parts[0])
