"""Save rows as JSON, format tables, and compare figures with their targets."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvpass.apps.evaluation.tables import cell

Row = dict[str, Any]
PAGES = tuple(Path(__file__).parents[1] / "docs" / name for name in ("performance.md", "quality.md", "papers.md"))
"""Pages of figures, with comments that enclose the tables."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on a figure.

    Attributes:
        part: part of the benchmark.
        what: the figure, in words.
        limit: the bound.
        at_least: True for a lower bound.
        measured: the figure; None if it could not be measured.
    """

    part: str
    what: str
    limit: float
    measured: float | None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    @property
    def verdict(self) -> str:
        return {True: "yes", False: "NO", None: "not measured"}[self.met]

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows with the same columns, and a caption."""

    caption: str
    rows: list[Row]


def verdicts(targets: Iterable[Target]) -> list[Row]:
    """Return a row for each target."""
    return [
        {"part": t.part, "figure": t.what, "target": t.wanted, "measured": cell(t.measured), "met": t.verdict}
        for t in targets
    ]


def about() -> Row:
    """Return the versions and the processor that figures depend on."""
    return {
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "processor": processor(),
        "cores": torch.multiprocessing.cpu_count(),
    }


def processor() -> str:
    """Return the name of the processor, or its architecture if the system has no name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def save(path: Path, rows: Sequence[Row], settings: Row) -> None:
    """Save the rows of a part with their settings."""
    text = json.dumps({"about": about(), "settings": settings, "rows": list(rows)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> list[Row]:
    """Return the saved rows of a part; none if it was not measured."""
    if not path.is_file():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def write(blocks: Mapping[str, str]) -> None:
    """Write each block between its comments on the pages of figures; a block without comments is left out."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, block in blocks.items():
            if f"<!-- {name} -->" in text:
                text = replaced(text, name, block)
        page.write_text(text, encoding="utf-8")


def replaced(text: str, name: str, new: str) -> str:
    """Replace the text between the comments `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: the comments are missing.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"there is no {start} ... {end}")
    return f"{before}{start}\n{new.strip()}\n{end}{after}"


def by_tokens(rows: Sequence[Row], key: str, value: str) -> dict[str, dict[int, float]]:
    """Return values of rows by the name under `key` and then by tokens; rows without the value are left out."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if value in row:
            found.setdefault(row[key], {})[row["tokens"]] = row[value]
    return found


def columns(key: str, values: Mapping[str, Mapping[int, float]]) -> list[Row]:
    """Return the rows of a table: a line for each name, a column for each number of tokens."""
    return [{key: name, **{f"{count:,}": value for count, value in line.items()}} for name, line in values.items()]


def under(row: Row) -> str:
    """Return the dtype and the threads of a row, in words."""
    return f"{row['dtype']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
