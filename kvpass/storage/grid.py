"""What formats of whole numbers share: their scales, and products that decode nothing into memory.

A product over codes is spelled as multiply and sum.  A compiler makes one loop of it that reads codes, and the numbers
that they stand for never leave its registers; the query heads of a KV head are sums of one loop, so codes are read once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

SCALE = torch.bfloat16  # the range of float32; that it is coarse costs nothing, as codes are made for what is stored
MOST_ROWS = 16  # rows of one loop; more are multiplied by the library, with the decoded rows in memory


def storable(scale: Tensor) -> Tensor:
    """Scales in float32 rounded to what bfloat16 holds, ties to even.

    By arithmetic on bits: a compiler may leave out a conversion to bfloat16 and back.
    """
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def steps(rows: Tensor, scale: Tensor) -> Tensor:
    """Rows in steps of their scale, to the nearest whole number; zero where the scale is."""
    return torch.where(scale > 0, rows / scale, 0).round()


def summed_over_dim(query: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """Products of queries [B, H, R, D] with keys [B, H, N, D] that come in pieces of D: [B, H, R, N]."""
    widths = [piece.shape[-1] for piece in pieces]
    rows = [torch.split(query[:, :, r, None], widths, -1) for r in range(query.shape[2])]  # [B, H, 1, d] each
    products = [[part * piece for part, piece in zip(row, pieces, strict=True)] for row in rows]
    return torch.stack([functools.reduce(torch.add, parts).sum(-1) for parts in products], 2)


def summed_over_rows(paid: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """Mixtures of values [B, H, N, D] that come in pieces of D, by [B, H, R, N]: [B, H, R, D]."""
    rows = [paid[:, :, r, :, None] for r in range(paid.shape[2])]
    sums = [torch.cat([(row * piece).sum(2) for piece in pieces], -1) for row in rows]
    return torch.stack(sums, 2)
