"""Measure memory and time over a stream of 100,000 decoded tokens in one conversation.

A conversation with 8 slots is timed at the same points, to distinguish a slower machine from a slower step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import apart, bounded, memory
from benchmarks.bounded import BUDGET, LEAST, Case
from benchmarks.model import Conversation, build
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from benchmarks.step import PROMPT
from benchmarks.timing import Local
from kvpass.torch_private import dynamo

TITLE = "A stream of 100,000 tokens"
POLICY = "h2o"
TOKENS, EVERY, FLOOR_STEPS = 100_000, 1000, 16
FLAT, SAME = 0.01, 1.05


def measure(settings: Settings) -> list[Row]:
    """Return a row for every thousand tokens."""
    sizes = dict(tokens=4000, layers=2, every=100) if settings.quick else dict(tokens=TOKENS, layers=8, every=EVERY)
    rows: list[Row] = apart.run("benchmarks.stream:rows", environment=memory.RETURNING, policy=POLICY, **sizes)
    return rows


@torch.inference_mode()
def rows(policy: str, tokens: int, layers: int, every: int) -> list[Row]:
    """Return resident memory, compilations and the median step, every `every` tokens."""
    model = build(layers=layers)
    policy_run, least_run = (bounded.conversation(model, case, PROMPT) for case in (Case(policy), LEAST))
    with tqdm(total=tokens - PROMPT, unit="token", desc=f"stream, {policy}", dynamic_ncols=True) as bar:
        return list(_rows(policy_run, least_run, tokens, every, bar))


def _rows(policy_run: Conversation, least_run: Conversation, tokens: int, every: int, bar: tqdm[Any]) -> Iterator[Row]:
    ours, floor = Local("ours", policy_run.step), Local("floor", least_run.step)
    compiled = dynamo.compilation_count()
    for seen in range(PROMPT + every, tokens + 1, every):
        step = statistics.median(ours.seconds(every))
        bar.update(every)
        yield {
            "tokens": seen,
            "ms": 1e3 * step,
            "floor": 1e3 * statistics.median(floor.seconds(FLOOR_STEPS)),
            "MiB": memory.resident() / memory.MEBIBYTE,
            "compiled": dynamo.compilation_count() - compiled,
        }


def _parts(rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return the second twentieth of the rows, which is after the warm-up, and the last twentieth."""
    count = max(1, len(rows) // 20)
    return rows[count : 2 * count], rows[-count:]


def _ratio(rows: Sequence[Row], value: str, divisor: str | None = None) -> float:
    """Return the end of the stream as a share of its start."""
    middle = [statistics.median(row[value] / (row[divisor] if divisor else 1) for row in part) for part in _parts(rows)]
    return middle[1] / middle[0]


def _growth(rows: Sequence[Row]) -> float:
    """Return the largest growth of resident memory after the warm-up, as a share."""
    after = rows[max(1, len(rows) // 20) :]
    return max(row["MiB"] for row in after) / after[0]["MiB"] - 1


def tables(rows: Sequence[Row]) -> list[Table]:
    chosen = [rows[i] for i in sorted({round(share * (len(rows) - 1)) for share in (0, 0.1, 0.25, 0.5, 0.75, 1)})]
    names = {"ms": "ms a step", "floor": "ms of the floor", "MiB": "resident, MiB", "compiled": "compiled since"}
    lines = [{"tokens": row["tokens"], **{shown: row[name] for name, shown in names.items()}} for row in chosen]
    return [Table(f"{POLICY}, budget {BUDGET:,}, float32, 1 thread: a stream of {rows[-1]['tokens']:,} tokens", lines)]


def targets(rows: Sequence[Row]) -> list[Target]:
    return [
        Target("stream", "growth of resident memory after the warm-up, a share", FLAT, _growth(rows)),
        Target("stream", "compilations after the warm-up", 0, rows[-1]["compiled"]),
        Target("stream", "step at the end, of the start", SAME, _ratio(rows, "ms")),
        Target("stream", "step at the end, of the start, both divided by the floor", SAME, _ratio(rows, "ms", "floor")),
    ]
