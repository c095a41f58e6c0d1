"""Print what `compare` has measured as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.report import Row, Table
from benchmarks.rivals.contenders import BUDGET, REFERENCE, UNCOMPILED

Key = tuple[str, int, int]
"""Precision, threads and rows."""


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of all parts that there are rows of."""
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
    found = [row for row in rows if "error" not in row]
    if not found:
        return []
    step = _by_length(found, "milliseconds a step", lambda row: row["ms"])
    prompt = _by_length(found, "seconds of a prompt", lambda row: row["s"])
    ratios = _by_length(found, f"a step, times {REFERENCE}", lambda row: _ratio(row, found, "steps"))
    return [
        Table(f"Step by tokens seen, {_under(key)}", step),
        Table(f"The same, medians of the ratios in each turn to {REFERENCE}", ratios),
        Table(f"Prompt by its tokens, {_under(key)}", prompt),
    ]


def _by_length(rows: Sequence[Row], title: str, value: Callable[[Row], float | None]) -> list[Row]:
    """Return a line for each contender and a column for each length."""
    lines: dict[str, Row] = {}
    for row in rows:
        line = lines.setdefault(row["contender"], {title: row["contender"]})
        line[f"{row['seen']:,}"] = value(row)
    return [*lines.values()]


def _ratio(row: Row, rows: Sequence[Row], what: str) -> float | None:
    """Return the median of the ratios of a contender's turns to the reference's turns of the same rounds."""
    to = [other for other in rows if other["contender"] == REFERENCE and other["seen"] == row["seen"]]
    if not to:
        return None
    return statistics.median(mine / theirs for mine, theirs in zip(row[what], to[0][what], strict=True))


def _starts(rows: Sequence[Row], key: Key) -> list[Table]:
    lines: dict[str, Row] = {}
    expected = next((row["tokens"] for row in rows if row["contender"] == UNCOMPILED and "tokens" in row), None)
    for row in rows:
        if "error" not in row:
            line = lines.setdefault(row["contender"], {"seconds to a token": row["contender"]})
            line |= {f"{row['caches']}: {name}": row[name] for name in ("first", "second", "twentieth")}
            line["same tokens"] = None if expected is None else _alike(row["tokens"], expected)
    caption = f"Start of a process to its first, second and twentieth token, {_under(key)}"
    return [Table(caption, [*lines.values()])] if lines else []


def _alike(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Return how many of the first tokens are the same."""
    differing = (number for number, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1])
    return next(differing, len(expected))


def _peaks(rows: Sequence[Row], key: Key) -> list[Table]:
    found = [row for row in rows if "error" not in row]
    if not found:
        return []
    lines = _by_length(found, "MiB that a prompt adds", lambda row: row["MiB"])
    for line in lines:
        held = [row["process"] for row in found if row["contender"] == line["MiB that a prompt adds"]]
        line["process after that"] = held[-1]
    return [Table(f"Peak memory of a prompt by its tokens, {_under(key)}", lines)]


def _errors(rows: Sequence[Row]) -> list[Table]:
    lines = [
        {"contender": row["contender"], "in": f"{row['part']}, {_under(_key(row))}", "error": row["error"]}
        for row in rows
        if "error" in row
    ]
    return [Table("What could not be measured", lines)] if lines else []
