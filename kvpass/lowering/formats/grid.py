"""What formats of whole numbers share: their scales, and products that decode nothing into memory.

A product over codes is spelled as multiply and sum.  A compiler makes one loop of it that reads codes, and the numbers
that they stand for never leave its registers; the query heads of a KV head are sums of one loop, which reads them once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.fx.precision import upcast
from kvpass.torch_private.inductor import materialized

SCALE = torch.bfloat16  # the range of float32; that it is coarse costs nothing, as codes are made for what is stored
SUMS = 16  # that are kept in registers
LONGEST = 4096  # numbers that are summed one after the other; Inductor's own limit for that
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


def summed_over_dim(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """Products of queries [B, H, R, D] with keys [B, H, N, D] that come in sections of D: [B, H, R, N].

    The queries are written out in the dtype of the sums: beside numbers in half precision, a compiler would convert
    twice as many codes at a time, for which processors have no instruction.
    """
    return row_by_row(materialized(upcast(query)), sections)


def row_by_row(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """The same of queries that are written out: sums of one loop, in which a key is read once for all of them."""
    return torch.stack([over_sections(query[:, :, r, None], sections) for r in range(query.shape[2])], 2)


def over_sections(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """Products of queries [..., 1, D] with keys [..., N, D] that come in sections [..., N, d] of D: [..., N].

    Sections of one size are added before they are summed.
    """
    by_width: dict[int, Tensor] = {}
    parts = torch.split(query, [section.shape[-1] for section in sections], -1)
    for part, section in zip(parts, sections, strict=True):
        width, product = section.shape[-1], upcast(part) * upcast(section)
        by_width[width] = by_width[width] + product if width in by_width else product
    return functools.reduce(torch.add, [products.sum(-1) for products in by_width.values()])


def summed_over_rows(probs: Sequence[Tensor], sections: Sequence[Tensor]) -> Tensor:
    """Mixtures of values [B, H, N, D] that come in sections of D, each by its own [B, H, R, N]: [B, H, R, D].

    Stretches of the rows are summed side by side, as many as there are registers for, and none so long that a compiler
    sums it in a cascade.
    """
    probs, (count, length) = [materialized(x) for x in probs], probs[0].shape[2:]
    stretches = max(SUMS // (count * len(sections)), -(-length // LONGEST), 1)
    size = max(1, length // stretches)
    whole = length // size * size
    cuts = [slice(start, start + size) for start in range(0, whole, size)]
    cuts += [slice(whole, length)] if whole < length else []
    pairs = list(zip(probs, sections, strict=True))
    sums = [torch.cat([_added(x[:, :, r, :, None], section, cuts) for x, section in pairs], -1) for r in range(count)]
    return torch.stack(sums, 2)


def _added(one: Tensor, other: Tensor, cuts: Sequence[slice]) -> Tensor:
    """The sum over dimension 2 of a product, stretch by stretch."""
    return functools.reduce(torch.add, [(one[:, :, cut] * other[:, :, cut]).sum(2) for cut in cuts])


def summed(terms: Tensor) -> Tensor:
    """The sum over dimension 2 of [B, H, N, d], never of so many at a time that a compiler sums them in a cascade."""
    length = terms.shape[2]
    if length <= LONGEST:
        return terms.sum(2)
    stretches = -(-length // LONGEST)
    whole = length // stretches * stretches
    made = torch.unflatten(terms[:, :, :whole], 2, (stretches, -1)).sum(3).sum(2)
    return made if whole == length else made + terms[:, :, whole:].sum(2)
