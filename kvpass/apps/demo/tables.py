"""Tables as lists of rows: printed in columns, and written as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpass.apps.demo.recall import RecallOutcome
from kvpass.apps.demo.stream import StreamRun, perplexity
from kvpass.errors import KVPassError

Row = dict[str, object]
MEBIBYTE = 2**20
LEAST = (5, 9)  # characters of a column, and of that of the policies


def cost(policy: str, outcome: StreamRun | KVPassError) -> Row:
    """What a policy cost, or why it would not run."""
    if isinstance(outcome, KVPassError):
        return {"policy": policy, "error": str(outcome)}
    speed = outcome.tokens_per_second
    return {
        "policy": policy,
        "perplexity": round(perplexity(outcome.losses), 3),
        "tokens_per_second": None if speed is None else round(speed, 1),
        "cache_bytes": outcome.cache_bytes,
        "full_cache_bytes": outcome.full_bytes,
        "decode_graphs": outcome.decode_graphs,
        "graph_breaks": outcome.graph_breaks,
    }


def cost_along(policy: str, outcome: StreamRun | KVPassError, trained: int | None) -> Row:
    """`cost`, with the perplexity also split where the stream leaves the `trained` range of positions."""
    row = cost(policy, outcome)
    if isinstance(outcome, KVPassError) or trained is None or outcome.losses.shape[1] <= trained:
        return row
    # Loss i is made at position i, so the first `trained` of them are inside the range.
    inside, outside = outcome.losses[:, :trained], outcome.losses[:, trained:]
    split = {"perplexity_in_range": round(perplexity(inside), 3), "perplexity_beyond": round(perplexity(outside), 3)}
    return {"policy": policy, **split, **row}


def recalled(policy: str, outcome: RecallOutcome | KVPassError) -> list[Row]:
    """What a policy recalled, a row for each way of asking and a column for each distance."""
    if isinstance(outcome, KVPassError):
        return [{"policy": policy, "error": str(outcome)}]
    return [{"policy": policy, "asked": way, **_by_distance(outcome, shares)} for way, shares in outcome.ways.items()]


def _by_distance(outcome: RecallOutcome, shares: Sequence[float]) -> Row:
    return {str(distance): round(share, 2) for distance, share in zip(outcome.distances, shares, strict=True)}


def answered(questions: Sequence[Row], outcomes: Mapping[str, Sequence[str] | KVPassError]) -> list[Row]:
    """A row for each question and policy; a refusal has one row."""
    rows: list[Row] = [
        {**question, "policy": policy, "completion": outcome[number]}
        for number, question in enumerate(questions)
        for policy, outcome in outcomes.items()
        if not isinstance(outcome, KVPassError)
    ]
    refusals = {policy: outcome for policy, outcome in outcomes.items() if isinstance(outcome, KVPassError)}
    return rows + [{"policy": policy, "error": str(error)} for policy, error in refusals.items()]


def conversation(rows: Sequence[Row]) -> str:
    """The rows of `answered` as lines, a heading before each question."""
    lines, last = [], None
    for row in rows:
        if "completion" in row and row["distance"] != last:
            last = row["distance"]
            lines.append(f"\n{last} tokens after {row['planted']!r}, asked {str(row['prompt'])[-24:]!r}:")
        lines.append(
            f"  {row['policy']:10} {row['completion']!r}" if "completion" in row else f"{row['policy']}: {row['error']}"
        )
    return "\n".join(lines)


def write(path: Path, caption: str, rows: Sequence[Row]) -> None:
    """One JSON object: the caption and the rows."""
    path.write_text(json.dumps({"caption": caption, "rows": rows}, indent=2) + "\n", encoding="utf-8")


class PrintedTable:
    """A table that is printed as it fills up, byte counts in MiB; what is wrong stands in a line of its own."""

    def __init__(self, caption: str) -> None:
        self.rows: list[Row] = []
        self._widths: dict[str, int] = {}
        print(f"\n{caption}", flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        """Print further rows; those that come first say how wide columns are."""
        self.rows += rows
        shown = [row for row in rows if "error" not in row]
        if shown and not self._widths:
            self._widths = _widths(shown)
            print(self._line({name: _heading(name) for name in self._widths}))
            print(self._line({name: "-" * width for name, width in self._widths.items()}))
        for row in rows:
            print(f"{row['policy']}: {row['error']}" if "error" in row else self._line(_cells(row)), flush=True)

    def _line(self, cells: Mapping[str, str]) -> str:
        """A row that lacks a column shows a dash."""
        line = [_aligned(cells.get(name, "-"), width, name) for name, width in self._widths.items()]
        return "  ".join(line).rstrip()


def _widths(rows: Sequence[Row]) -> dict[str, int]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    longest = {name: max(len(_cells(row).get(name, "")) for row in rows) for name in names}
    return {name: max(len(_heading(name)), longest[name], LEAST[name == "policy"]) for name in names}


def _cells(row: Row) -> dict[str, str]:
    return {name: _cell(name, value) for name, value in row.items()}


def _heading(name: str) -> str:
    return (name.removesuffix("_bytes") + "_MiB" if name.endswith("_bytes") else name).replace("_", " ")


def _cell(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / MEBIBYTE:.2f}"
    return str(value)


def _aligned(cell: str, width: int, name: str) -> str:
    return cell.ljust(width) if name == "policy" else cell.rjust(width)
