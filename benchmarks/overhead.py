"""Compare the step of each policy with a step that attends to as many slots without a choice.

`bounded.Untended` is that step; with 8 slots it is the floor, which reads little more than its weights.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm

from benchmarks import apart, bounded
from benchmarks.bounded import LEAST, NOTHING, Case
from benchmarks.model import build
from benchmarks.report import Row, Table, Target, under
from benchmarks.settings import Settings
from benchmarks.step import PROMPT
from benchmarks.timing import Local, Plan, interleaved, medians, spread

TITLE = "A policy's step compared with attention without a policy"
FLOOR, PLAIN = "8 slots, no policy (the floor)", "no policy"

LIMITS = {
    Case("streaming", "absolute"): 1.05,
    Case("sage"): 1.05,
    Case("buzz", "absolute"): 1.05,
    Case("h2o"): 1.10,
    Case("tova"): 1.10,
    Case("cascade", "absolute"): 1.10,
    Case("d2o"): 1.25,
    Case("streaming", "cache"): 1.25,
    Case("buzz", "cache"): 1.25,
    Case("cascade", "cache"): 1.25,
    Case("h2o", "cache"): 1.25,
}
OF_FLOOR = 1.3
QUICK = [case for case in LIMITS if case.policy in ("streaming", "h2o", "d2o")]


def measure(settings: Settings) -> list[Row]:
    """Return the rows of all pairs of dtype and threads, from a process each; the first has every policy."""
    rows: list[Row] = []
    others = [Case(name) for name in bounded.everything() if name not in {case.policy for case in LIMITS}]
    for number, (dtype, threads) in enumerate(settings.combinations()):
        cases = QUICK if settings.quick else [*LIMITS, *([] if number else others)]
        given = dict(cases=[dataclasses.asdict(case) for case in cases], plan=dataclasses.asdict(settings.plan))
        rows += apart.run("benchmarks.overhead:rows", threads=threads, dtype=dtype, count=threads, **given)
    return rows


@torch.inference_mode()
def rows(dtype: str, count: int, cases: list[Row], plan: Row) -> list[Row]:
    """Return the rows of one dtype and number of threads."""
    torch._dynamo.config.recompile_limit = 256  # each contender compiles the same `forward`
    about, model = {"dtype": dtype, "threads": count}, build(dtype)
    chosen = {PLAIN: NOTHING, FLOOR: LEAST} | {case.name: case for case in (Case(**case) for case in cases)}
    with tqdm(total=len(chosen) * (1 + Plan(**plan).rounds), unit="turn", dynamic_ncols=True) as bar:
        contenders, slots = [], {}
        for name, case in chosen.items():
            bar.set_description(f"overhead, {under(about)}: compiling {name}")
            talk = bounded.conversation(model, case, PROMPT)
            contenders.append(Local(name, talk.step))
            slots[name] = round(statistics.mean(layer.layout.capacity for layer in bounded.layers(talk.cache)))
            bar.update()
        bar.set_description(f"overhead, {under(about)}")
        taken = interleaved(contenders, Plan(**plan), bar.update)
    middle, width = medians(taken), spread(taken)
    return [{**about, "case": x, "slots": slots[x], "ms": middle[x], "spread": width[x]} for x in chosen]


def _times(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return rows by dtype and threads, and then by case."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(under(row), {})[row["case"]] = row
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return one table: a line for each policy, columns for each dtype and number of threads."""
    lines: dict[str, Row] = {}
    for title, cases in _times(rows).items():
        for name, row in cases.items():
            line = lines.setdefault(name, {"policy": name, "slots": row["slots"]})
            line[f"{title}: ms"] = row["ms"]
            line[f"{title}: of no policy"] = row["ms"] / cases[PLAIN]["ms"]
            line[f"{title}: of the floor"] = row["ms"] / cases[FLOOR]["ms"]
    return [Table("Step of a policy compared with no policy", [*lines.values()])]


def targets(rows: Sequence[Row]) -> list[Target]:
    return [target for title, cases in _times(rows).items() for target in _targets(title, cases)]


def _targets(title: str, cases: dict[str, Row]) -> Iterator[Target]:
    plain, floor = cases[PLAIN]["ms"], cases[FLOOR]["ms"]
    yield Target("overhead", f"no policy, 1,024 slots, of the floor ({title})", OF_FLOOR, plain / floor)
    for case, limit in LIMITS.items():
        if case.name in cases:
            ms = cases[case.name]["ms"]
            yield Target("overhead", f"{case.name}, of no policy ({title})", limit, ms / plain)
            yield Target("overhead", f"{case.name}, of the floor ({title})", OF_FLOOR, ms / floor)
