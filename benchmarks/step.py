"""Time steps by tokens seen, compared with full caches, StreamingLLM by concatenation, and kvpress.

Contenders take turns in one process; kvpress has a separate one. Caches of transformers are filled with random keys
and values. A conversation of kvpass is moved to its position in the text (`bounded.move_on`). A step with 8 slots is
compared with reading its bytes once (`benchmarks.reading`), the lower bound of any step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import apart, bounded, peers, reading
from benchmarks.bounded import BUDGET, LEAST, Case
from benchmarks.environments import Unavailable
from benchmarks.model import Conversation, build
from benchmarks.report import Row, Table, Target, under
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Local, Plan, interleaved, medians, spread

TITLE = "Step time against tokens seen"
UNCOMPILED, STATIC, CONCATENATION = "uncompiled, DynamicCache", "torch.compile, StaticCache", "StreamingLLM, cat"
FLOOR, LOOP_FLOOR = "kvpass, 8 slots (the floor)", "DecodeLoop, 8 slots"
OURS, THEIRS = "kvpass, ", "kvpress, "
PRESSES = ("knorm", "streaming", "tova")
PROMPT = BUDGET + 76  # every policy has evicted after such a prompt
LOOPED = "h2o"  # the policy of the timed DecodeLoop
LENGTHS, LONG = (1024, 4096, 16384, 65536), 16384
QUICK: dict[str, Any] = dict(lengths=(1024, LONG), policies=("streaming", "h2o", "d2o"))
NAMED = ("streaming", "sage", "buzz", "h2o", "tova", "cascade", "d2o")  # policies with targets

OF_READING = {"float32": 1.15, "bfloat16": 1.3}  # a step with 8 slots, relative to reading its bytes once
GOALS = ((UNCOMPILED, LONG, 7.0), (STATIC, LONG, 10.0), (UNCOMPILED, 4 * LONG, 25.0), (THEIRS, LONG, 1.7))


def measure(settings: Settings) -> list[Row]:
    """Return the rows of all pairs of dtype and threads, from a process each; the first has every policy."""
    rows: list[Row] = []
    for number, (dtype, threads) in enumerate(settings.combinations()):
        sizes = dict(lengths=LENGTHS, policies=NAMED if number else bounded.everything())
        given = dict(dtype=dtype, count=threads, kvpress=str(settings.kvpress), plan=dataclasses.asdict(settings.plan))
        rows += apart.run("benchmarks.step:rows", threads=threads, **given, **(QUICK if settings.quick else sizes))
    return rows


@torch.inference_mode()
def rows(
    dtype: str, count: int, kvpress: str, plan: dict[str, int], lengths: Sequence[int], policies: Sequence[str]
) -> list[Row]:
    """Return the rows of one dtype and number of threads."""
    torch._dynamo.config.recompile_limit = 256  # each contender compiles the same `forward`
    with contextlib.ExitStack() as stack:
        bench = _Bench(dtype, count, Plan(**plan))
        stack.callback(bench.bar.close)
        presses = bench.presses(stack, Path(kvpress))
        talks = {FLOOR: bench.made(LEAST)} | {f"{OURS}{name}": bench.made(Case(name)) for name in policies}
        loops = bench.loops()
        found = [row for seen in lengths for row in bench.at(seen, talks, [*loops, *presses(seen)])]
    return found + bench.refusals


class _Bench:
    """The model of one process, and the labels of its rows."""

    def __init__(self, dtype: str, threads: int, plan: Plan) -> None:
        self.model, self.plan = build(dtype), plan
        self.about: Row = {"dtype": dtype, "threads": threads}
        self.refusals: list[Row] = []
        self.bar = tqdm(unit="turn", desc=f"step, {under(self.about)}", dynamic_ncols=True)

    def presses(self, stack: contextlib.ExitStack, folder: Path) -> Callable[[int], list[Contender]]:
        """Return a function from tokens seen to the contenders of kvpress, without any if it is unavailable."""
        self.bar.set_postfix_str("making the environment of kvpress")
        try:
            python = peers.environment(folder)
            worker = stack.enter_context(peers.worker(python, **self.about, budget=BUDGET))
        except Unavailable as error:
            self.refusals.append({**self.about, "contender": "kvpress", "error": str(error)})
            return lambda seen: []
        return lambda seen: [peers.Remote(f"{THEIRS}{press}", worker, press, seen) for press in PRESSES]

    def made(self, case: Case) -> Conversation:
        self.bar.set_postfix_str(f"compiling {case.name}")
        return bounded.conversation(self.model, case, PROMPT)

    def loops(self) -> list[Contender]:
        self.bar.set_postfix_str("compiling DecodeLoops")
        floor = dataclasses.replace(bounded.Loop.of(self.model, LEAST, PROMPT), name=LOOP_FLOOR)
        return [bounded.Loop.of(self.model, Case(LOOPED), PROMPT), floor]

    def at(self, seen: int, talks: Mapping[str, Conversation], others: Sequence[Contender]) -> Iterator[Row]:
        """Yield the rows at a number of tokens seen."""
        plan = self.plan if seen <= LONG else self.plan.fewer(0.4)
        self.bar.set_postfix_str(f"compiling a cache of {seen:,} tokens")
        full = {
            UNCOMPILED: peers.uncompiled(self.model, seen),
            STATIC: peers.stock(self.model, seen, room=2 + plan.total),
            CONCATENATION: peers.concatenating(self.model, BUDGET),
        }
        for talk in talks.values():
            bounded.move_on(talk, seen)
        self.bar.set_postfix_str(f"{seen:,} tokens seen")
        timed = [Local(name, talk.step) for name, talk in {**full, **talks}.items()]
        count = reading.bytes_read(self.model, talks[FLOOR].cache)
        taken = interleaved([*timed, *others, *reading.readers(count)], plan, self.bar.update)
        middle, width = medians(taken), spread(taken)
        for name, milliseconds in middle.items():
            row = {**self.about, "seen": seen, "contender": name, "ms": milliseconds, "spread": width[name]}
            yield row | {"bytes": count} if name in reading.NAMES else row


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each dtype and number of threads: a line per contender, a column per tokens seen."""
    made: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines = made.setdefault(under(row), {})
        line = lines.setdefault(row["contender"], {"milliseconds a step": row["contender"]})
        line[f"{row['seen']:,}" if "ms" in row else "refused"] = row.get("ms", row.get("error"))
    steps = [
        Table(f"Step, budget {BUDGET:,}, {title}, by tokens seen", [*lines.values()]) for title, lines in made.items()
    ]
    floors = [{"floor": title, **floor.line} for title, floor in _floors(rows).items()]
    return [*steps, *([Table("A step with 8 slots compared with reading its bytes once", floors)] if floors else [])]


