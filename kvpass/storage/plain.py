"""Rows as the model makes them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.storage.base import Parts


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

    def laid(self, parts: Parts) -> Parts:
        return parts

    def asked(self, query: Tensor) -> Tensor:
        return query

    def products(self, query: Tensor, parts: Parts) -> Tensor:
        return torch.matmul(query, parts[0].transpose(-1, -2))

    def mixture(self, paid: Tensor, parts: Parts, dtype: torch.dtype) -> Tensor:
        return torch.matmul(paid.to(parts[0].dtype), parts[0])
