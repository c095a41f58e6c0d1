"""Fetch books in the public domain and a transcript of a conference as texts for measurements.

They are the English texts of the Canterbury corpus, from the test data in the sources of Brotli on the package index:
"Alice's Adventures in Wonderland" (42,000 tokens of SmolLM2), "As You Like It", "Paradise Lost", and a workshop of the
Library of Congress on electronic texts.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from filelock import FileLock

from kvpass.apps.checkpoint import cache_folder

PACKAGE, VERSION = "brotli", "1.2.1"
SHA256 = "02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de"
NAMES = ("alice29.txt", "asyoulik.txt", "lcet10.txt", "plrabn12.txt")


def paths() -> list[Path]:
    """Return the paths of the texts, which are fetched on first use into the cache folder of the checkpoint.

    Raises:
        RuntimeError: the package cannot be fetched, or has other content.
    """
    folder = cache_folder() / "books"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not all((folder / name).is_file() for name in NAMES):
            _fetch(folder)
    return [folder / name for name in NAMES]


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        wanted = [f"{PACKAGE}=={VERSION}", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *wanted, "--dest", temporary]
        done = subprocess.run(command, capture_output=True, text=True)
        archive = Path(temporary) / f"{PACKAGE}-{VERSION}.tar.gz"
        if not archive.is_file():
            raise RuntimeError(f"{PACKAGE} {VERSION} cannot be fetched: {done.stderr.strip()[-300:]}")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{archive.name} has the digest {digest}, not {SHA256}")
        with tarfile.open(archive) as files:
            for name in NAMES:
                member = files.extractfile(f"{PACKAGE}-{VERSION}/tests/testdata/{name}")
                assert member is not None
                text = member.read().decode("ascii").replace("\r\n", "\n")
                (folder / name).write_text(text, encoding="utf-8")
