"""Transform rows before quantisation, so that a few large numbers are spread over all.

    x' = x H / sqrt(b),   H[i, j] = (-1)^(number of ones that i and j have in common, in binary)

H is Sylvester's Hadamard matrix, of the largest power of two b that divides the size of a head; a row has one or
several blocks of b numbers.  H is orthogonal and its own inverse: a transformed query has the same products with
transformed keys, so attention transforms the query and never a stored row (Ashkboos et al., "QuaRot", 2024,
https://arxiv.org/abs/2404.00456, section 4).  Keys have a few large numbers, at the same indices for all tokens (Liu et
al., "KIVI", 2024, https://arxiv.org/abs/2402.02750, section 3).  Values do not and are stored without the transform.

Sums are of signed numbers in double precision, which is nearly always exact in any order.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from kvpass.fx.precision import accumulate_dtype, upcast
from kvpass.lowering.formats.base import Format, Parts


@dataclasses.dataclass(frozen=True)
class Hadamard(Format):
    """A format of transformed rows, which another format stores."""

    inner: Format
    dtype: torch.dtype
    transforms = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.inner.names)
        object.__setattr__(self, "bits", self.inner.bits)

    def layout(self) -> list[tuple[int, torch.dtype]]:
        return self.inner.layout()

    def encode(self, rows: Tensor) -> Parts:
        return self.inner.encode(transformed(rows))

    def decode(self, parts: Parts) -> Tensor:
        return transformed(self.inner.decode(parts))

    def prepared_query(self, query: Tensor) -> Tensor:
        return transformed(query)

    def products(self, query: Tensor, parts: Parts) -> Tensor:
        return self.inner.products(self.prepared_query(query), parts)

    def weighted_sum(self, probs: Tensor, parts: Parts, dtype: torch.dtype) -> Tensor:
        return transformed(self.inner.weighted_sum(probs, parts, accumulate_dtype(self.dtype))).to(dtype)


def transformed(rows: Tensor) -> Tensor:
    """Transform rows [..., D] in the dtype of `upcast`; a second transform returns the original rows."""
    dim = rows.shape[-1]
    size = dim & -dim  # the largest power of two that divides it
    blocks = torch.unflatten(rows.double(), -1, (-1, size))
    return (torch.matmul(blocks, signs(size, rows.device)) / math.sqrt(size)).flatten(-2).to(upcast(rows).dtype)


def signs(size: int, device: torch.device) -> Tensor:
    """Return H, float64 [b, b]; b is a power of two up to 65,536."""
    indices = torch.arange(size, device=device)
    common = indices[:, None] & indices
    for shift in (8, 4, 2, 1):
        common = common ^ (common >> shift)
    return (1 - 2 * (common & 1)).double()
