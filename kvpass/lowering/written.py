"""Numbers that the compiler is to write to memory once."""

from __future__ import annotations

from torch import Tensor

from kvpass import compat


def written_out(x: Tensor) -> Tensor:
    """The same numbers, which the compiler computes once and reads from memory.

    It would else compute pointwise expressions, such as the cosines of an embedding, anew wherever they are
    read: in the innermost loop over slots, heads and dimensions.
    """
    x = x.contiguous()
    if compat.symbols(x):  # a strided view is of whatever strides the compiler chose, which are others then
        return compat.with_strides(x, x.stride())
    return x.as_strided(x.shape, x.stride())
