"""Watch the code that Inductor generates while it runs."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


KERNEL, ALLOCATOR = "kernel", "empty_strided_cpu"
"""Inductor's names for the function of a CPU kernel, and for the allocator of its modules."""


_SCOPES: list[dict[str, Any]] = []
_LIBRARIES: dict[str, str] = {}
"""The file of each C++ library that was built or that another process has built, by the digest of its source."""


def add_scope(scope: dict[str, Any]) -> None:
    """Add the globals of code that Inductor has written in another process."""
    _SCOPES.append(scope)


def generated_scopes() -> list[dict[str, Any]]:
    """Return the globals of the modules that Inductor has written, in this process or for `add_scope`."""
    written = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    return [*(vars(module) for module in (written.modules if written else ())), *_SCOPES]


def kernel_library(value: Any) -> str | None:
    """Return the library file of a CPU kernel that Inductor generated; None for anything else."""
    found = isinstance(value, types.BuiltinFunctionType) and value.__name__ == KERNEL
    return getattr(value.__self__, "__file__", None) if found else None


def is_foreign(function: Any) -> bool:
    """Check whether a function belongs to a library that is neither Python's nor torch's, such as Inductor's."""
    library = getattr(function, "__self__", None)
    if not isinstance(function, types.BuiltinFunctionType) or not isinstance(library, types.ModuleType):
        return False
    return library.__name__.partition(".")[0] not in {"torch", *sys.stdlib_module_names}


def allocator() -> Callable[..., Tensor]:
    """Return the function behind `ALLOCATOR` in the modules that Inductor writes."""
    guards: Any = torch._C._dynamo.guards
    return cast(Callable[..., Tensor], guards._empty_strided_cpu)


@contextlib.contextmanager
def watching_c_calls(see: Callable[[types.FrameType, Any], None]) -> Iterator[None]:
    """Report each C function that this thread calls from Python, with the calling frame, inside the context.

    The context uses Python's one profiling hook, which must be free.
    """

    def report(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            see(frame, function)

    sys.setprofile(report)
    try:
        yield
    finally:
        sys.setprofile(None)


MATRIX_PRODUCTS = """
#include <cstdint>
namespace c10 { struct BFloat16; }
namespace at::native::cpublas {
void brgemm(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const float*, const float*, float*, bool);
void brgemm(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool,
            const c10::BFloat16*, const c10::BFloat16*, float*, bool);
void brgemm_release(bool);
}
"""
"""The matrix products of torch's own CPU kernels, as `ATen/native/CPUBlas.h` declares them.

That header takes seconds to compile. The arguments are M, N, K, the strides of the rows of A, B and C, whether to add
to C, then A, B and C, and whether B is in pairs along K. A torch without these functions does not load the library.
"""


def cpp_library(source: str) -> ctypes.CDLL:
    """Compile C++ source to a library, once for all processes.

    Raises:
        RuntimeError: there is no compiler, or it rejects the source.
        OSError: torch lacks a function that the source calls.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()
    if digest not in _LIBRARIES:
        from torch._inductor.codecache import CppCodeCache

        _LIBRARIES[digest] = CppCodeCache.load(source)._name
    return ctypes.CDLL(_LIBRARIES[digest])


def built_libraries() -> dict[str, str]:
    """Return the files of the C++ libraries that this process has used, by the digests of their sources."""
    return dict(_LIBRARIES)


def use_libraries(files: Mapping[str, str]) -> None:
    """Use libraries that another process has built, by the digests of their sources, where this one has built none."""
    for digest, file in files.items():
        _LIBRARIES.setdefault(digest, file)


def is_shared(tensor: Tensor) -> bool:
    """Check whether anything but this tensor holds its storage."""
    holders = torch._C._storage_Use_Count
    alone = torch.empty(1, device="cpu")
    return holders(tensor.untyped_storage()._cdata) > holders(alone.untyped_storage()._cdata)


def watching_dispatch(see: Callable[[Any, Any, Any, Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Report each operator that torch's dispatcher runs, with arguments and results, after it has run."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class DispatchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = function(*args, **(kwargs or {}))
            see(function, args, kwargs or {}, results)
            return results

    return DispatchWatch()  # type: ignore[no-untyped-call]


def writes_results(operator: Any) -> bool:
    """Check whether an operator returns nothing but arguments that it writes to."""
    given = [result.alias_info for result in operator._schema.returns]
    return bool(operator._schema.is_mutable) and all(alias is not None and alias.is_write for alias in given)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Disable gradients and autocasting, as AOTAutograd's wrapper does around compiled code."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield
