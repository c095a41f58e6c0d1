"""What was measured, as JSON, as Markdown, and held against the targets."""

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
PAGES = tuple(Path(__file__).parents[1] / "docs" / name for name in ("performance.md", "quality.md"))
"""The pages of figures, between whose comments tables are written."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What a figure should be.

    Attributes:
        part: where it was measured; what: the figure, in words.
        limit: the bound; at_least: whether it is a lower one.
        measured: None if it could not be measured.
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
    """Rows with the same columns, and what to say above them."""

    caption: str
    rows: list[Row]


def verdicts(targets: Iterable[Target]) -> list[Row]:
    """A row for each target."""
    return [
        {"part": t.part, "figure": t.what, "target": t.wanted, "measured": cell(t.measured), "met": t.verdict}
        for t in targets
    ]


def about() -> Row:
    """What a figure depends on beside the program."""
    return {
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "processor": processor(),
        "cores": torch.multiprocessing.cpu_count(),
    }


def processor() -> str:
    """The processor's name, where the system says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def save(path: Path, rows: Sequence[Row], settings: Row) -> None:
    """The rows of a part, and how they came about."""
    text = json.dumps({"about": about(), "settings": settings, "rows": list(rows)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> list[Row]:
    """The rows of a part that was measured before; none if it was not."""
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
    """The text with what stands between the comments `<!-- name -->` and `<!-- /name -->` replaced.

    Raises:
        ValueError: the comments are not there.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"there is no {start} ... {end}")
    return f"{before}{start}\n{new.strip()}\n{end}{after}"


def under(row: Row) -> str:
    """The dtype and the threads of a row, in words."""
    return f"{row['dtype']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
