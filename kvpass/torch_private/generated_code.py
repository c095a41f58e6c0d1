"""DispatchWatch the code that Inductor generates while it runs."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


KERNEL, ALLOCATOR = "kernel", "empty_strided_cpu"
"""What Inductor calls the function of each kernel for a CPU, and what its modules allocate memory with."""


def generated_scopes() -> list[dict[str, Any]]:
    """The globals of the modules that Inductor has written in this process."""
    from torch._inductor.codecache import PyCodeCache

    return [vars(module) for module in PyCodeCache.modules]


def kernel_library(value: Any) -> str | None:
    """The file of a kernel that Inductor generated for a CPU; None for anything else."""
    found = isinstance(value, types.BuiltinFunctionType) and value.__name__ == KERNEL
    return getattr(value.__self__, "__file__", None) if found else None


def is_foreign(function: Any) -> bool:
    """Whether it is a function of a library that is neither Python's nor torch's, such as one of Inductor's."""
    library = getattr(function, "__self__", None)
    if not isinstance(function, types.BuiltinFunctionType) or not isinstance(library, types.ModuleType):
        return False
    return library.__name__.partition(".")[0] not in {"torch", *sys.stdlib_module_names}


def allocator() -> Callable[..., Tensor]:
    """What `ALLOCATOR` is in the modules that Inductor writes."""
    guards: Any = torch._C._dynamo.guards
    return cast(Callable[..., Tensor], guards._empty_strided_cpu)


@contextlib.contextmanager
def calls_watched(see: Callable[[types.FrameType, Any], None]) -> Iterator[None]:
    """Inside, the functions in C that this thread calls from Python are told, each with the frame that calls it.

    Python has one place for whoever watches calls, which has to be free.
    """

    def told(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            see(frame, function)

    sys.setprofile(told)
    try:
        yield
    finally:
        sys.setprofile(None)


def cpp_library(source: str) -> ctypes.CDLL:
    """C++ as a library, compiled once for all processes."""
    from torch._inductor.codecache import CppCodeCache

    return cast(ctypes.CDLL, CppCodeCache.load(source))


def is_shared(tensor: Tensor) -> bool:
    """Whether anything but this tensor holds its memory."""
    holders = torch._C._storage_Use_Count
    alone = torch.empty(1, device="cpu")
    return holders(tensor.untyped_storage()._cdata) > holders(alone.untyped_storage()._cdata)


def watched(see: Callable[[Any, Any, Any, Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Inside, what torch's dispatcher runs is told, each with its arguments and results, when it has run."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class DispatchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = function(*args, **(kwargs or {}))
            see(function, args, kwargs or {}, results)
            return results

    return DispatchWatch()  # type: ignore[no-untyped-call]


def writes_results(operator: Any) -> bool:
    """Whether all that an operator gives is what it was given to write to."""
    given = [result.alias_info for result in operator._schema.returns]
    return bool(operator._schema.is_mutable) and all(alias is not None and alias.is_write for alias in given)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """What AOTAutograd's wrapper sets around compiled code: no gradients and no autocasting."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield
