"""What a process holds and has held, in bytes, as the kernel counts it; Linux only."""

from __future__ import annotations

import resource
from pathlib import Path

# Blocks of 64 KiB and more go back to the system when they are freed: what is measured is what is alive.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
# Threads that have nothing to do sleep and do not spin: on a machine that is shared, those of others wait for spinning.
SHARING = {"OMP_WAIT_POLICY": "passive"}


def resident() -> int:
    """Held now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most that was held since `forget_peak`; `getrusage` would also count the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Start again with what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
