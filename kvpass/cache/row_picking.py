"""Stand in for single rows that a caller takes out of a cache, as Whisper's `generate` does per input.

A row does not carry its slots.  It can be moved, unsqueezed and stacked; reading or growing it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import CacheHandleError
from kvpass.torch_private import dynamo, tensors

_MOVES = frozenset(
    {"__getitem__", "unsqueeze", "squeeze", "stack", "cpu", "cuda", "to", "detach", "as_subclass", "__get__", "__set__"}
)


class Row(Tensor):
    """A tensor of NaN in the shape of a row of keys or values, at first [Hkv, tokens stored, D]."""

    @staticmethod
    def like(row: Tensor) -> Row:
        """Return a row with the shape, dtype and device of a tensor."""
        dynamo.never_a_frame_of_its_own(Row.__torch_function__)
        return torch.full((1,), torch.nan, dtype=row.dtype, device=row.device).expand(row.shape).as_subclass(Row)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that only moves the row.

        Raises:
            CacheHandleError: the operation reads or grows the row.
        """
        name = getattr(func, "__name__", "")
        allowed = name in _MOVES | tensors.QUESTIONS or (name == "cat" and _is_alone(*args))
        if not torch.compiler.is_compiling() and not allowed:
            refuse(name)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _is_alone(parts: Sequence[Tensor], *_: Any) -> bool:
    """Return whether a concatenation adds nothing, as when a row becomes the first of an empty cache."""
    return sum(part.numel() > 0 for part in parts) == 1


def refuse(operation: str) -> None:
    """Refuse an operation on a row.

    Raises:
        CacheHandleError: always.
    """
    raise CacheHandleError(
        f"{operation} on a row that was taken out of a cache of kvpass, as Whisper's generate does: its tokens live in "
        "slots that it no longer has. Continue from the cache that the model returns, or generate again"
    )
