"""Write the folder of an artifact, which appears when it is complete, and check every file when it is read.

Compiled graphs for a CPU become plain values and files, and back: `code_manifest`, `code_from_manifest`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpass import tensor_files
from kvpass.errors import ArtifactError
from kvpass.lowering.layer_dedup.link import LinkedSegments
from kvpass.torch_private import exported_code, inductor
from kvpass.torch_private.exported_code import ExportedCode

VERSION = 5
MANIFEST = "manifest.json"


def check_target(target: Path) -> None:
    """Raise ArtifactError if the target exists and is not an artifact, or if its folder takes no new files."""
    tensor_files.check_folder(target, ArtifactError)
    with tensor_files.locked(target.absolute().parent):  # as another process may replace the artifact
        if target.exists() and not (target / MANIFEST).is_file():
            raise ArtifactError(f"{target} exists and is not an artifact: give another path")


@contextlib.contextmanager
def write_folder(target: Path) -> Iterator[ExportFiles]:
    """Yield the files of an artifact in a new folder, which replaces the target if no error is raised inside.

    A symbolic link at the target stays, and the folder that it leads to is replaced.

    Raises:
        ArtifactError: the target is not an artifact, or its parent cannot be written to.
    """
    target = Path(tensor_files.without_link(target))
    check_target(target)
    try:
        parent = target.absolute().parent
        folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".unfinished", dir=parent))
    except OSError as error:
        raise ArtifactError(f"{target}: cannot be written: {error}") from error
    replaced = folder.with_suffix(".replaced")
    try:
        yield ExportFiles(folder)
        os.chmod(folder, 0o755)  # `mkdtemp` lets only the owner read it
        with tensor_files.locked(parent):  # several servers may export what they found missing
            if target.exists():
                os.replace(target, replaced)
            os.replace(folder, target)
    except BaseException as error:  # an interrupt must not leave an unfinished folder either
        if replaced.exists() and not target.exists():
            os.replace(replaced, target)
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise ArtifactError(f"{target}: cannot be written: {error}") from error
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def write_manifest(files: ExportFiles, manifest: Mapping[str, Any]) -> str:
    """Write the manifest, with the digests of all files and its own digest, and return its digest."""
    whole = {**manifest, "version": VERSION, "files": files.digests}
    found = manifest_digest(whole)
    text = json.dumps({**whole, "digest": found}, indent=1)
    (files.folder / MANIFEST).write_text(text, encoding="utf-8")
    return found


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest, without the digest that it contains."""
    content = {name: value for name, value in manifest.items() if name != "digest"}
    return sha256_hex(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder: Path, expected: str | None) -> dict[str, Any]:
    """Read a manifest, and check the digest of every file that it lists."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, recorded, files = manifest["version"], manifest["digest"], manifest["files"]
    except OSError as error:
        raise ArtifactError(f"is not an artifact: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"its manifest is damaged ({type(error).__name__}: {error})") from error
    tensor_files.check_version(version, VERSION, "export it again", ArtifactError)
    computed = manifest_digest(manifest)
    if computed != recorded:
        raise ArtifactError("its manifest was changed after it was written")
    if expected is not None and computed != expected:
        raise ArtifactError(f"its digest is {computed}, not {expected}: it is another artifact")
    for name, expected in files.items():
        if Path(name).name != name:
            raise ArtifactError(f"its manifest names a file outside of it: {name!r}")
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise ArtifactError(f"a file is missing: {error}") from error
        if sha256_hex(content) != expected:
            raise ArtifactError(f"{name} is damaged or was changed after it was written")
    return manifest


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
        return self.add(Path(path).read_bytes(), ".so")

    def add(self, content: bytes, suffix: str) -> str:
        """Add a file, and return its name in the artifact."""
        found = sha256_hex(content)
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
            # Without `clone` torch.save writes the whole storage of a view.
            stored = {name: tensor.detach().clone().contiguous() for name, tensor in self._tensors.items()}
            content: bytes = tensor_files.library().torch.save(stored)
            (self.folder / TENSORS).write_bytes(content)
            self.digests[TENSORS] = sha256_hex(content)


def code_manifest(run: Any, files: ExportFiles) -> dict[str, Any] | None:
    """Return the manifest of compiled code; None if the code cannot be exported."""
    linked, runs = isinstance(run, LinkedSegments), {}
    for name, segment in (run.runs if linked else {"run_0": run}).items():
        part = exported_code.export_code(segment)
        if part is None:
            return None
        runs[name] = {
            "text": files.add(part.text.encode(), ".py"),
            "kernels": {kernel: files.add_library(path) for kernel, path in part.kernels.items()},
            "constants": {constant: files.add_tensor(tensor) for constant, tensor in part.constants.items()},
            "leading": [files.add_tensor(tensor) for tensor in part.leading],
        }
    return {"source": run.source if linked else WHOLE, "runs": runs}


def code_from_manifest(manifest: Mapping[str, Any], folder: Path, tensors: Mapping[str, Tensor]) -> inductor.Compiled:
    """Return the compiled code that `code_manifest` has described, from files that have been checked."""
    runs: dict[str, inductor.Boxed] = {}
    for name, part in manifest["runs"].items():
        kernels = {kernel: str(folder / file) for kernel, file in part["kernels"].items()}
        constants = {constant: tensors[key] for constant, key in part["constants"].items()}
        leading = [tensors[key] for key in part["leading"]]
        code = ExportedCode((folder / part["text"]).read_text(encoding="utf-8"), kernels, constants, leading)
        runs[name] = exported_code.import_code(code, str(folder / part["text"]))
    return LinkedSegments(manifest["source"], runs)


def sha256_hex(content: bytes) -> str:
    """Return the digest by which an artifact names and checks its files."""
    return hashlib.sha256(content).hexdigest()
