"""How rows of keys and values lie in memory.

A `Format` says what tensors hold a row and how attention works on them: `plain` is the model's own numbers, `int8` and
`int4` are whole numbers with scales, `hadamard` transforms keys before they become such.  `Rows` are rows in a format:
all that happens to slots (a row written, rows gathered, merged, grown, reordered) is said once, there.  Policies,
graphs and models know of neither.

Attention asks the format for products and decodes nothing.  Other code that needs numbers, such as a policy's merges or
a chunk's attention, reads them by `Rows.read`.  `decode_step` encodes the new row and `admit` those of a chunk.  Rows
that do not change are never encoded again, since a decoded row need not be encoded to the same codes.  Scales and other
further tensors are graph inputs behind the policy's state, so all other inputs keep their indices.

To add a format, derive one from `base.Format`, add its name here, and for GPUs a load in
kvpass/lowering/attend_kernel.py.  tests/lowering/formats runs over all names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch

from kvpass.lowering.formats.base import Format, Rows
from kvpass.lowering.formats.hadamard import Hadamard
from kvpass.lowering.formats.int4 import Int4
from kvpass.lowering.formats.int8 import Int8
from kvpass.lowering.formats.plain import Plain
from kvpass.lowering.formats.sections import Sections

KVDtype = Literal["int8", "int4", "int8-hadamard", "int4-hadamard"]
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

__all__ = ["KV_DTYPES", "Format", "KVDtype", "Rows", "Sections", "base_of", "format_of", "plain"]


_FORMATS: dict[str, Callable[[int, torch.dtype, bool], Format]] = {
    "": lambda dim, dtype, _: Plain(dim, dtype),
    "int8": Int8,
    "int4": Int4,
}


def base_of(kv_dtype: KVDtype | None) -> str:
    """The numbers of a format, however rows are transformed before; "" for the model's own."""
    return (kv_dtype or "").partition("-")[0]


@functools.cache
def format_of(
    kv_dtype: KVDtype | None, dim: int, dtype: torch.dtype, keys: bool = True, rotated: bool = False
) -> Format:
    """The format of rows of `dim` numbers that a model makes in `dtype`, of keys or of values.

    Args:
        rotated: each is rotated whenever it is read.

    Raises:
        PolicyError: rows of that many numbers cannot be stored so.
    """
    transformed = keys and "-" in (kv_dtype or "")
    made = _FORMATS[base_of(kv_dtype)](dim, dtype, rotated and not transformed)
    return Hadamard(made, dtype) if transformed else made


def plain(rows: torch.Tensor) -> Rows:
    """Rows [B, H, N, D] as they are."""
    return Rows(Plain(rows.shape[-1], rows.dtype), (rows,))
