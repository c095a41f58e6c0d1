"""Provide scales of the integer formats, and products that write no decoded vectors to memory.

A product over codes is written as multiply and sum.  The compiler makes one loop that reads codes, and decoded numbers
never leave its registers.  The query heads of a KV head are sums of one loop, which reads the codes once.

On a processor with AVX2, codes are loaded in *words* of 32 bits.  A vector of eight numbers needs eight bytes of codes,
and the compiler's code for such a load goes through memory, which is ten times slower.  A word has four bytes, so eight
words fill a vector.  Each code is masked out of its word without a shift.  As a float it is the code times a power of
two, which is exact, and the other factor of the product is divided by that power.  Codes at one offset in their words
are of every fourth number of a row.  Rows that are rotated whenever they are read are stored `in_planes`, because a
rotary embedding mixes numbers half a row apart.  Codes at one offset in their words then belong to adjacent numbers, so
cosines and sines are read in order.  Longer vectors load bytes directly, and so do rows that do not fill vectors with
words.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.fx.precision import upcast
from kvpass.lowering.formats.base import StoredTensors
from kvpass.torch_private.inductor import materialize

LANES = 8  # numbers of an AVX2 vector
WORD = 4  # bytes


@dataclasses.dataclass(frozen=True)
class WordPart:
    """Codes of some numbers of a group, [B, H, N, d], each times `unit`, a power of two."""

    codes: Tensor
    unit: float = 1.0


@dataclasses.dataclass(frozen=True)
class WordGroup:
    """Adjacent numbers of a row that share a scale: scale * (code + zero).

    Attributes:
        parts: n parts; the first has the numbers 0, n, 2n, ... of the group and the next 1, n + 1, ....  With
            `in_planes` the first has the first n-th of the group's numbers, and so on.
        scale, zero: [B, H, N, 1]; `zero` is None if all zero points are zero.
        in_planes: whether rows are stored in planes.
    """

    parts: Sequence[WordPart]
    scale: Tensor
    zero: Tensor | None = None
    in_planes: bool = False

    @property
    def size(self) -> int:
        """The number of numbers in the group."""
        return len(self.parts) * self.parts[0].codes.shape[-1]

    def split_row(self, row: Tensor) -> list[Tensor]:
        """Split the group's numbers [..., size] like the parts."""
        count = len(self.parts)
        return list(row.chunk(count, -1)) if self.in_planes else [row[..., first::count] for first in range(count)]

    def join_numbers(self, numbers: Sequence[Tensor]) -> Tensor:
        """Join numbers that are split like the parts, [..., size]."""
        return torch.cat(list(numbers), -1) if self.in_planes else torch.stack(list(numbers), -1).flatten(-2)

    def decode(self) -> list[Tensor]:
        """Decode the numbers of each part."""
        codes = [part.codes / part.unit for part in self.parts]
        return [(code if self.zero is None else code + self.zero) * self.scale for code in codes]


def to_planes(parts: StoredTensors) -> StoredTensors:
    """Reorder codes [..., n] so that the first bytes of all words hold the first quarter, and so on."""
    return torch.unflatten(parts[0], -1, (WORD, -1)).transpose(-1, -2).flatten(-2), *parts[1:]


def from_planes(parts: StoredTensors) -> StoredTensors:
    """Reorder codes in planes to the order of the numbers."""
    return torch.unflatten(parts[0], -1, (-1, WORD)).transpose(-1, -2).flatten(-2), *parts[1:]


def fills_vectors(codes: Tensor, byte_count: int) -> bool:
    """Return whether `byte_count` bytes of codes [B, H, N, ...] fill vectors with words, on a processor with AVX2."""
    aligned = byte_count % (WORD * LANES) == 0
    return aligned and codes.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def signed_parts(words: Tensor, dtype: torch.dtype) -> list[WordPart]:
    """Split words int32 [B, H, N, d] into signed bytes, each moved to the top of its word."""
    tops = [words << (24 - 8 * byte) for byte in range(WORD - 1)] + [words]
    # Below the lowest byte there are only zeros; below the others there are lower bytes, which are masked off.
    return [WordPart((tops[0] if byte == 0 else top & -(1 << 24)).to(dtype), 2.0**24) for byte, top in enumerate(tops)]


def nibble_parts(words: Tensor, high: bool, dtype: torch.dtype) -> list[WordPart]:
    """Return the low or high half of each byte of words int32 [B, H, N, d].

    The topmost nibble includes the word's sign bit, so it is shifted down.
    """
    return [_nibble(words, 8 * byte + 4 * high, dtype) for byte in range(WORD)]


def _nibble(words: Tensor, shift: int, dtype: torch.dtype) -> WordPart:
    if shift == 28:
        return WordPart(((words >> shift) & 15).to(dtype))
    return WordPart((words & (15 << shift)).to(dtype), 2.0**shift)


def products(query: Tensor, groups: Sequence[WordGroup]) -> Tensor:
    """Multiply queries [B, H, R, D] with keys: [B, H, R, N].

    Each group has its own sum: in one sum of all groups the compiler would write the terms to memory, as they read too
    many tensors.
    """
    parts = torch.split(upcast(query), [group.size for group in groups], -1)
    return _total([_products(part, group) for part, group in zip(parts, groups, strict=True)])


