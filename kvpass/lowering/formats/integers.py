"""Store vectors as integers with scales: `Int8` in eight bits, `Int4` in four, and either after a `Hadamard` transform.

Attention of few queries reads codes and never decodes vectors (`kvpass.lowering.formats.code_products`).
"""

from __future__ import annotations

import abc
import dataclasses
import math

import torch
from torch import Tensor

from kvpass.arguments import require
from kvpass.fx.precision import accumulate_dtype, upcast
from kvpass.lowering.formats import code_products
from kvpass.lowering.formats.base import Format, StoredTensors
from kvpass.lowering.formats.code_products import from_planes, to_planes


@dataclasses.dataclass(frozen=True)
class IntegerFormat(Format):
    """A format of integer codes with scales, in whose products few queries read codes, and many read decoded vectors.

    Attributes:
        rotated: vectors are rotated whenever they are read, so codes are stored `in_planes` where words are loaded.
    """

    dim: int
    dtype: torch.dtype
    rotated: bool = False

    @property
    def _upcast(self) -> torch.dtype:
        return accumulate_dtype(self.dtype)

    @abc.abstractmethod
    def _in_planes(self, codes: Tensor) -> bool:
        """Return whether codes are stored in planes."""

    def to_number_order(self, parts: StoredTensors) -> StoredTensors:
        return from_planes(parts) if self._in_planes(parts[0]) else parts

    def to_device_layout(self, parts: StoredTensors) -> StoredTensors:
        return to_planes(parts) if self._in_planes(parts[0]) else parts

    def products(self, query: Tensor, parts: StoredTensors) -> Tensor:
        if query.shape[2] > code_products.MAX_ROWS_IN_LOOP:
            return torch.matmul(upcast(query), self.decode(parts).transpose(-1, -2))
        return self._products(query, parts)

    def weighted_sum(self, probs: Tensor, parts: StoredTensors, dtype: torch.dtype) -> Tensor:
        many = probs.shape[2] > code_products.MAX_ROWS_IN_LOOP
        return (torch.matmul(probs, self.decode(parts)) if many else self._weighted_sum(probs, parts)).to(dtype)

    @abc.abstractmethod
    def _products(self, query: Tensor, parts: StoredTensors) -> Tensor:
        """Multiply few queries [B, H, R, D] with the codes of keys: [B, H, R, N]."""

    @abc.abstractmethod
    def _weighted_sum(self, probs: Tensor, parts: StoredTensors) -> Tensor:
        """Sum the codes of values by the probabilities [B, H, R, N] of few queries: [B, H, R, D]."""


HIGHEST_CODE = 127


