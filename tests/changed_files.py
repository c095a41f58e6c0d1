"""Change saved caches, as a damaged disk or another program would, and fill the disk."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process become longer than 64 bytes, so that writing fails in the middle.

    Python does not notice that when it stores the bytecode of a module, which could then never be imported again.
    """
    limits, writes_no_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = writes_no_bytecode
