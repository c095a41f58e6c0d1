"""Private names of tensors: subclasses, views and shared memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

QUESTIONS = frozenset(
    [
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr",
        "type", "get_device", "has_names", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
        "is_inference", "is_same_size", "is_pinned", "is_shared", "_is_view", "untyped_storage",
        "is_conj", "is_neg", "_is_zerotensor",
        "__len__", "__repr__", "__hash__", "__format__", "__dir__",
    ]
)  # fmt: skip
"""Tensor methods that read only metadata such as shape and dtype.

torch versions differ in which of them they call on a tensor subclass.  2.11 calls them while Dynamo inspects the inputs
of a graph, before it reports that it compiles.
"""


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Check whether two tensors, which may be fake, share one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Treat tensor subclasses as plain tensors inside the context."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def without_torch_functions() -> contextlib.AbstractContextManager[None]:
    """Disable `__torch_function__` of tensor subclasses and of function modes, such as a default device, inside.

    Inside of `without_torch_function`, Dynamo dispatches on a mode again, so a traced `__torch_function__` recurses
    without end.
    """
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def with_torch_function() -> contextlib.AbstractContextManager[None]:
    """Enable `__torch_function__` of subclasses inside, also where Dynamo has disabled it around a graph."""
    context: contextlib.AbstractContextManager[None] = torch._C._EnableTorchFunction()
    return context


def is_wrapper(value: Any) -> bool:
    """Check whether a tensor's class wraps other tensors, as quantised weights do.

    Dynamo does not look into the operations of such a class.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def was_inlined(value: Any) -> bool:
    """Check whether Dynamo traces through the `__torch_function__` of a tensor's class.

    Dynamo's graphs then hold a plain tensor.
    """
    plain = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return isinstance(value, Tensor) and type(value).__torch_function__ not in plain and not is_wrapper(value)


def as_plain(value: Tensor) -> Tensor:
    """Return the same data as a plain Tensor."""
    with without_torch_function():
        return value.as_subclass(Tensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Check whether a tensor is a view of another one; torch.compile guards on this."""
    return tensor._is_view()


def stays(tensor: torch.Tensor, dim: int) -> None:
    """Mark a dimension as static for torch.compile, even if it had other sizes in earlier calls."""
    torch._dynamo.mark_static(tensor, dim)
