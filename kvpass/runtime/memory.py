"""Free memory of a device."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has free; None if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    told = Path("/proc/meminfo")
    lines = told.read_text(encoding="ascii").splitlines() if device.type == "cpu" and told.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
