"""List the tested versions of torch, triton and transformers, and report newer and missing packages."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from kvpass.errors import KVPassError, KVPassWarning

TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "transformers": ("5.17", "5.24")}
"""The lowest and the highest tested release of each package; docs/testing.md says what runs on which."""


def installed_version(package: str) -> str | None:
    """Return the installed version of a package without importing it, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested_version(package: str) -> str | None:
    """Return the installed version if it is newer than all tested versions, else None."""
    version = installed_version(package)
    return version if version and _release(version) > _release(TESTED[package][1]) else None


def outdated_version(package: str) -> str | None:
    """Return the installed version if it is older than all tested versions, else None."""
    version = installed_version(package)
    return version if version and _release(version) < _release(TESTED[package][0]) else None


@functools.cache
def digest_of_sources(*packages: str) -> bytes:
    """Return a digest of the Python and C++ sources of packages of kvpass, or of all but its `apps`."""
    result, root = hashlib.sha256(), Path(__file__).parent
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.cpp"))):
        package = path.relative_to(root).parts[0]
        if package in packages if packages else package != "apps":
            result.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return result.digest()


def tested_range(package: str) -> str:
    """Return the tested range as text."""
    return " to ".join(TESTED[package])


@contextlib.contextmanager
def needing_extra(extra: str, user: str) -> Iterator[None]:
    """Name the extra of kvpass to install if an import inside the context fails.

    Args:
        user: the part that needs the package, for the message: "the demo".

    Raises:
        KVPassError: a package that is imported inside is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise KVPassError(f"{user} needs {error.name}: pip install 'kvpass[{extra}]'") from error


@functools.cache
def warn_of_untested() -> None:
    """Warn once in a process of packages that are newer than all tested versions."""
    newer = {package: version for package in TESTED if (version := untested_version(package))}
    if newer:
        named = ", ".join(
            f"{package} {version} (tested: {tested_range(package)})" for package, version in newer.items()
        )
        message = f"kvpass is not tested with {named}; `kvpass doctor` lists the tested versions"
        warnings.warn(message, KVPassWarning, stacklevel=4)


def _release(version: str) -> tuple[int, ...]:
    """Return the major and the minor number: patch releases count as tested."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
