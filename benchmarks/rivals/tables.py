"""Format the measurements of `compare` as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.report import Row, Table
from benchmarks.rivals.contenders import BUDGET, REFERENCE, UNCOMPILED

Key = tuple[str, int, int]
"""Precision, threads and rows."""


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of all measured parts."""
    made = []
    for key in dict.fromkeys(_key(row) for row in rows):
        alike = [row for row in rows if _key(row) == key]
        made += _steps([row for row in alike if row["part"] == "steps"], key)
        made += _starts([row for row in alike if row["part"] == "start"], key)
        made += _peaks([row for row in alike if row["part"] == "memory"], key)
    return [*made, *_errors(rows)]


def _key(row: Row) -> Key:
    return row["precision"], row["threads"], row["rows"]


def _under(key: Key) -> str:
    precision, threads, rows = key
    weights = "int8 weights" if precision == "int8" else precision
    counted = [f"{rows} row{'s' * (rows > 1)}", f"{threads} thread{'s' * (threads > 1)}"]
    return ", ".join([weights, *counted, f"budgets of {BUDGET}"])


def _steps(rows: Sequence[Row], key: Key) -> list[Table]:
    """Return one table: steps by tokens seen, the ratio at the most tokens, and prompts by their tokens."""
    found, lines = [row for row in rows if "error" not in row], dict[str, Row]()
    lengths = sorted({row["seen"] for row in found})
    for row in found:
        line = lines.setdefault(row["contender"], {"": row["contender"]})
        line[f"step at {row['seen']:,}, ms"] = row["ms"]
    for row in found:
        if row["seen"] == lengths[-1]:
            lines[row["contender"]][f"times {REFERENCE}"] = _ratio(row, found)
    for row in found:
        lines[row["contender"]][f"prompt of {row['seen']:,}, s"] = row["s"]
    caption = f"Steps by tokens seen and prompts by their tokens, {_under(key)}"
    return [Table(caption, [*lines.values()])] if lines else []


def _ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the median over the turns of the ratio to the reference's step in the same round."""
    to = [other for other in rows if other["contender"] == REFERENCE and other["seen"] == row["seen"]]
    if not to:
        return None
    return statistics.median(mine / theirs for mine, theirs in zip(row["steps"], to[0]["steps"], strict=True))


def _starts(rows: Sequence[Row], key: Key) -> list[Table]:
    lines: dict[str, Row] = {}
    expected = next((row["tokens"] for row in rows if row["contender"] == UNCOMPILED and "tokens" in row), None)
    for row in rows:
        if "error" not in row:
            line = lines.setdefault(row["contender"], {"seconds to a token": row["contender"]})
            line |= {f"{row['caches']}: {name}": row[name] for name in ("first", "second", "twentieth")}
    for row in rows:
        if "tokens" in row and expected is not None:
            lines[row["contender"]]["same tokens"] = _alike(row["tokens"], expected)
    caption = f"Start of a process to its first, second and twentieth token, {_under(key)}"
    return [Table(caption, [*lines.values()])] if lines else []


def _alike(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of equal first tokens."""
    differing = (number for number, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1])
    return next(differing, len(expected))


def _peaks(rows: Sequence[Row], key: Key) -> list[Table]:
    lines: dict[str, Row] = {}
    for row in rows:
        if "error" not in row:
            line = lines.setdefault(row["contender"], {"MiB": row["contender"]})
            line[f"prompt of {row['seen']:,}"] = row["MiB"]
    for row in rows:
        if "error" not in row:
            lines[row["contender"]]["process after that"] = row["process"]
    return [Table(f"Peak memory that a prompt adds, {_under(key)}", [*lines.values()])] if lines else []


def _errors(rows: Sequence[Row]) -> list[Table]:
    lines = [
        {"contender": row["contender"], "in": f"{row['part']}, {_under(_key(row))}", "error": row["error"]}
        for row in rows
        if "error" in row
    ]
    return [Table("What could not be measured", lines)] if lines else []
