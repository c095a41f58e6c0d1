"""Write the folder of an artifact, which appears when it is complete, and check every file when it is read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpass.errors import ArtifactError
from kvpass.lowering import exported_run
from kvpass.lowering.exported_run import ExportFiles

VERSION = 1
MANIFEST = "manifest.json"


@contextlib.contextmanager
def writing(target: Path) -> Iterator[ExportFiles]:
    """Yield the files of an artifact in a new folder, which replaces the target if no error is raised inside.

    Raises:
        ArtifactError: the target is no artifact, or its parent cannot be written to.
    """
    if target.exists() and not (target / MANIFEST).is_file():
        raise ArtifactError(f"{target}: is there, and is no artifact: give another path")
    try:
        parent = target.absolute().parent
        folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".unfinished", dir=parent))
    except OSError as error:
        raise ArtifactError(f"{target}: cannot be written: {error}") from error
    try:
        yield ExportFiles(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    os.chmod(folder, 0o755)
    if target.exists():
        shutil.rmtree(target)
    os.replace(folder, target)


def write_manifest(files: ExportFiles, manifest: Mapping[str, Any]) -> str:
    """Write the manifest, with the digests of all files and its own, and return the latter."""
    whole = {**manifest, "version": VERSION, "files": files.digests}
    found = digest_of(whole)
    text = json.dumps({**whole, "digest": found}, indent=1)
    (files.folder / MANIFEST).write_text(text, encoding="utf-8")
    return found


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest, without the digest that it contains."""
    content = {name: value for name, value in manifest.items() if name != "digest"}
    return exported_run.digest(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder: Path, wanted: str | None) -> dict[str, Any]:
    """Return the manifest of an artifact whose files are as they were written."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, said, files = manifest["version"], manifest["digest"], manifest["files"]
    except OSError as error:
        raise ArtifactError(f"is no artifact: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"its manifest is damaged ({type(error).__name__}: {error})") from error
    if version != VERSION:
        raise ArtifactError(f"is of format {version!r}, and this kvpass reads format {VERSION}: export it again")
    found = digest_of(manifest)
    if found != said:
        raise ArtifactError("its manifest was changed after it was written")
    if wanted is not None and found != wanted:
        raise ArtifactError(f"its digest is {found}, not {wanted}: it is another artifact")
    for name, expected in files.items():
        if Path(name).name != name:
            raise ArtifactError(f"its manifest names a file outside of it: {name!r}")
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise ArtifactError(f"a file is missing: {error}") from error
        if exported_run.digest(content) != expected:
            raise ArtifactError(f"{name} is damaged or was changed after it was written")
    return manifest
