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
class Pairs:
    """Which numbers of a key [D] are mixed: the first `width`, each with its neighbour or with one half a width away.

    The neighbours of `interleaved` are 0 and 1, 2 and 3, and so on.
    """

    width: int
    interleaved: bool

    def partner(self, place: Tensor) -> Tensor:
        """The places that the numbers at places [D] are mixed with; their own where they are not mixed."""
        half = max(1, self.width // 2)
        other = place ^ 1 if self.interleaved else torch.where(place < half, place + half, place - half)
        return torch.where(place < self.width, other, place)

    def leads(self, place: Tensor) -> Tensor:
        """bool [D]: one side of the pairs, and what is not mixed."""
        return place <= self.partner(place)


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
    pairs: Pairs
    rank: Tensor | None = None


def pairs_of(matrix: Tensor) -> Pairs | None:
    """What an embedding [D, D] (from, to) mixes; None for anything but the pairs that kernels know."""
    place = torch.arange(len(matrix), device=matrix.device)
    mixed = ((matrix != 0) & (place != place[:, None])).any(0)
    if not mixed.any():
        return None
    width = int((place * mixed).max()) + 1
    if width % 2:
        return None
    for pairs in (Pairs(width, False), Pairs(width, True)):
        allowed = (place[:, None] == place) | (place[:, None] == pairs.partner(place))
        if not (matrix != 0)[~allowed].any():
            return pairs
    return None


def weights_of(rotate: Callable[[Tensor], Tensor], pairs: Pairs, like: Tensor) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of a `Rope`.

    Args:
        rotate: rotates one key [D] by every position, [N, D].
        like: of the dtype and device of the keys, with D numbers.
    """
    place = torch.arange(like.shape[-1], device=like.device)
    leads = pairs.leads(place)
    first, second = rotate(leads.to(like.dtype)), rotate((~leads).to(like.dtype))
    return torch.where(leads, first, second), torch.where(leads, second, first)
