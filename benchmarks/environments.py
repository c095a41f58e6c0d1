"""Make a separate Python environment for each package that conflicts with kvpass."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class Unavailable(Exception):
    """A package cannot be installed or run here; the message says why."""


def python(folder: Path, packages: Sequence[str], variables: Mapping[str, str] | None = None) -> Path:
    """Return the Python of a virtual environment with the packages; make the environment if it is missing.

    Args:
        folder: folder of the environment. A file in it lists the packages; if they differ, the environment is replaced.
        packages: requirements, as pip takes them.
        variables: environment variables of the installation.

    Raises:
        Unavailable: the environment cannot be made; the message has the last error of pip.
    """
    found = folder / "bin" / "python"
    with _unless_made(folder, packages) as missing:
        if missing:
            _run([sys.executable, "-m", "venv", "--clear", str(folder)], {})
            _run([str(found), "-m", "pip", "install", "--quiet", *packages], variables or {})
    return found


def library(folder: Path, packages: Sequence[str]) -> Path:
    """Return a folder for PYTHONPATH with the packages but not their dependencies; make it if it is missing.

    Raises:
        Unavailable: a package cannot be installed; the message has the last error of pip.
    """
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    with _unless_made(folder, packages) as missing:
        if missing:
            _run([*install, *packages], {})
    return folder


@contextlib.contextmanager
def _unless_made(folder: Path, packages: Sequence[str]) -> Iterator[bool]:
    """Yield whether a folder lacks the packages, and list them in it after an installation without error."""
    listed, wanted = folder / "packages", "\n".join(packages)
    missing = not listed.is_file() or listed.read_text(encoding="utf-8") != wanted
    yield missing
    if missing:
        listed.write_text(wanted, encoding="utf-8")


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    if done.returncode:
        lines = done.stderr.splitlines()
        reason = [line for line in lines if line.startswith("ERROR")] or lines
        raise Unavailable(" ".join(reason[-1:]) or f"{command[1:4]} failed")
