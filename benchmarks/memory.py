"""Read the memory of this process, in bytes, as the kernel counts it; Linux only."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

MEBIBYTE = 2**20
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""Environment in which blocks of 64 KiB and more go back to the system when they are freed."""
SHARING = {"OMP_WAIT_POLICY": "passive"}
"""Environment in which idle threads sleep instead of spinning, for machines with other work."""


def resident() -> int:
    """Return the bytes that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def added(action: Callable[[], object]) -> float:
    """Run an action and return the most MiB that the process held during it beyond what it held before."""
    _forget_peak()
    before = resident()
    action()
    return (_peak() - before) / MEBIBYTE


def _peak() -> int:
    """Return the most bytes held since `_forget_peak`; `getrusage` would also count the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
