"""Keep tensors in sections, so that no joined tensor is written to memory."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sections:
    """A tensor as consecutive sections of its last dimension.

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
        """Return the same tensor with further cuts."""
        sections, start = [], 0
        for section, end in zip(self.tensors, self.ends, strict=True):
            cuts = [start, *sorted(index for index in indices if start < index < end), end]
            sections += [section[..., a - start : b - start] for a, b in itertools.pairwise(cuts)]
            start = end
        return Sections(tuple(sections))

    def between(self, start: int, stop: int) -> Sections:
        """Return the part of the tensor from `start` up to `stop`."""
        cut = self.cut_at({start, stop})
        ends = cut.ends
        selected = [section for section, end in zip(cut.tensors, ends, strict=True) if start < end <= stop]
        return Sections(tuple(selected))

    def joined(self) -> Tensor:
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