@dataclasses.dataclass(frozen=True)
class Int8(IntegerFormat):
    """Store vectors in eight bits: codes [..., D] from -127 to 127 and one scale per vector, [..., 1].

        scale = max |x| / 127,   code = round(x / scale),   x ~ scale * code

    A head of 64 numbers takes 66 bytes.  A key's scale multiplies its logit, a value's scale its probability.
    Numbers of one head and token have similar magnitudes, so one scale per vector is fine enough (per-token scales:
    Sheng et al., "FlexGen", 2023, section 4.2, https://arxiv.org/abs/2303.06865).
    """

    names = ("scale",)
    bits = 8

    def part_shapes(self) -> list[tuple[int, torch.dtype]]:
        return [(self.dim, torch.int8), (1, code_products.SCALE)]

    def encode(self, vectors: Tensor) -> StoredTensors:
        exact = upcast(vectors)
        scale = code_products.round_scale(exact.abs().amax(-1, keepdim=True).float() / HIGHEST_CODE)
        codes = code_products.round_to_codes(exact, scale.to(exact.dtype)).clamp(-HIGHEST_CODE, HIGHEST_CODE)
        return self.to_device_layout((codes.to(torch.int8), scale.to(code_products.SCALE)))

    def decode(self, parts: StoredTensors) -> Tensor:
        codes, scale = self._codes_and_scale(self.to_number_order(parts))
        return codes * scale

    def sections(self, parts: StoredTensors) -> list[Tensor]:
        return self._words(parts).decode() if self._in_planes(parts[0]) else [self.decode(parts)]

    def _in_planes(self, codes: Tensor) -> bool:
        return self.rotated and code_products.fills_vectors(codes, self.dim)

    def _codes_and_scale(self, parts: StoredTensors) -> tuple[Tensor, Tensor]:
        return parts[0].to(self._upcast), parts[1].to(self._upcast)

    def _products(self, query: Tensor, parts: StoredTensors) -> Tensor:
        if code_products.fills_vectors(parts[0], self.dim):
            return code_products.products(query, [self._words(parts)])
        codes, scale = self._codes_and_scale(parts)
        return code_products.multiply_queries(query, [codes]) * scale[:, :, None, :, 0]

    def _weighted_sum(self, probs: Tensor, parts: StoredTensors) -> Tensor:
        if code_products.fills_vectors(parts[0], self.dim):
            return code_products.weighted_sum(probs, [self._words(parts)])
        codes, scale = self._codes_and_scale(parts)
        return code_products.sum_values([probs * scale[:, :, None, :, 0]], [codes])

    def _words(self, parts: StoredTensors) -> code_products.WordGroup:
        """Return the whole vectors as one word group."""
        codes = code_products.signed_parts(parts[0].view(torch.int32), self._upcast)
        return code_products.WordGroup(codes, parts[1].to(self._upcast), in_planes=self._in_planes(parts[0]))


HIGHEST_NIBBLE = 15
GROUP = 32
HIGHEST_ZERO = 127  # the largest absolute value of a zero point


@dataclasses.dataclass(frozen=True)
class Int4(IntegerFormat):
    """Store vectors in four bits, with a scale and a zero point for each group of numbers.

        scale = (max x - min x) / 15,   zero = round(min x / scale)
        code = round(x / scale) - zero,   x ~ scale * (code + zero)

    A byte has a number of the vector's first half in its low bits and the number half a vector later in its high
    bits, so both halves are in order in memory.  Groups have 32 numbers if 32 divides a half, else half of the
    vector; a short vector is one group.  A head of 128 numbers takes 76 bytes, of 64 numbers 38, of 32 numbers 19.
    Four bits need groups and zero points (Frantar et al., 2022, https://arxiv.org/abs/2210.17323, section 3; Liu et
    al., "KIVI", 2024, https://arxiv.org/abs/2402.02750, whose groups of keys run over tokens: here each vector must be
    writable alone).
    """

    names = ("scale", "zero")
    bits = 4

    def __post_init__(self) -> None:
        require(self.dim % 2 == 0, "kv_dtype", "int4", f"two numbers make a byte, and a head has {self.dim}")

    @property
    def half(self) -> int:
        """D / 2."""
        return self.dim // 2

    @property
    def groups(self) -> int:
        """The number of groups of a vector: one, or equally many in each half."""
        if self.half % GROUP == 0:
            return self.dim // GROUP
        return 1 if self.half < GROUP else 2

    @property
    def _groups_in_half(self) -> int:
        """The number of groups that one half of the vector uses; both halves use a single group."""
        return max(1, self.groups // 2)

    def part_shapes(self) -> list[tuple[int, torch.dtype]]:
        return [(self.half, torch.uint8), (self.groups, code_products.SCALE), (self.groups, torch.int8)]

    def encode(self, vectors: Tensor) -> StoredTensors:
        exact = torch.unflatten(upcast(vectors), -1, (self.groups, -1))  # [..., g, D / g]
        lowest, highest = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)
        size = torch.maximum((highest - lowest) / HIGHEST_NIBBLE, torch.maximum(highest, -lowest) / HIGHEST_ZERO)
        scale = code_products.round_scale(size.float())
        zero = code_products.round_to_codes(lowest, scale.to(exact.dtype)).clamp(-HIGHEST_ZERO, HIGHEST_ZERO)
        codes = (code_products.round_to_codes(exact, scale.to(exact.dtype)) - zero).clamp(0, HIGHEST_NIBBLE).flatten(-2)
        low, high = torch.split(codes, self.half, -1)
        pairs = (low + 16 * high).to(torch.uint8)
        return self.to_device_layout((pairs, scale[..., 0].to(code_products.SCALE), zero[..., 0].to(torch.int8)))

    def decode(self, parts: StoredTensors) -> Tensor:
        both = self.to_number_order(parts)[0].to(self._upcast)[..., None, :]  # [..., 1, D / 2]
        high = torch.floor(both * (1 / 16))
        low = (torch.arange(2, device=both.device)[:, None] == 0).to(both.dtype)  # 1 for the first half, else 0
        codes = low * both + (1 - 17 * low) * high
        codes = torch.unflatten(codes.flatten(-2), -1, (self.groups, -1))
        scale, zero = (part.to(self._upcast)[..., None] for part in parts[1:])
        return ((codes + zero) * scale).flatten(-2)

    def sections(self, parts: StoredTensors) -> list[Tensor]:
        if not self._in_planes(parts[0]):
            return [self.decode(parts)]
        return [section for group in self._words(parts) for section in group.decode()]

    def _in_planes(self, codes: Tensor) -> bool:
        """Return whether pairs are stored in planes; each plane, an eighth of D, must then belong to one group."""
        return (
            self.rotated
            and self.dim % GROUP == 0
            and GROUP % (self.dim // 8) == 0
            and code_products.fills_vectors(codes, self.half)
        )

    def _halves(self, parts: StoredTensors) -> list[Tensor]:
        """Return the codes of the two halves of the vectors, [B, H, N, D / 2] each."""
        both = parts[0].to(self._upcast)
        high = torch.floor(both * (1 / 16))
        return [both - 16 * high, high]

    def _decode_halves(self, parts: StoredTensors) -> list[Tensor]:
        """Decode the two halves of the vectors like `decode`."""
        scale, zero = (part.to(self._upcast) for part in parts[1:])
        count, halves = self._groups_in_half, []
        for codes, first in zip(self._halves(parts), (0, self.groups - count), strict=True):
            zero_of, scale_of = (part[..., first : first + count, None] for part in (zero, scale))
            halves.append(((torch.unflatten(codes, -1, (count, -1)) + zero_of) * scale_of).flatten(-2))
        return halves

    def _products(self, query: Tensor, parts: StoredTensors) -> Tensor:
        if self._fills_words(parts):
            return code_products.products(query, self._words(parts))
        return code_products.multiply_queries(query, self._decode_halves(parts))

    def _weighted_sum(self, probs: Tensor, parts: StoredTensors) -> Tensor:
        if self._fills_words(parts):
            return code_products.weighted_sum(probs, self._words(parts))
        return code_products.sum_values(*self._shares(probs, parts))

    def _shares(self, probs: Tensor, parts: StoredTensors) -> tuple[list[Tensor], list[Tensor]]:
        """Return the factors of a weighted sum, for each section of a vector in one group.

        They are probabilities times scales, [B, H, R, N], and codes plus zero points.  Zero points have no separate
        sum: it would run over all slots, whose zero points are not contiguous.
        """
        scale, zero = (part.to(self._upcast) for part in parts[1:])
        sections = [section for codes in self._halves(parts) for section in codes.chunk(self._groups_in_half, -1)]
        group_of = [index * self.groups // len(sections) for index in range(len(sections))]  # the group of each section
        shares = [probs * scale[:, :, None, :, group] for group in range(self.groups)]
        codes = [section + zero[..., group, None] for section, group in zip(sections, group_of, strict=True)]
        return [shares[group] for group in group_of], codes

    def _fills_words(self, parts: StoredTensors) -> bool:
        return self.groups > 1 and code_products.fills_vectors(parts[0], self.half // self._groups_in_half)

    def _words(self, parts: StoredTensors) -> list[code_products.WordGroup]:
        """Return the word groups, each within one half; groups of the first half use the low bits."""
        scale, zero = (part.to(self._upcast) for part in parts[1:])
        codes, in_planes = parts[0].view(torch.int32), self._in_planes(parts[0])
        if in_planes:
            planes = [
                plane for high in (False, True) for plane in code_products.nibble_parts(codes, high, self._upcast)
            ]
            planes_per_group = len(planes) // self.groups
            of_groups = [planes[i : i + planes_per_group] for i in range(0, len(planes), planes_per_group)]
        else:
            chunks = codes.chunk(self._groups_in_half, -1)
            of_groups = [
                code_products.nibble_parts(chunk, high, self._upcast) for high in (False, True) for chunk in chunks
            ]
        indexed = enumerate(of_groups)
        return [
            code_products.WordGroup(group, scale[..., g, None], zero[..., g, None], in_planes) for g, group in indexed
        ]


@dataclasses.dataclass(frozen=True)
class Hadamard(Format):
    """Transform vectors before another format stores them, so that a few large numbers are spread over all.

        x' = x H / sqrt(b),   H[i, j] = (-1)^(number of ones that i and j have in common, in binary)

    H is Sylvester's Hadamard matrix, of the largest power of two b that divides the size of a head; a vector has one or
    several blocks of b numbers.  H is orthogonal and its own inverse.  A transformed query has the same products with
    transformed keys, so attention transforms the query and never a stored vector (Ashkboos et al., "QuaRot", 2024,
    https://arxiv.org/abs/2404.00456, section 4).  Keys have a few large numbers, at the same indices for all tokens
    (Liu et al., "KIVI", 2024, https://arxiv.org/abs/2402.02750, section 3).  Values do not and are stored without the
    transform.

    Sums are of signed numbers in double precision, which is nearly always exact in any order.
    """

    inner: Format
    dtype: torch.dtype
    transforms = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.inner.names)
        object.__setattr__(self, "bits", self.inner.bits)

    def part_shapes(self) -> list[tuple[int, torch.dtype]]:
        return self.inner.part_shapes()

    def encode(self, vectors: Tensor) -> StoredTensors:
        return self.inner.encode(transform(vectors))

    def decode(self, parts: StoredTensors) -> Tensor:
        return transform(self.inner.decode(parts))

    def transform_query(self, query: Tensor) -> Tensor:
        return transform(query)

    def products(self, query: Tensor, parts: StoredTensors) -> Tensor:
        return self.inner.products(self.transform_query(query), parts)

    def weighted_sum(self, probs: Tensor, parts: StoredTensors, dtype: torch.dtype) -> Tensor:
        return transform(self.inner.weighted_sum(probs, parts, accumulate_dtype(self.dtype))).to(dtype)


def transform(vectors: Tensor) -> Tensor:
    """Transform vectors [..., D] in the dtype of `upcast`; a second transform returns the original vectors."""
    dim = vectors.shape[-1]
    size = dim & -dim  # the largest power of two that divides it
    blocks = torch.unflatten(vectors.double(), -1, (-1, size))
    return (
        (torch.matmul(blocks, hadamard_signs(size, vectors.device)) / math.sqrt(size))
        .flatten(-2)
        .to(upcast(vectors).dtype)
    )


def hadamard_signs(size: int, device: torch.device) -> Tensor:
    """Return H, float64 [b, b]; b is a power of two up to 65,536."""
    indices = torch.arange(size, device=device)
    common = indices[:, None] & indices
    for shift in (8, 4, 2, 1):
        common = common ^ (common >> shift)
    return (1 - 2 * (common & 1)).double()
