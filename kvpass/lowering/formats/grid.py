"""Provide scales of the integer formats, and products that write no decoded rows to memory.

A product over codes is written as multiply and sum.  The compiler makes one loop that reads codes, and decoded numbers
never leave its registers.  The query heads of a KV head are sums of one loop, which reads the codes once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.fx.precision import upcast
from kvpass.torch_private.inductor import materialized

SCALE = torch.bfloat16  # the range of float32; its rounding is harmless, as codes are computed for the stored scale
MOST_SUMS = 16  # sums that fit in registers
LONGEST_SUM = 4096  # numbers summed one after the other; Inductor's own limit
MOST_ROWS = 16  # rows of one loop; the library multiplies more, with decoded rows in memory


def storable(scale: Tensor) -> Tensor:
    """Round float32 scales to bfloat16 values, ties to even.

    This works on bits, because a compiler may drop a conversion to bfloat16 and back.
    """
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def rounded_codes(rows: Tensor, scale: Tensor) -> Tensor:
    """Divide rows by their scale and round to the nearest integer; zero where the scale is zero."""
    return torch.where(scale > 0, rows / scale, 0).round()


def summed_over_dim(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """Multiply queries [B, H, R, D] with keys [B, H, N, D] in sections of D: [B, H, R, N].

    The queries are materialized in the dtype of the sums.  With queries in half precision, a compiler would convert
    twice as many codes at a time, for which processors have no instruction.
    """
    return row_by_row(materialized(upcast(query)), sections)


def row_by_row(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """Multiply materialized queries with keys in sections.

    The rows are sums of one loop, which reads a key once for all of them.
    """
    return torch.stack([over_sections(query[:, :, r, None], sections) for r in range(query.shape[2])], 2)


def over_sections(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """Multiply queries [..., 1, D] with keys [..., N, D] in sections [..., N, d] of D: [..., N].

    Products of sections of one size are added before they are summed over d.
    """
    by_width: dict[int, Tensor] = {}
    parts = torch.split(query, [section.shape[-1] for section in sections], -1)
    for part, section in zip(parts, sections, strict=True):
        width, product = section.shape[-1], upcast(part) * upcast(section)
        by_width[width] = by_width[width] + product if width in by_width else product
    return functools.reduce(torch.add, [products.sum(-1) for products in by_width.values()])


def summed_over_rows(probs: Sequence[Tensor], sections: Sequence[Tensor]) -> Tensor:
    """Sum values [B, H, N, D], in sections of D, by probabilities [B, H, R, N]: [B, H, R, D].

    Each section has its own probabilities.  Blocks of rows are summed in parallel, as many as there are registers for.
    No block is so long that a compiler uses a cascade sum.
    """
    probs, (count, length) = [materialized(p) for p in probs], probs[0].shape[2:]
    blocks = max(MOST_SUMS // (count * len(sections)), -(-length // LONGEST_SUM), 1)
    size = max(1, length // blocks)
    even = length // size * size
    slices = [slice(start, start + size) for start in range(0, even, size)]
    slices += [slice(even, length)] if even < length else []
    pairs = list(zip(probs, sections, strict=True))
    sums = [
        torch.cat([_sum_in_blocks(p[:, :, r, :, None], section, slices) for p, section in pairs], -1)
        for r in range(count)
    ]
    return torch.stack(sums, 2)


def _sum_in_blocks(left: Tensor, right: Tensor, slices: Sequence[slice]) -> Tensor:
    """Return the sum over dimension 2 of a product, block by block."""
    return functools.reduce(torch.add, [(left[:, :, block] * right[:, :, block]).sum(2) for block in slices])


def summed(terms: Tensor) -> Tensor:
    """Return the sum over dimension 2 of [B, H, N, d], in blocks too short for a compiler's cascade sum."""
    length = terms.shape[2]
    if length <= LONGEST_SUM:
        return terms.sum(2)
    blocks = -(-length // LONGEST_SUM)
    even = length // blocks * blocks
    total = torch.unflatten(terms[:, :, :even], 2, (blocks, -1)).sum(3).sum(2)
    return total if even == length else total + terms[:, :, even:].sum(2)
