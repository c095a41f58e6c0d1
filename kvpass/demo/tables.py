"""Tables as lists of rows: printed in columns, and written as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpass.demo.recall import Recall
from kvpass.demo.stream import Run, perplexity
from kvpass.errors import KVPassError

Row = dict[str, object]
MEBIBYTE = 2**20


def cost(policy: str, outcome: Run | KVPassError) -> Row:
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


def cost_along(policy: str, outcome: Run | KVPassError, trained: int | None) -> Row:
    """`cost`, with the perplexity also split where the stream leaves the `trained` range of positions."""
    row = cost(policy, outcome)
    if isinstance(outcome, KVPassError) or trained is None or outcome.losses.shape[1] <= trained:
        return row
    # Loss i is made at position i, so the first `trained` of them are inside the range.
    inside, outside = outcome.losses[:, :trained], outcome.losses[:, trained:]
    split = {"perplexity_in_range": round(perplexity(inside), 3), "perplexity_beyond": round(perplexity(outside), 3)}
    return {"policy": policy, **split, **row}


def recalled(way: str, outcomes: Mapping[str, Recall | KVPassError]) -> list[Row]:
    """What each policy recalled when it was asked in this way, a column for each distance."""
    return [{"policy": policy, **_recalled(way, outcome)} for policy, outcome in outcomes.items()]


def _recalled(way: str, outcome: Recall | KVPassError) -> Row:
    if isinstance(outcome, KVPassError):
        return {"error": str(outcome)}
    shares = zip(outcome.distances, outcome.ways[way], strict=True)
    return {"asked": way, **{str(distance): round(share, 2) for distance, share in shares}}


def answered(questions: Sequence[Row], outcomes: Mapping[str, list[str] | KVPassError]) -> list[Row]:
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


def text(caption: str, rows: Sequence[Row]) -> str:
    """The table in columns, byte counts in MiB, errors in full below it."""
    shown = [{_heading(name): _cell(name, value) for name, value in row.items() if name != "error"} for row in rows]
    errors = [f"{row['policy']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([caption, *_columns(shown), *errors])


def _heading(name: str) -> str:
    return (name.removesuffix("_bytes") + "_MiB" if name.endswith("_bytes") else name).replace("_", " ")


def _cell(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / MEBIBYTE:.2f}"
    return str(value)


def _columns(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Aligned lines; a row that lacks a column shows a dash."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    widths = {name: max(len(name), *(len(row.get(name, "-")) for row in rows)) for name in names}
    lines = [{name: name for name in names}, {name: "-" * widths[name] for name in names}, *rows]
    return ["  ".join(_aligned(line.get(name, "-"), widths[name], name) for name in names).rstrip() for line in lines]


def _aligned(cell: str, width: int, name: str) -> str:
    return cell.ljust(width) if name == "policy" else cell.rjust(width)