def _products(query: Tensor, group: WordGroup) -> Tensor:
    """Multiply queries [B, H, R, size] with a group of keys: [B, H, R, N].

    The product is the sum of scale * (query * code + query * zero).
    """
    query_parts = group.split_row(query)  # [B, H, R, d] each
    pairs = [
        (materialize(operand / part.unit), part.codes) for operand, part in zip(query_parts, group.parts, strict=True)
    ]
    if group.zero is not None:
        pairs.append((materialize(_total(query_parts)), group.zero))
    terms = [_total([operand[:, :, r, None] * codes for operand, codes in pairs]) for r in range(query.shape[2])]
    return torch.stack([operand.sum(-1) * group.scale[..., 0] for operand in terms], 2)


def weighted_sum(probs: Tensor, groups: Sequence[WordGroup]) -> Tensor:
    """Sum values by probabilities [B, H, R, N]: [B, H, R, D]."""
    probs = materialize(probs)
    rows = [probs[:, :, r, :, None] for r in range(probs.shape[2])]  # [B, H, N, 1] each
    return torch.stack([torch.cat([_weighted_sum(row, group) for group in groups], -1) for row in rows], 2)


def _weighted_sum(probs: Tensor, group: WordGroup) -> Tensor:
    """Sum the values of one group by probabilities [B, H, N, 1]: [B, H, size]."""
    share = probs * group.scale
    if group.zero is None:
        share = materialize(share)  # with scales in half precision the loop would take twice the numbers at a time
    sums = [sum_rows(share * part.codes) / part.unit for part in group.parts]
    if group.zero is not None:
        offset = sum_rows(share * group.zero.expand_as(group.parts[0].codes))
        sums = [part_sum + offset for part_sum in sums]
    return group.join_numbers(sums)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


SCALE = torch.bfloat16  # the range of float32; its rounding is harmless, as codes are computed for the stored scale
MAX_SUMS = 16  # sums of one loop that fit in registers
MAX_SUM_LENGTH = 4096  # numbers summed one after the other; Inductor's own limit
MAX_ROWS_IN_LOOP = 16  # rows of one loop; the library multiplies more, with decoded vectors in memory


def round_scale(scale: Tensor) -> Tensor:
    """Round float32 scales to bfloat16 values, ties to even.

    This works on bits, because a compiler may drop a conversion to bfloat16 and back.
    """
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def round_to_codes(rows: Tensor, scale: Tensor) -> Tensor:
    """Divide rows by their scale and round to the nearest integer; zero where the scale is zero."""
    return torch.where(scale > 0, rows / scale, 0).round()


def multiply_queries(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """Multiply queries [B, H, R, D] with keys [B, H, N, D] in sections of D: [B, H, R, N].

    The queries are materialized in the dtype of the sums.  With queries in half precision, a compiler would convert
    twice the codes at a time, for which processors have no instruction.
    """
    return row_by_row(materialize(upcast(query)), sections)


def row_by_row(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """Multiply materialized queries with keys in sections.

    The rows are sums of one loop, which reads a key once for all of them.
    """
    return torch.stack([multiply_sections(query[:, :, r, None], sections) for r in range(query.shape[2])], 2)


def multiply_sections(query: Tensor, sections: Sequence[Tensor]) -> Tensor:
    """Multiply queries [..., 1, D] with keys [..., N, D] in sections [..., N, d] of D: [..., N].

    Products of sections of one size are added before they are summed over d.
    """
    by_width: dict[int, Tensor] = {}
    parts = torch.split(query, [section.shape[-1] for section in sections], -1)
    for part, section in zip(parts, sections, strict=True):
        width, product = section.shape[-1], upcast(part) * upcast(section)
        by_width[width] = by_width[width] + product if width in by_width else product
    return functools.reduce(torch.add, [products.sum(-1) for products in by_width.values()])


def sum_values(probs: Sequence[Tensor], sections: Sequence[Tensor]) -> Tensor:
    """Sum values [B, H, N, D], in sections of D, by probabilities [B, H, R, N]: [B, H, R, D].

    Each section has its own probabilities.  Blocks of rows are summed in parallel, up to the number of free registers.
    No block is so long that a compiler uses a cascade sum.
    """
    probs, (count, length) = [materialize(p) for p in probs], probs[0].shape[2:]
    blocks = max(MAX_SUMS // (count * len(sections)), -(-length // MAX_SUM_LENGTH), 1)
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


def sum_rows(terms: Tensor) -> Tensor:
    """Return the sum over dimension 2 of [B, H, N, d], in blocks too short for a compiler's cascade sum."""
    length = terms.shape[2]
    if length <= MAX_SUM_LENGTH:
        return terms.sum(2)
    blocks = -(-length // MAX_SUM_LENGTH)
    even = length // blocks * blocks
    total = torch.unflatten(terms[:, :, :even], 2, (blocks, -1)).sum(3).sum(2)
    return total if even == length else total + terms[:, :, even:].sum(2)
