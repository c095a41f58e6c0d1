"""How rows of keys and values lie in memory.

A `Format` says what tensors hold a row and how attention works on them: `plain` is the model's own numbers, `int8` and
`int4` are whole numbers with scales.  `Rows` are rows in a format: all that happens to slots (a row written, rows
gathered, merged, grown, reordered) is said once, there.  Policies, graphs and models know of neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch

from kvpass.storage.base import Format, Rows
from kvpass.storage.int4 import Int4
from kvpass.storage.int8 import Int8
from kvpass.storage.plain import Plain

KVDtype = Literal["int8", "int4"]
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

__all__ = ["KV_DTYPES", "Format", "KVDtype", "Rows", "format_of", "plain"]


@functools.cache
def format_of(kv_dtype: KVDtype | None, dim: int, dtype: torch.dtype) -> Format:
    """The format of rows of `dim` numbers that a model makes in `dtype`.

    Raises:
        PolicyError: rows of that many numbers cannot be stored so.
    """
    made: dict[KVDtype | None, Callable[[int, torch.dtype], Format]] = {None: Plain, "int8": Int8, "int4": Int4}
    return made[kv_dtype](dim, dtype)


def plain(rows: torch.Tensor) -> Rows:
    """Rows [B, H, N, D] as they are."""
    return Rows(Plain(rows.shape[-1], rows.dtype), (rows,))
