"""Find kernels and libraries that Inductor makes for a CPU, and the modes that they run in."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

KERNEL = "kernel"
"""Inductor's name for the function of a CPU kernel."""

_LIBRARIES: dict[str, ctypes.CDLL] = {}
"""Each C++ library that this or another process has built, by the digest of its source."""


def kernel_library(value: Any) -> str | None:
    """Return the library file of a CPU kernel that Inductor generated; None for anything else."""
    found = isinstance(value, types.BuiltinFunctionType) and value.__name__ == KERNEL
    return getattr(value.__self__, "__file__", None) if found else None


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

        _LIBRARIES[digest] = ctypes.CDLL(CppCodeCache.load(source)._name)
    return _LIBRARIES[digest]


def built_libraries() -> dict[str, str]:
    """Return the files of the C++ libraries that this process has used, by the digests of their sources."""
    return {digest: library._name for digest, library in _LIBRARIES.items()}


def use_libraries(files: Mapping[str, str]) -> None:
    """Load libraries that another process has built, by the digests of their sources, where this process has none."""
    for digest, file in files.items():
        if digest not in _LIBRARIES:
            _LIBRARIES[digest] = ctypes.CDLL(file)  # loaded now, because the file may be removed later


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Disable gradients and autocasting, as AOTAutograd's wrapper does around compiled code."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield
