"""Define vectors of keys or of values, in any format."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sections:
    """A tensor as consecutive sections of its last dimension, so that no joined tensor is written to memory.

    Attributes:
        whole: the tensor itself, if it exists without joining the sections.
    """

    tensors: tuple[Tensor, ...]
    whole: Tensor | None = None

    @property
    def width(self) -> int:
        return sum(section.shape[-1] for section in self.tensors)

    @property
    def ends(self) -> list[int]:
        """The end of each section."""
        widths = [section.shape[-1] for section in self.tensors]
        return [sum(widths[: i + 1]) for i in range(len(widths))]

    def cut_at(self, indices: set[int]) -> Sections:
        """Return the same tensor with more cuts."""
        sections, start = [], 0
        for section, end in zip(self.tensors, self.ends, strict=True):
            cuts = [start, *sorted(index for index in indices if start < index < end), end]
            sections += [section[..., a - start : b - start] for a, b in itertools.pairwise(cuts)]
            start = end
        return Sections(tuple(sections))

    def slice(self, start: int, stop: int) -> Sections:
        """Return the part of the tensor from `start` up to `stop`."""
        cut = self.cut_at({start, stop})
        ends = cut.ends
        selected = [section for section, end in zip(cut.tensors, ends, strict=True) if start < end <= stop]
        return Sections(tuple(selected))

    def join(self) -> Tensor:
        """Return one tensor: `whole`, or a sum of tensors padded with zeros, which compilers fuse."""
        if self.whole is not None:
            return self.whole
        before, total = 0, None
        for section in self.tensors:
            padded = torch.nn.functional.pad(section, [before, self.width - before - section.shape[-1]])
            total = padded if total is None else total + padded
            before += section.shape[-1]
        assert total is not None
        return total


BLOCK = 4096  # vectors encoded at a time; intermediate results are several times their size

StoredTensors = tuple[Tensor, ...]
"""The tensors that hold vectors [B, H, N, D]: each [B, H, N, ...], the numbers or their codes first."""

SlotIndices = tuple[Tensor, Tensor, Tensor]
"""One slot of every head: indices of rows, heads and slots, broadcastable to [B, H]."""


class Format(abc.ABC):
    """The tensors that hold vectors, and attention on them; formats that store in the same way are equal.

    Attributes:
        names: the names of the tensors after the first.
        bits: the bits of a code; 0 if vectors are plain numbers.
        exact: whether storing decoded vectors again returns the same vectors.
        transforms: whether codes are of transformed vectors, so that `transform_query` transforms queries.
    """

    names: tuple[str, ...] = ()
    bits: int = 0
    exact: bool = False
    transforms: bool = False

    @abc.abstractmethod
    def part_shapes(self) -> list[tuple[int, torch.dtype]]:
        """Return the last dimension and the dtype of each tensor."""

    @abc.abstractmethod
    def encode(self, vectors: Tensor) -> StoredTensors:
        """Encode vectors [..., D] as the tensors that store them."""

    @abc.abstractmethod
    def decode(self, parts: StoredTensors) -> Tensor:
        """Decode stored vectors [..., D] to the model's dtype or to `fx.precision.accumulate_dtype`."""

    def sections(self, parts: StoredTensors) -> Sequence[Tensor]:
        """Decode stored vectors in consecutive sections of D that can be read without moving numbers."""
        return [self.decode(parts)]

    def to_number_order(self, parts: StoredTensors) -> StoredTensors:
        """Reorder the tensors from the device's layout to the order of the numbers."""
        return parts

    def to_device_layout(self, parts: StoredTensors) -> StoredTensors:
        """Reorder the tensors from the order of the numbers to the layout of their device."""
        return parts

    def transform_query(self, query: Tensor) -> Tensor:
        """Transform queries [..., D] for products with codes; for callers that read codes themselves."""
        return query

    @abc.abstractmethod
    def products(self, query: Tensor, parts: StoredTensors) -> Tensor:
        """Multiply queries [B, H, R, D] with stored keys: [B, H, R, N]."""

    @abc.abstractmethod
    def weighted_sum(self, probs: Tensor, parts: StoredTensors, dtype: torch.dtype) -> Tensor:
        """Sum values by probabilities [B, H, R, N] of `fx.precision.accumulate_dtype` to [B, H, R, D] of `dtype`."""


@dataclasses.dataclass(frozen=True)
class EncodedVectors:
    """Vectors [B, H, N, D] in a format."""

    format: Format
    parts: StoredTensors

    @staticmethod
    def empty(format: Format, shape: tuple[int, int, int], device: torch.device) -> EncodedVectors:
        """Return N zero vectors for B rows of the batch and H heads."""
        parts = [torch.zeros(*shape, dim, dtype=dtype, device=device) for dim, dtype in format.part_shapes()]
        return EncodedVectors(format, tuple(parts))

    @staticmethod
    def of(format: Format, vectors: Tensor) -> EncodedVectors:
        """Encode vectors [B, H, N, D] in a format."""
        if vectors.shape[2] <= BLOCK or format.exact:
            return EncodedVectors(format, format.encode(vectors))
        blocks = [format.encode(block) for block in torch.split(vectors, BLOCK, 2)]
        return EncodedVectors(format, tuple(torch.cat(part, 2) for part in zip(*blocks, strict=True)))

    @property
    def codes(self) -> Tensor:
        """The tensor with the numbers or their codes."""
        return self.parts[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the first tensor."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def read(self) -> Tensor:
        """Decode all vectors as attention reads them."""
        return self.format.decode(self.parts)

    def read_as(self, dtype: torch.dtype) -> Tensor:
        """Decode all vectors in the dtype that the model's or a policy's code expects."""
        return self.parts[0] if self.format.exact else self.read().to(dtype)

    def in_sections(self, dtype: torch.dtype) -> Sections:
        """Decode all vectors for code that works on sections."""
        return Sections(tuple(section.to(dtype) for section in self.format.sections(self.parts)), self.read_as(dtype))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> EncodedVectors:
        """Return the vectors with a function applied to each tensor."""
        return EncodedVectors(self.format, tuple(map(function, self.parts)))

    def to_device(self, move: Callable[[Tensor], Tensor]) -> EncodedVectors:
        """Move the vectors to another device, whose layout of codes may differ."""
        return EncodedVectors(
            self.format, self.format.to_device_layout(tuple(map(move, self.format.to_number_order(self.parts))))
        )

    def vector_at(self, index: SlotIndices) -> Tensor:
        """Decode one vector of each head, [B, H, D]."""
        return self.format.decode(tuple(part[index] for part in self.parts))

    def write_vector(self, index: SlotIndices, new: EncodedVectors, only: Tensor | None = None) -> None:
        """Overwrite one vector of each head by `new` [B, H, 1, D].

        Args:
            index: one slot of every head.
            new: the vectors.
            only: bool [B or 1, H or 1, 1]; heads where it is false keep their vector.
        """
        for part, new_part in zip(self.parts, new.parts, strict=True):
            vector = new_part[:, :, 0]
            part.index_put_(index, vector if only is None else torch.where(only, vector, part[index]))

    def replace(self, vectors: Tensor, only: Tensor) -> None:
        """Overwrite the vectors where `only` [B, H, N] is true by `vectors` [B, H, N, D].

        An `exact` format writes all of `vectors`, so the others must equal the stored vectors.
        """
        for part, new_part in zip(self.parts, self.format.encode(vectors), strict=True):
            part.copy_(new_part if self.format.exact else torch.where(only[..., None], new_part, part))

    def fill(self, vectors: EncodedVectors) -> None:
        """Overwrite the first vectors by `vectors`."""
        for part, new_part in zip(self.parts, vectors.parts, strict=True):
            part[:, :, : new_part.shape[2]] = new_part

    def gather(self, indices: Tensor) -> EncodedVectors:
        """Return the vectors at indices [B, H', n]."""
        row, head = (torch.arange(count, device=indices.device) for count in self.shape[:2])
        index = row[:, None, None], head[None, :, None], indices  # copies vectors, where `gather` copies numbers
        return self.map_tensors(lambda part: part[index])

    def concatenate(self, others: EncodedVectors) -> EncodedVectors:
        """Return these vectors followed by others."""
        joined = zip(self.parts, others.parts, strict=True)
        return EncodedVectors(self.format, tuple(torch.cat(pair, 2) for pair in joined))


@dataclasses.dataclass(frozen=True)
class Plain(Format):
    """Vectors in the model's dtype."""

    dim: int
    dtype: torch.dtype
    exact = True

    def part_shapes(self) -> list[tuple[int, torch.dtype]]:
        return [(self.dim, self.dtype)]

    def encode(self, vectors: Tensor) -> StoredTensors:
        return (vectors.to(self.dtype),)

    def decode(self, parts: StoredTensors) -> Tensor:
        return parts[0]

    def products(self, query: Tensor, parts: StoredTensors) -> Tensor:
        return torch.matmul(query, parts[0].transpose(-1, -2))

    def weighted_sum(self, probs: Tensor, parts: StoredTensors, dtype: torch.dtype) -> Tensor:
        return torch.matmul(probs.to(parts[0].dtype), parts[0])
