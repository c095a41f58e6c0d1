"""Compiled graphs for a CPU as plain values and files, and back: `entry_of`, `run_of`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kvpass.lowering.layer_dedup.link import LinkedSegments
from kvpass.lowering.replay import Replayed
from kvpass.torch_private import exported_code, inductor
from kvpass.torch_private.exported_code import ExportedCode

WHOLE = "return run_0([*a])"
"""The source of a graph that was compiled whole."""


class ExportFiles(Protocol):
    """The files of an artifact while it is written."""

    def add_library(self, path: str) -> str:
        """Add a library, and return its name in the artifact."""
        ...

    def add_text(self, text: str) -> str:
        """Add Python text, and return its name in the artifact."""
        ...

    def add_tensor(self, tensor: Tensor) -> str:
        """Add a tensor, and return its name in the artifact."""
        ...


def entry_of(run: Any, files: ExportFiles) -> dict[str, Any] | None:
    """Return what an artifact's manifest has about compiled code; None if it cannot be exported.

    Args:
        run: what `kvpass.backend.Backend` compiled: linked segments or a whole graph, replayed or not.
        files: get the code's files.
    """
    run = run.compiled if isinstance(run, Replayed) else run
    linked = isinstance(run, LinkedSegments)
    parts = {name: exported_code.exported(part) for name, part in (run.runs if linked else {"run_0": run}).items()}
    if not all(parts.values()):
        return None
    entries = {name: _entry_of(part, files) for name, part in parts.items() if part is not None}
    return {"source": run.source if linked else WHOLE, "runs": entries}


def _entry_of(part: ExportedCode, files: ExportFiles) -> dict[str, Any]:
    return {
        "text": files.add_text(part.text),
        "kernels": {name: files.add_library(path) for name, path in part.kernels.items()},
        "constants": {name: files.add_tensor(tensor) for name, tensor in part.constants.items()},
        "leading": [files.add_tensor(tensor) for tensor in part.leading],
    }


def run_of(entry: Mapping[str, Any], folder: Path, tensors: Mapping[str, Tensor], repeats: bool) -> inductor.Compiled:
    """Return the compiled code that `entry_of` has described.

    Args:
        folder: of the artifact, whose files have been checked.
        tensors: of the artifact, by name.
        repeats: whether steps run it, which are replayed.

    Raises:
        ImportError, OSError: a library cannot be loaded.
    """
    runs: dict[str, inductor.Boxed] = {}
    for name, part in entry["runs"].items():
        kernels = {kernel: str(folder / file) for kernel, file in part["kernels"].items()}
        constants = {constant: tensors[key] for constant, key in part["constants"].items()}
        leading = [tensors[key] for key in part["leading"]]
        code = ExportedCode((folder / part["text"]).read_text(encoding="utf-8"), kernels, constants, leading)
        runs[name] = exported_code.imported(code, str(folder / part["text"]))
    linked = LinkedSegments(entry["source"], runs)
    return Replayed(linked) if repeats else linked


def arguments_read(entry: Mapping[str, Any]) -> set[int] | None:
    """Return the indices of the arguments that code reads; None for all."""
    return None if entry["source"] == WHOLE else {int(index) for index in re.findall(r"\ba\[(\d+)\]", entry["source"])}


def digest(content: bytes) -> str:
    """Return the digest by which an artifact names and checks its files."""
    return hashlib.sha256(content).hexdigest()
