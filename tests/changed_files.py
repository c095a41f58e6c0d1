"""Change saved caches, as a damaged disk or another program would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

KEY = "kvpass.cache"

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def changed(path: Path, change: Change, out: Path) -> Path:
    """Copy a file with its header and tensors changed by a function, and without a digest.

    With the digest of the file before, every change is refused as damage, before anything else is looked at.
    """
    with safetensors.safe_open(path, "pt") as file:
        header, tensors = json.loads(file.metadata()[KEY]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    safetensors.torch.save_file(tensors, out, metadata={KEY: json.dumps(header)})
    return out
