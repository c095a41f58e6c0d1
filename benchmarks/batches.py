"""Time steps of one row and of four, in both dtypes, by turns in one process.

The steps are those of `DecodeLoop`, without the model's Python and Dynamo's guards. Each row has the bytes that the
step reads: the weights once, and the keys and values of every row. Reading the bytes of the floor is timed as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm

from benchmarks import apart, bounded, reading
from benchmarks.bounded import LEAST, NOTHING, Case, Loop
from benchmarks.model import build
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from benchmarks.step import OF_READING, PROMPT
from benchmarks.timing import Contender, Plan, interleaved, medians

TITLE = "Steps in both dtypes, and of several rows"
FLOOR, READING = "the floor", "reading the floor's bytes"
CASES = {FLOOR: LEAST, "no policy": NOTHING, "h2o": Case("h2o"), "d2o": Case("d2o")}
MANY = 4  # rows
OF_FLOAT32, OF_ONE_ROW, OF_NOTHING = 0.65, 1.5, 1.25
QUICK = ("no policy", "h2o")

Key = tuple[str, int, str]
"""A case, its number of rows, and its dtype."""


def measure(settings: Settings) -> list[Row]:
    """Return the rows of each number of threads, from a process each."""
    found: list[Row] = []
    given = dict(names=QUICK if settings.quick else [*CASES], plan=dataclasses.asdict(settings.plan))
    for threads in settings.threads:
        made = apart.run("benchmarks.batches:rows", threads=threads, dtypes=settings.dtypes, **given)
        found += [{"threads": threads, **row} for row in made]
    return found


@torch.inference_mode()
def rows(dtypes: Sequence[str], names: Sequence[str], plan: Row) -> list[Row]:
    """Return milliseconds and bytes of each case; several rows compile first, so that their number is static."""
    torch._dynamo.config.recompile_limit = 256  # each contender compiles the same `forward`
    models = {dtype: build(dtype) for dtype in dtypes}
    kinds = [(name, count, dtype) for count in (MANY, 1) for dtype in dtypes for name in names]
    timed: dict[Key, list[Contender]] = {}
    sizes: dict[Key, int] = {}
    for name, count, dtype in tqdm(kinds, unit="loop", desc="batches: compiling", dynamic_ncols=True):
        kind, model = (name, count, dtype), models[dtype]
        made = Loop.of(model, CASES[name], PROMPT, count)
        timed[kind] = [dataclasses.replace(made, name=str(kind))]
        sizes[kind] = reading.bytes_read(model, made.loop.cache)
        if (name, count) == (FLOOR, 1):
            sizes[READING, 1, dtype] = sizes[kind]
            timed[READING, 1, dtype] = _readers(dtype, sizes[kind])
    found = medians(interleaved([each for ways in timed.values() for each in ways], Plan(**plan)))
    return [
        {"case": kind[0], "rows": kind[1], "dtype": kind[2], "ms": min(found[each.name] for each in ways)}
        | {"bytes": sizes[kind]}
        for kind, ways in timed.items()
    ]


def _readers(dtype: str, count: int) -> list[Contender]:
    """Return contenders that read `count` bytes in several ways; the fastest one counts."""
    return [dataclasses.replace(each, name=f"{dtype}, {each.name}") for each in reading.readers(count)]


def _by_threads(rows: Sequence[Row]) -> dict[int, dict[Key, Row]]:
    """Return the rows of each number of threads, by case, number of rows and dtype."""
    found: dict[int, dict[Key, Row]] = {}
    for row in rows:
        found.setdefault(row["threads"], {})[row["case"], row["rows"], row["dtype"]] = row
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    made = []
    for threads, known in _by_threads(rows).items():
        lines: dict[tuple[str, int], Row] = {}
        for case, count, dtype in sorted(known, key=lambda key: (key[1], key[2] != "float32")):
            line = lines.setdefault((case, count), {"": case, "rows": count})
            line |= _columns(known, (case, count, dtype))
        caption = (
            f"A step of a DecodeLoop, {bounded.BUDGET:,} slots ({bounded.FLOOR} for the floor), {threads} thread(s)"
        )
        made.append(Table(caption, [*lines.values()]))
    return made


def _columns(known: dict[Key, Row], key: Key) -> Row:
    case, count, dtype = key
    row, one = known[key], known[case, 1, dtype]
    columns = {
        f"{dtype}, ms": row["ms"],
        f"{dtype}, of one row": row["ms"] / one["ms"],
        f"{dtype}, MB": row["bytes"] / 1e6,
    }
    wide = known.get((case, count, "float32"))
    return columns | ({f"{dtype}, of float32": row["ms"] / wide["ms"]} if wide and dtype != "float32" else {})


def targets(rows: Sequence[Row]) -> list[Target]:
    return [target for threads, known in _by_threads(rows).items() for target in _targets(threads, known)]


def _targets(threads: int, known: dict[Key, Row]) -> Iterator[Target]:
    def share(name: str, limit: float, of: Key, to: Key) -> Iterator[Target]:
        if of in known and to in known:
            yield Target("batches", f"{name} ({threads} thread(s))", limit, known[of]["ms"] / known[to]["ms"])

    for case in QUICK:
        yield from share(f"{case}: bfloat16, of float32", OF_FLOAT32, (case, 1, "bfloat16"), (case, 1, "float32"))
        yield from share(
            f"{case}: {MANY} rows, of one, float32", OF_ONE_ROW, (case, MANY, "float32"), (case, 1, "float32")
        )
    for dtype, limit in OF_READING.items():
        yield from share(f"{FLOOR}, of reading its bytes once, {dtype}", limit, (FLOOR, 1, dtype), (READING, 1, dtype))
        yield from share(f"d2o, of no policy, {dtype}", OF_NOTHING, ("d2o", 1, dtype), ("no policy", 1, dtype))
