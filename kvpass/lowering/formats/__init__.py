"""Define the storage formats of keys and values.

A `Format` defines the tensors that hold a vector and how attention works on them.  `plain` is the model's own numbers,
`int8` and `int4` are integers with scales, and `hadamard` transforms keys before they are quantised.  `EncodedVectors`
are keys or values in a format, with every operation on slots: write, gather, merge, grow and reorder.  Policies, graphs
and models do not see either.

Attention gets products from the format and decodes no vector.  Other code that needs numbers, such as a policy's merges
or a chunk's attention, decodes them by `EncodedVectors.read`.  `cache.step` encodes the new vector, and
`cache.admission` a chunk's vectors.  Unchanged vectors are never encoded again, because a decoded vector may be encoded
to other codes.  Scales and other tensors are graph inputs after the policy's state, so all other inputs keep their
indices.

CONTRIBUTING.md says how to add a format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch

from kvpass.lowering.formats.base import EncodedVectors, Format, Plain, Sections
from kvpass.lowering.formats.integers import Hadamard, Int4, Int8

KVDtype = Literal["int8", "int4", "int8-hadamard", "int4-hadamard"]
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

__all__ = ["KV_DTYPES", "EncodedVectors", "Format", "KVDtype", "Sections", "base_of", "format_of", "plain"]


_FORMATS: dict[str, Callable[[int, torch.dtype, bool], Format]] = {
    "": lambda dim, dtype, _: Plain(dim, dtype),
    "int8": Int8,
    "int4": Int4,
}


def base_of(kv_dtype: KVDtype | None) -> str:
    """Return the quantisation of a format without its transform; "" for the model's own numbers."""
    return (kv_dtype or "").partition("-")[0]


@functools.cache
def format_of(
    kv_dtype: KVDtype | None, dim: int, dtype: torch.dtype, keys: bool = True, rotated: bool = False
) -> Format:
    """Return the format of vectors of `dim` numbers in the model's `dtype`, for keys or for values.

    Args:
        kv_dtype: the user's choice; None for the model's dtype.
        rotated: whether each vector is rotated whenever it is read.

    Raises:
        PolicyError: the format cannot store vectors of this dimension.
    """
    transformed = keys and "-" in (kv_dtype or "")
    inner = _FORMATS[base_of(kv_dtype)](dim, dtype, rotated and not transformed)
    return Hadamard(inner, dtype) if transformed else inner


def plain(vectors: torch.Tensor) -> EncodedVectors:
    """Return vectors [B, H, N, D] in the plain format."""
    return EncodedVectors(Plain(vectors.shape[-1], vectors.dtype), (vectors,))