@dataclasses.dataclass(frozen=True)
class Floor:
    """Milliseconds of steps with 8 slots, and of reading as many bytes."""

    bytes: int
    reading: float
    steps: dict[str, float]

    @property
    def line(self) -> Row:
        """Return the line of the table."""
        speed = {"MB": self.bytes / 1e6, "read at, GB/s": self.bytes / self.reading / 1e6, "in, ms": self.reading}
        return speed | {f"{name}, of that": share for name, share in self.of_reading.items()}

    @property
    def of_reading(self) -> dict[str, float]:
        return {name: ms / self.reading for name, ms in self.steps.items()}


def _floors(rows: Sequence[Row]) -> dict[str, Floor]:
    """Return the floors by dtype and threads, from the rows at the fewest tokens seen."""
    found: dict[str, Floor] = {}
    for title, cases in _at_fewest(rows).items():
        read = [cases[name] for name in reading.NAMES if name in cases]
        steps = {name: cases[name]["ms"] for name in (FLOOR, LOOP_FLOOR) if name in cases}
        if read and steps:
            found[title] = Floor(read[0]["bytes"], min(row["ms"] for row in read), steps)
    return found


def _at_fewest(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return the row of each contender at the fewest tokens seen, by dtype and threads."""
    found: dict[str, dict[str, Row]] = {}
    timed = [row for row in rows if "ms" in row]
    for row in sorted(timed, key=lambda row: row["seen"], reverse=True):
        found.setdefault(under(row), {})[row["contender"]] = row
    return found


Times = dict[tuple[str, int], float]


def targets(rows: Sequence[Row]) -> list[Target]:
    """Compare the median and the slowest policy with the alternatives, and the floor with reading."""
    found: dict[str, Times] = {}
    for row in rows:
        if "ms" in row:
            found.setdefault(under(row), {})[row["contender"], row["seen"]] = row["ms"]
    against = [target for title, times in found.items() for goal in GOALS for target in _against(title, times, *goal)]
    return [*against, *_of_reading(rows)]


def _of_reading(rows: Sequence[Row]) -> Iterator[Target]:
    for title, floor in _floors(rows).items():
        limit = next(limit for dtype, limit in OF_READING.items() if title.startswith(dtype))
        for name, share in floor.of_reading.items():
            yield Target("step", f"{name}, of reading its bytes once ({title})", limit, share)


def _against(title: str, times: Times, other: str, seen: int, limit: float) -> Iterator[Target]:
    theirs = _fastest(times, other, seen)
    mine = {name: ms for (name, at), ms in times.items() if at == seen and name.startswith(OURS) and name != FLOOR}
    if theirs is None or not mine:
        yield Target("step", f"times faster than {other} at {seen:,} ({title})", limit, None, at_least=True)
        return
    slowest = max(mine, key=mine.__getitem__)
    for which, ms in (("middle policy", statistics.median(mine.values())), (slowest, mine[slowest])):
        what = f"{which.removeprefix(OURS)}: times faster than {theirs} at {seen:,} ({title})"
        yield Target("step", what, limit, times[theirs, seen] / ms, at_least=True)


def _fastest(times: Times, name: str, seen: int) -> str | None:
    """Return the fastest contender whose name starts with `name`."""
    known = {other: ms for (other, at), ms in times.items() if at == seen and other.startswith(name)}
    return min(known, key=known.__getitem__, default=None)
