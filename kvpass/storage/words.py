"""Products over codes that are loaded in words of 32 bits.

Vectors of eight numbers, as AVX2 has them, take eight bytes of codes, and what the compiler has for such a load goes
through memory: ten times slower.  A word has four bytes, so eight of them fill a vector.  Each code is masked out of
its word where it stands; as a float it is the code times a power of two, which is exact, and what it is multiplied
with takes that back.  Codes at one place in their words are of every fourth number of a row.

Longer vectors load bytes as they are, and so do rows that do not fill vectors with words: `kvpass.storage.grid`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.lowering.written import written_out
from kvpass.precision import wide
from kvpass.storage import grid

LANES = 8  # numbers of a vector of AVX2
WORD = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Fourth:
    """Codes of every fourth number of a group: [B, H, N, d], each times `unit`, a power of two."""

    codes: Tensor
    unit: float = 1.0


@dataclasses.dataclass(frozen=True)
class Group:
    """Numbers of a row that stand together and share a scale: scale * (code + zero).

    Attributes:
        fourths: four, the first of the numbers 0, 4, 8, ... of the group, the next of those behind.
        scale, zero: [B, H, N, 1]; no zero point is zero.
    """

    fourths: Sequence[Fourth]
    scale: Tensor
    zero: Tensor | None = None

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return WORD * self.fourths[0].codes.shape[-1]


def fill(codes: Tensor, together: int) -> bool:
    """Whether so many bytes of codes [B, H, N, ...] fill vectors with words, and the processor is to load those."""
    aligned = together % (WORD * LANES) == 0
    return aligned and codes.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def signed(words: Tensor, kind: torch.dtype) -> list[Fourth]:
    """The bytes of words int32 [B, H, N, d], each moved to the top of its word, where its sign is."""
    tops = [words << (24 - 8 * byte) for byte in range(WORD - 1)] + [words]
    return [Fourth((tops[0] if byte == 0 else top & -(1 << 24)).to(kind), 2.0**24) for byte, top in enumerate(tops)]


def nibbles(words: Tensor, high: bool, kind: torch.dtype) -> list[Fourth]:
    """The low or high half of each byte of words int32 [B, H, N, d]; the topmost is moved down, as it has the sign."""
    return [_nibble(words, 8 * byte + 4 * high, kind) for byte in range(WORD)]


def _nibble(words: Tensor, at: int, kind: torch.dtype) -> Fourth:
    if at == 28:
        return Fourth(((words >> at) & 15).to(kind))
    return Fourth((words & (15 << at)).to(kind), 2.0**at)


def products(query: Tensor, groups: Sequence[Group]) -> Tensor:
    """Of queries [B, H, R, D] and keys: [B, H, R, N].

    Each group has a sum of its own: of all in one the compiler would write the terms to memory, as they read too much.
    """
    parts = torch.split(wide(query), [group.size for group in groups], -1)
    return _total([_products(part, group) for part, group in zip(parts, groups, strict=True)])


def _products(query: Tensor, group: Group) -> Tensor:
    """Of queries [B, H, R, size]: the sum of scale * (query * code + query * zero), [B, H, R, N]."""
    parts = [query[..., byte::WORD] for byte in range(WORD)]  # [B, H, R, d] each
    pairs = [(written_out(part / fourth.unit), fourth.codes) for part, fourth in zip(parts, group.fourths, strict=True)]
    if group.zero is not None:
        pairs.append((written_out(_total(parts)), group.zero))
    terms = [_total([part[:, :, r, None] * codes for part, codes in pairs]) for r in range(query.shape[2])]
    return torch.stack([each.sum(-1) * group.scale[..., 0] for each in terms], 2)


def mixture(paid: Tensor, groups: Sequence[Group]) -> Tensor:
    """Of values, by probabilities [B, H, R, N]: [B, H, R, D]."""
    paid = written_out(paid)
    rows = [paid[:, :, r, :, None] for r in range(paid.shape[2])]  # [B, H, N, 1] each
    return torch.stack([torch.cat([_mixture(row, group) for group in groups], -1) for row in rows], 2)


def _mixture(paid: Tensor, group: Group) -> Tensor:
    """Of one group, by probabilities [B, H, N, 1]: [B, H, size]."""
    share = paid * group.scale
    if group.zero is None:
        share = written_out(share)  # beside scales in half precision the loop would be over twice as many numbers
    made = [grid.summed(share * fourth.codes) / fourth.unit for fourth in group.fourths]
    if group.zero is not None:
        offset = grid.summed(share * group.zero.expand_as(group.fourths[0].codes))
        made = [sums + offset for sums in made]
    return torch.stack(made, -1).flatten(-2)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
