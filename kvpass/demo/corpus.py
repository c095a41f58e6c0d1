"""Real text without a download: the source files of Python's own standard library.

A handful of well-known modules is held out: the bundled models never saw them, and the demo, the
benchmarks and the tests measure on them.  The text is read from the running interpreter, so figures
differ a little between Python versions.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

HELD_OUT = (
    "argparse.py",
    "calendar.py",
    "configparser.py",
    "dataclasses.py",
    "difflib.py",
    "email/message.py",
    "fractions.py",
    "heapq.py",
    "json/decoder.py",
    "shutil.py",
    "statistics.py",
    "textwrap.py",
)
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def held_out_files() -> list[Path]:
    """The held-out source files, in the order of `HELD_OUT`; those that this Python lacks are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return [root / name for name in HELD_OUT if (root / name).is_file()]


def training_files() -> list[Path]:
    """Every other source file of the standard library, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    held_out = {root / name for name in HELD_OUT}
    return sorted(
        path
        for path in root.rglob("*.py")
        if path not in held_out and not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )


def read(paths: list[Path]) -> list[str]:
    """The texts of the files that are valid UTF-8 (a few tests of Python's are not, on purpose)."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts
