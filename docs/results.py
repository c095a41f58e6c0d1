"""Writes the results and the first picture of docs/demo.md from the folder that `make demo` fills.

python -m docs.results [FOLDER]
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import replaced
from kvpass.apps.evaluation.tables import markdown

PAGE, PICTURE = Path("docs/demo.md"), Path("docs/recall.png")
MEBIBYTE = 2**20
Row = dict[str, Any]


def documents(rows: Sequence[Row]) -> list[Row]:
    """What each policy cost on documents."""
    return [
        {
            "policy": row["policy"],
            "perplexity": f"{row['perplexity']:.2f}",
            "cache, of a full one": f"{row['cache_bytes'] / row['full_cache_bytes']:.3f}",
            "decode graphs": row["decode_graphs"],
            "graph breaks": row["graph_breaks"],
        }
        for row in rows
        if "error" not in row
    ]


def stream(rows: Sequence[Row]) -> list[Row]:
    """Perplexity on both sides of the end of the trained range."""
    return [
        {
            "policy": row["policy"],
            "perplexity inside the trained range": f"{row['perplexity_in_range']:.2f}",
            "beyond it": f"{row['perplexity_beyond']:.2f}",
            "cache, MiB": f"{row['cache_bytes'] / MEBIBYTE:.2f}",
        }
        for row in rows
        if "error" not in row
    ]


def block(out: Path) -> str:
    """Return the text between the marks of the page."""
    parts = {name: json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in ("stream", "documents")}
    return "\n\n".join(
        [
            parts["stream"]["caption"],
            markdown(stream(parts["stream"]["rows"])),
            parts["documents"]["caption"],
            markdown(documents(parts["documents"]["rows"])),
        ]
    )


def main(out: Path) -> None:
    shutil.copyfile(out / "recall.png", PICTURE)
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "results", block(out)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["out"]))
