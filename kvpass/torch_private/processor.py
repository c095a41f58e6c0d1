"""Read facts about the processor from torch and Linux, and return free memory to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

INSTRUCTIONS = (
    *("avx", "amx", "sse", "ssse", "fma", "f16c", "bmi", "abm", "movbe", "gfni", "vaes", "vpcl"),
    *("asimd", "sve", "sme", "bf16", "i8mm", "fphp", "atomics"),
)
"""Beginnings of the names of instructions that compilers use."""


def l1_cache_bytes() -> int:
    """Return the bytes of a core's L1 data cache; the usual 32 KiB if torch does not know."""
    return int(_capabilities().get("l1d_cache_size", 0)) or 32 << 10


def dot_products() -> frozenset[torch.dtype]:
    """Return the half-precision dtypes with dot-product instructions here, which torch's libraries use."""
    known = _capabilities()
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    return frozenset(dtype for dtype, any_of in names.items() if any(known.get(name) for name in any_of))


def library_products() -> frozenset[torch.dtype]:
    """Return the half-precision dtypes that oneDNN multiplies on this CPU; torch multiplies others by plain loops."""
    checks = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, is_supported in checks.items() if torch._C._has_mkldnn and is_supported())


def has_matrix_tiles() -> bool:
    """Return whether the processor has AMX."""
    return bool(_capabilities().get("amx_tile"))


def _capabilities() -> dict[str, Any]:
    """Return torch's facts about the processor; empty in older versions."""
    return dict(getattr(torch.cpu, "get_capabilities", dict)())


def flags_of_processor() -> frozenset[str]:
    """Return the vector and matrix instructions of this processor, as Linux names them; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flag for flag in flags.split() if flag.startswith(INSTRUCTIONS))


@functools.cache
def _malloc_trim() -> Callable[[int], int]:
    """Return the function of glibc that returns free memory to the system; elsewhere a function that does nothing."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0) if sys.platform == "linux" else lambda _: 0


def return_free_memory() -> None:
    """Return the compiler's freed memory to the system: glibc would keep up to 20 MiB for the process."""
    _malloc_trim()(0)
