"""Read the memory of this process from the kernel, in bytes; Linux only."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path

MEBIBYTE = 2**20
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""Environment in which freed blocks of 64 KiB and more return to the system."""
SHARING = {"OMP_WAIT_POLICY": "passive"}
"""Environment in which idle threads sleep instead of spinning, for machines with other work."""


def resident() -> int:
    """Return the bytes that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def settled() -> float:
    """Collect all garbage, return free memory to the system, and return the MiB that the process still holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident() / MEBIBYTE


PROMPT = 41  # tokens
STAGES = {"loaded": 0, "first token": 0, "third": 2, "thirtieth": 27}
"""Stages at which memory is read, with the number of steps since the previous stage."""
SETTLED = "without garbage"


def stages(weights: str, dtype: str, policy: str | None, compiles: bool) -> dict[str, float]:
    """Return the resident MiB of this process at each of `STAGES`, and at `SETTLED` after the last one.

    Args:
        policy: a policy with a budget of 512 tokens; None for the uncompiled model.
        compiles: whether to import and use the compiler even if the model is uncompiled.
    """
    from benchmarks.rivals import engine  # the uncompiled model must not import kvpass

    adapter = "kvpass_engines:Forward" if policy else "torch_models:Uncompiled"
    setup = engine.Setup(weights, dtype, 1, 512 if policy else None, policy)
    decoder = engine.load(f"benchmarks.rivals.{adapter}", setup)
    found = {"loaded": resident() / MEBIBYTE}
    decoder.prompt([[*range(100, 100 + PROMPT)]], 256)
    found["first token"] = resident() / MEBIBYTE
    if compiles and not policy:
        _compile_something()
    for name in ("third", "thirtieth"):
        decoder.steps(STAGES[name])
        found[name] = resident() / MEBIBYTE
    return found | {SETTLED: settled()}


def _compile_something() -> None:
    import torch

    import kvpass  # noqa: F401

    torch.compile(lambda x: x + 1)(torch.zeros(8))


def added(action: Callable[[], object]) -> float:
    """Run an action, and return its peak memory in MiB above the memory before it."""
    _forget_peak()
    before = resident()
    action()
    return (_peak() - before) / MEBIBYTE


def _peak() -> int:
    """Return the peak bytes since `_forget_peak`; `getrusage` would also count the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
