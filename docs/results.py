"""Write the results and the pictures of docs/demo.md from the folder that `make demo` fills.

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

PAGE = Path("docs/demo.md")
PICTURES = ("book", "retrieval", "kept")
QUESTIONS, CHARACTERS = 2, 240  # of the chat: the last questions, and what is shown of each answer
COST = ("cache, MiB", "ms per token")  # columns of the table of costs that the summary repeats
Row = dict[str, Any]


def summary(parts: dict[str, Any]) -> list[Row]:
    """Return one row for each policy: perplexity, passkeys, the size of the cache and the time of a token."""
    retrieved, cost = (_by_policy(parts[name]["rows"]) for name in ("retrieval", "cost"))
    return [
        {
            **row,
            "passkeys found": _mean(retrieved.get(policy, {})),
            **{name: cost.get(policy, {}).get(name) for name in COST},
        }
        for policy, row in _by_policy(parts["book"]["rows"]).items()
    ]


def _by_policy(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the rows that are no refusals, by policy."""
    return {row["policy"]: row for row in rows if "error" not in row}


def _mean(row: Row) -> float | None:
    shares = [share for name, share in row.items() if name != "policy"]
    return sum(shares) / len(shares) if shares else None


def chat(rows: Sequence[Row]) -> str:
    """Return the last questions of the chat, each with the beginning of every policy's answer."""
    questions = list(dict.fromkeys(row["question"] for row in rows))[-QUESTIONS:]
    lines = []
    for question in questions:
        lines.append(f"**{question}**\n")
        for row in (row for row in rows if row["question"] == question):
            answer = " ".join(row["answer"].split())
            short = answer if len(answer) <= CHARACTERS else f"{answer[:CHARACTERS].rstrip()} ..."
            lines.append(f"- {row['policy']}, after {row['seen']} tokens: `{short.replace('`', '') or '-'}`")
        lines.append("")
    return "\n".join(lines).rstrip()


def block(out: Path) -> str:
    """Return the text between the marks of the page."""
    parts = {
        name: json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("chat", "book", "retrieval", "cost", "kept")
    }
    sections = [
        markdown(summary(parts)),
        parts["book"]["caption"],
        "![Perplexity along the book](demo-book.png)",
        "### Chat",
        parts["chat"]["caption"],
        chat(parts["chat"]["rows"]),
        "### Retrieval",
        parts["retrieval"]["caption"],
        markdown(parts["retrieval"]["rows"]),
        "### Cost",
        parts["cost"]["caption"],
        markdown(parts["cost"]["rows"]),
        "### Kept",
        parts["kept"]["caption"],
        markdown(parts["kept"]["rows"]),
        "![Positions that were held while the book was read](demo-kept.png)",
    ]
    return "\n\n".join(sections)


def main(out: Path) -> None:
    for name in PICTURES:
        shutil.copyfile(out / f"{name}.png", PAGE.with_name(f"demo-{name}.png"))
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "results", block(out)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["out"]))
