"""Express rotary embeddings as kernels can apply them: each number of a key is mixed with one other.

kvpass has no formula of a rotary embedding; it cuts out the model's own code.  All embeddings are linear in the key and
mix numbers in pairs (Su et al., 2021, https://arxiv.org/abs/2104.09864, section 3.2.2).  Rotating unit vectors once
reveals the pairs.  Rotating two keys of ones and zeros, one per side of the pairs, reveals the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RotaryPairs:
    """The pairs of numbers in a key [D] that an embedding mixes, among the first `width` numbers.

    Attributes:
        width: the number of mixed numbers.
        interleaved: pairs are 0 and 1, 2 and 3, and so on; otherwise partners are half a width apart.
    """

    width: int
    interleaved: bool

    def partner(self, index: Tensor) -> Tensor:
        """Return the partner indices of the numbers at indices [D]; their own for numbers that are not mixed."""
        half = max(1, self.width // 2)
        other = index ^ 1 if self.interleaved else torch.where(index < half, index + half, index - half)
        return torch.where(index < self.width, other, index)

    def leads(self, index: Tensor) -> Tensor:
        """Return bool [D], true for the first number of each pair and for numbers that are not mixed."""
        return index <= self.partner(index)


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding at read: each number of a key times `cos`, plus its partner times `sin`.

    Attributes:
        cos, sin: [N, D] for positions 0 .. N - 1, in the dtype of the keys, with signs and factors such as YaRN's.
        pairs: the partner of each number.
        rank: int64 [B, Hkv or 1, C], the position of each slot; arbitrary for free slots.
    """

    cos: Tensor
    sin: Tensor
    pairs: RotaryPairs
    rank: Tensor | None = None


def pairs_of(matrix: Tensor) -> RotaryPairs | None:
    """Return the pairs that an embedding matrix [D, D] (from, to) mixes, or None if kernels do not support them."""
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
    """Return `cos` and `sin` of a `Rope`, each [N, D].

    Args:
        rotate: rotates one key [D] by every position, [N, D].
        like: a tensor with D numbers, in the dtype and on the device of the keys.
    """
    index = torch.arange(like.shape[-1], device=like.device)
    leads = pairs.leads(index)
    first, second = rotate(leads.to(like.dtype)), rotate((~leads).to(like.dtype))
    return torch.where(leads, first, second), torch.where(leads, second, first)
