"""Products over codes that are loaded in words of 32 bits.

Vectors of eight numbers, as AVX2 has them, take eight bytes of codes, and what the compiler has for such a load goes
through memory: ten times slower.  A word has four bytes, so eight of them fill a vector.  Each code is masked out of
its word where it stands; as a float it is the code times a power of two, which is exact, and what it is multiplied
with takes that back.  Codes at one place in their words are of every fourth number of a row.

Rows that are rotated whenever they are read lie `in_planes`: an embedding mixes numbers half a row apart, and codes at
one place in their words are of numbers that stand together, so that what it is to them can be read in order.

Longer vectors load bytes as they are, and so do rows that do not fill vectors with words: see `grid`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.fx.precision import upcast
from kvpass.lowering.formats import grid
from kvpass.lowering.formats.base import Parts
from kvpass.torch_private.inductor import materialized

LANES = 8  # numbers of a vector of AVX2
WORD = 4  # bytes


@dataclasses.dataclass(frozen=True)
class WordPart:
    """Codes of some numbers of a group, [B, H, N, d], each times `unit`, a power of two."""

    codes: Tensor
    unit: float = 1.0


@dataclasses.dataclass(frozen=True)
class WordGroup:
    """Numbers of a row that stand together and share a scale: scale * (code + zero).

    Attributes:
        parts: n of them; the first of the numbers 0, n, 2n, ... of the group and the next of those behind, or
            `in_planes` of the first n-th of its numbers and so on.
        scale, zero: [B, H, N, 1]; no zero point is zero.
    """

    parts: Sequence[WordPart]
    scale: Tensor
    zero: Tensor | None = None
    in_planes: bool = False

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return len(self.parts) * self.parts[0].codes.shape[-1]

    def divided(self, row: Tensor) -> list[Tensor]:
        """Its numbers [..., size] as the parts have them."""
        count = len(self.parts)
        return list(row.chunk(count, -1)) if self.in_planes else [row[..., first::count] for first in range(count)]

    def joined(self, numbers: Sequence[Tensor]) -> Tensor:
        """And back."""
        return torch.cat(list(numbers), -1) if self.in_planes else torch.stack(list(numbers), -1).flatten(-2)

    def decoded(self) -> list[Tensor]:
        """The numbers of each part."""
        codes = [part.codes / part.unit for part in self.parts]
        return [(each if self.zero is None else each + self.zero) * self.scale for each in codes]


def in_planes(parts: Parts) -> Parts:
    """The same with codes [..., n] such that the first bytes of all words are the first fourth of them, and so on."""
    return torch.unflatten(parts[0], -1, (WORD, -1)).transpose(-1, -2).flatten(-2), *parts[1:]


def in_order(parts: Parts) -> Parts:
    """And back."""
    return torch.unflatten(parts[0], -1, (-1, WORD)).transpose(-1, -2).flatten(-2), *parts[1:]


def fill(codes: Tensor, together: int) -> bool:
    """Whether so many bytes of codes [B, H, N, ...] fill vectors with words, and the processor is to load those."""
    aligned = together % (WORD * LANES) == 0
    return aligned and codes.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def signed(words: Tensor, kind: torch.dtype) -> list[WordPart]:
    """The bytes of words int32 [B, H, N, d], each moved to the top of its word, where its sign is."""
    tops = [words << (24 - 8 * byte) for byte in range(WORD - 1)] + [words]
    return [WordPart((tops[0] if byte == 0 else top & -(1 << 24)).to(kind), 2.0**24) for byte, top in enumerate(tops)]


def nibbles(words: Tensor, high: bool, kind: torch.dtype) -> list[WordPart]:
    """The low or high half of each byte of words int32 [B, H, N, d]; the topmost is moved down, as it has the sign."""
    return [_nibble(words, 8 * byte + 4 * high, kind) for byte in range(WORD)]


def _nibble(words: Tensor, at: int, kind: torch.dtype) -> WordPart:
    if at == 28:
        return WordPart(((words >> at) & 15).to(kind))
    return WordPart((words & (15 << at)).to(kind), 2.0**at)


def products(query: Tensor, groups: Sequence[WordGroup]) -> Tensor:
    """Of queries [B, H, R, D] and keys: [B, H, R, N].

    Each group has a sum of its own: of all in one the compiler would write the terms to memory, as they read too much.
    """
    parts = torch.split(upcast(query), [group.size for group in groups], -1)
    return _total([_products(part, group) for part, group in zip(parts, groups, strict=True)])


def _products(query: Tensor, group: WordGroup) -> Tensor:
    """Of queries [B, H, R, size]: the sum of scale * (query * code + query * zero), [B, H, R, N]."""
    prepared_query = group.divided(query)  # [B, H, R, d] each
    pairs = [
        (materialized(each / part.unit), part.codes) for each, part in zip(prepared_query, group.parts, strict=True)
    ]
    if group.zero is not None:
        pairs.append((materialized(_total(prepared_query)), group.zero))
    terms = [_total([each[:, :, r, None] * codes for each, codes in pairs]) for r in range(query.shape[2])]
    return torch.stack([each.sum(-1) * group.scale[..., 0] for each in terms], 2)


def weighted_sum(probs: Tensor, groups: Sequence[WordGroup]) -> Tensor:
    """Of values, by probabilities [B, H, R, N]: [B, H, R, D]."""
    probs = materialized(probs)
    rows = [probs[:, :, r, :, None] for r in range(probs.shape[2])]  # [B, H, N, 1] each
    return torch.stack([torch.cat([_weighted_sum(row, group) for group in groups], -1) for row in rows], 2)


def _weighted_sum(probs: Tensor, group: WordGroup) -> Tensor:
    """Of one group, by probabilities [B, H, N, 1]: [B, H, size]."""
    share = probs * group.scale
    if group.zero is None:
        share = materialized(share)  # beside scales in half precision the loop would be over twice as many numbers
    made = [grid.summed(share * part.codes) / part.unit for part in group.parts]
    if group.zero is not None:
        offset = grid.summed(share * group.zero.expand_as(group.parts[0].codes))
        made = [sums + offset for sums in made]
    return group.joined(made)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
