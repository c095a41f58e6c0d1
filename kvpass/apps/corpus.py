"""Find text that every machine has without a download: Python's own source files, and the prose of its manual.

The bundled models are trained on the source files of the standard library; a few well-known modules are held out, and
benchmarks and tests measure on these.  Other models are measured on the English of the language reference.  Both are
read from the running interpreter, so figures differ a little between Python versions.
"""

from __future__ import annotations

import contextlib
import re
import sysconfig
from collections.abc import Sequence
from itertools import chain
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
_SENTENCE = re.compile(r"[.:;,][\])”]?$")
_NO_PROSE = ("::=", ">>>")  # grammar, and examples of code
_SHORTEST, _LETTERS = 40, 0.8  # characters of a paragraph, and the share of letters and blanks among them


def held_out_files() -> list[Path]:
    """Return the held-out source files in the order of `HELD_OUT`, except files that this Python lacks."""
    root = Path(sysconfig.get_path("stdlib"))
    return [root / name for name in HELD_OUT if (root / name).is_file()]


def training_files() -> list[Path]:
    """Return every other source file of the standard library, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    held_out = {root / name for name in HELD_OUT}
    return sorted(
        path
        for path in root.rglob("*.py")
        if path not in held_out and not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )


def read(paths: list[Path]) -> list[str]:
    """Return the texts of the files that are valid UTF-8; a few of Python's own tests are not, on purpose."""
    texts = []
    for path in paths:
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(path.read_text(encoding="utf-8"))
    return texts


def prose() -> dict[str, str]:
    """Return the English paragraphs of Python's language reference, by topic: about 60,000 tokens.

    Grammar, code and headings are left out, and so is a paragraph that an earlier topic has.  The texts are in
    `pydoc_data.topics`, under the licence of Python.

    Raises:
        KVPassError: this Python comes without its reference.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise KVPassError(
            "this Python lacks pydoc_data.topics, the English text that models are measured on; install Python's "
            "standard library in full, or name a text with --text FILE"
        ) from error
    seen: set[str] = set()
    by_topic: dict[str, str] = {}
    for topic in sorted(topics):
        paragraphs = (" ".join(block.split()) for block in re.split(r"\n\s*\n", topics[topic]))
        new_paragraphs = [
            paragraph for paragraph in dict.fromkeys(paragraphs) if paragraph not in seen and _is_prose(paragraph)
        ]
        seen.update(new_paragraphs)
        if new_paragraphs:
            by_topic[topic] = "\n\n".join(new_paragraphs) + "\n"
    return by_topic


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph on one line consists of English sentences."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        len(paragraph) >= _SHORTEST
        and letters >= _LETTERS * len(paragraph)
        and _SENTENCE.search(paragraph) is not None
        and not any(mark in paragraph for mark in _NO_PROSE)
    )


def texts_of(paths: Sequence[Path], bundled: bool) -> dict[str, str]:
    """Return texts by name: UTF-8 files, or without any the held-out source files for a bundled model, else `prose`.

    Raises:
        KVPassError: a file cannot be read as UTF-8 text, or Python comes without its reference.
    """
    if paths:
        return {str(path): read_file(path) for path in paths}
    return {path.name: text for path in held_out_files() for text in read([path])} if bundled else prose()


def check_kept(text: Path | None, *written: Path) -> None:
    """Raise KVPassError if a command would overwrite the text that it reads; the first file is its `--out`."""
    if text is not None and text.resolve() in [path.resolve() for path in written]:
        raise KVPassError(f"cannot write {written[0]}: the run would overwrite its text {text}; choose another --out")


def read_file(path: Path) -> str:
    """Return the text of a file, or raise KVPassError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVPassError(f"cannot read the text {path}: {error}; give a UTF-8 file") from error


def documents(texts: list[list[int]], number: int, length: int, bos: int) -> list[list[int]]:
    """Return `number` documents of `length` tokens, each with `bos` as its first.

    They are the first piece of every text, then the second piece of every text, and so on, so a few documents come from
    many texts.
    """
    body, tokens = length - 1, sum(map(len, texts))
    starts = range(0, max(map(len, texts), default=0), body)
    pieces = [text[start : start + body] for start in starts for text in texts]
    complete = [[bos, *piece] for piece in pieces if len(piece) == body]
    if len(complete) < number:
        raise KVPassError(
            f"a text of {tokens} tokens makes {len(complete)} of {number} documents of {length} tokens; give more text"
        )
    return complete[:number]


def concatenate_texts(texts: list[list[int]], length: int, bos: int) -> list[int]:
    """Return the texts one after the other, with `bos` before each, cut off after `length` tokens."""
    tokens = list(chain.from_iterable([bos, *text] for text in texts))
    if len(tokens) < length:
        raise KVPassError(f"a text of {len(tokens)} tokens is too short for a stream of {length}; give more text")
    return tokens[:length]
