"""Compiled graphs for a CPU as plain values and files, and back: `entry_of`, `run_of`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpass.lowering.layer_dedup.link import LinkedSegments
from kvpass.lowering.replay import Replayed
from kvpass.policies import tensor_files
from kvpass.torch_private import exported_code, inductor
from kvpass.torch_private.exported_code import ExportedCode

TENSORS = "tensors.safetensors"
"""The file with the constants of graphs."""
WHOLE = "return run_0([*a])"
"""The source of a graph that was compiled whole."""


class ExportFiles:
    """The files of an artifact while it is written; code is named by its content.

    Attributes:
        folder: where the files are.
        digests: the digest of each file by its name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}

    def add_library(self, path: str) -> str:
        """Add a library, and return its name in the artifact."""
        return self._add(Path(path).read_bytes(), ".so")

    def add_text(self, text: str) -> str:
        """Add Python text, and return its name in the artifact."""
        return self._add(text.encode(), ".py")

    def _add(self, content: bytes, suffix: str) -> str:
        found = digest(content)
        name = found[:32] + suffix
        if name not in self.digests:
            (self.folder / name).write_bytes(content)
            self.digests[name] = found
        return name

    def add_tensor(self, tensor: Tensor) -> str:
        """Add a tensor, and return its name in the artifact."""
        known = next((name for name, each in self._tensors.items() if each is tensor), None)
        name = known or f"constant.{len(self._tensors)}"
        self._tensors[name] = tensor
        return name

    def write_tensors(self) -> None:
        """Write all tensors to one file, if there are any."""
        if self._tensors:
            stored = {name: tensor.detach().clone().contiguous() for name, tensor in self._tensors.items()}
            content: bytes = tensor_files.library().torch.save(stored)
            (self.folder / TENSORS).write_bytes(content)
            self.digests[TENSORS] = digest(content)


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
