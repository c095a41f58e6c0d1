"""Real text without a download: the source files of Python's own standard library.

A handful of well-known modules is held out: the bundled models never saw them, and the demo, the
benchmarks and the tests measure on them.  The text is read from the running interpreter, so figures
differ a little between Python versions.
"""

from __future__ import annotations

import sysconfig
from itertools import chain, count
from pathlib import Path

from kvpass.errors import KVPassError

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


def documents(texts: list[list[int]], number: int, length: int, bos: int) -> list[list[int]]:
    """`number` documents of `length` tokens, `bos` first in each.

    They are the first piece of every text, then the second of every text, and so on, so that a few
    documents come from many files.

    Raises:
        KVPassError: the texts are too short.
    """
    body, found = length - 1, []
    for piece in count():
        cut = [text[piece * body : (piece + 1) * body] for text in texts]
        whole = [[bos, *part] for part in cut if len(part) == body]
        found += whole
        if len(found) >= number:
            return found[:number]
        if not whole:
            tokens = sum(map(len, texts))
            raise KVPassError(f"a text of {tokens} tokens makes {len(found)} of {number} documents of {length} tokens")
    raise AssertionError("count() never ends")


def unbroken(texts: list[list[int]], length: int, bos: int) -> list[int]:
    """The texts one after the other, `bos` before each, cut off after `length` tokens.

    Raises:
        KVPassError: the texts are too short.
    """
    tokens = list(chain.from_iterable([bos, *text] for text in texts))
    if len(tokens) < length:
        raise KVPassError(f"a text of {len(tokens)} tokens is too short for a stream of {length}")
    return tokens[:length]
