"""Rotary embeddings as a kernel can apply them: every number of a key, mixed with one other.

kvpass knows no formula of a rotary embedding; it cuts the model's own code out.  But all of them are linear in the key
and mix numbers in pairs (Su et al., 2021, https://arxiv.org/abs/2104.09864, section 3.2.2).  Which pairs is seen by
rotating unit vectors once, with what weights by rotating two keys of ones and zeros, one for each side of the pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RotaryPairs:
    """Which numbers of a key [D] are mixed: the first `width`, each with its neighbour or with one half a width away.

    The neighbours of `interleaved` are 0 and 1, 2 and 3, and so on.
    """

    width: int
    interleaved: bool

    def partner(self, index: Tensor) -> Tensor:
        """The places that the numbers at places [D] are mixed with; their own where they are not mixed."""
        half = max(1, self.width // 2)
        other = index ^ 1 if self.interleaved else torch.where(index < half, index + half, index - half)
        return torch.where(index < self.width, other, index)

    def leads(self, index: Tensor) -> Tensor:
        """bool [D]: one side of the pairs, and what is not mixed."""
        return index <= self.partner(index)


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding at read: a key's number times `cos`, plus its partner's times `sin`.

    Attributes:
        cos, sin: [N, D] for positions 0 .. N - 1, in the dtype of the keys; signs, and factors as of YaRN, are in them.
        pairs: who is whose partner.
        rank: int64 [B, Hkv or 1, C], the position of every slot; what a free one has does not matter.
    """

    cos: Tensor
    sin: Tensor
    pairs: RotaryPairs
    rank: Tensor | None = None


def pairs_of(matrix: Tensor) -> RotaryPairs | None:
    """What an embedding [D, D] (from, to) mixes; None for anything but the pairs that kernels know."""
    index = torch.arange(len(matrix), device=matrix.device)
    mixed = ((matrix != 0) & (index != index[:, None])).any(0)
    if not mixed.any():
        return None
    width = int((index * mixed).max()) + 1
    if width % 2:
        return None
    for pairs in (RotaryPairs(width, False), RotaryPairs(width, True)):
        allowed = (index[:, None] == index) | (index[:, None] == pairs.partner(index))
        if not (matrix != 0)[~allowed].any():
            return pairs
    return None


def weights_of(rotate: Callable[[Tensor], Tensor], pairs: RotaryPairs, like: Tensor) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of a `Rope`.

    Args:
        rotate: rotates one key [D] by every position, [N, D].
        like: of the dtype and device of the keys, with D numbers.
    """
    index = torch.arange(like.shape[-1], device=like.device)
    leads = pairs.leads(index)
    first, second = rotate(leads.to(like.dtype)), rotate((~leads).to(like.dtype))
    return torch.where(leads, first, second), torch.where(leads, second, first)
