"""Measure perplexity at equal memory on the bundled model; `benchmarks.quality` has more budgets and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import apart, bounded, quality
from benchmarks.memory import MEBIBYTE
from benchmarks.report import Row, Table
from benchmarks.settings import Settings

TITLE = "Perplexity at equal memory"
BUDGET, PROMPT = 256, 2


def measure(settings: Settings) -> list[Row]:
    """Return a row for every policy."""
    policies = ["full", "streaming", "h2o"] if settings.quick else ["full", *bounded.everything()]
    sizes = dict(documents=2, length=512) if settings.quick else dict(documents=4, length=1024)
    found: list[Row] = apart.run(
        "benchmarks.perplexity:rows", threads=max(settings.threads), out=str(settings.out), policies=policies, **sizes
    )
    return found


def rows(out: str, policies: Sequence[str], documents: int, length: int) -> list[Row]:
    """Measure as `benchmarks.quality` does; earlier results in the folder are measured again."""
    folder = Path(out) / "perplexity"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / quality.FILE).unlink(missing_ok=True)
    settings = quality.Settings(
        tuple(policies), (BUDGET,), (PROMPT,), documents=documents, length=length, inner="eager", out=folder
    )
    return [{**row, "documents": documents, "length": length} for row in quality.measured(settings)]


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = [
        {
            "policy": row["policy"],
            "perplexity": row.get("perplexity"),
            "cache, MiB": row["cache_bytes"] / MEBIBYTE if "cache_bytes" in row else row["error"],
            "of a full one": row["cache_bytes"] / row["full_cache_bytes"] if "cache_bytes" in row else None,
        }
        for row in rows
    ]
    first = rows[0]
    what = f"{first['documents']} held-out documents of {first['length']:,} tokens, token by token, budget {BUDGET}"
    return [Table(f"Perplexity of the bundled model: {what}", lines)]
