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
"""Methods of a tensor that read nothing but shape, dtype and the like.

Which of them torch asks a tensor of a class of its own differs between versions, and 2.11 does so while Dynamo looks at
the inputs of a graph, before it says that it compiles.
"""


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, which may be fake, have one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Tensor subclasses behave as plain tensors inside."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def without_torch_functions() -> contextlib.AbstractContextManager[None]:
    """Neither tensor subclasses nor function modes, such as a default device, intercept operations inside.

    Dynamo dispatches on a mode again inside of `without_torch_function`, so a traced `__torch_function__` never ends.
    """
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def with_torch_function() -> contextlib.AbstractContextManager[None]:
    """Tensor subclasses have their say inside, also where Dynamo has turned that off around a graph."""
    context: contextlib.AbstractContextManager[None] = torch._C._EnableTorchFunction()
    return context


def is_wrapper(value: Any) -> bool:
    """A tensor of a class that wraps others, as quantised weights are; Dynamo does not look into its operations."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def was_inlined(value: Any) -> bool:
    """A tensor of a class whose `__torch_function__` Dynamo has traced through: in its graphs it is a plain tensor."""
    plain = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return isinstance(value, Tensor) and type(value).__torch_function__ not in plain and not is_wrapper(value)


def as_plain(value: Tensor) -> Tensor:
    """The same data as a tensor of no class of its own."""
    with without_torch_function():
        return value.as_subclass(Tensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether it shares the memory of another tensor, which torch.compile asks about as well."""
    return tensor._is_view()


def stays(tensor: torch.Tensor, dim: int) -> None:
    """Let torch.compile take the size of this dim as a fact, whatever it was in other calls."""
    torch._dynamo.mark_static(tensor, dim)
