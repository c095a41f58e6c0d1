"""Count compilations and time calls for new lengths, batch sizes, prompts under a share, and doubling slots.

Each kind runs in a separate process with cold caches: ten values in turn, then the same ten again.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

import kvpass
from benchmarks import apart
from benchmarks.model import build, tokens
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from benchmarks.timing import timed
from kvpass import model_access
from kvpass.backend import Backend

TITLE = "New lengths, batches and budgets"
LENGTHS = (9, 23, 5, 41, 14, 33, 7, 56, 18, 28)
BATCHES = (1, 4, 2, 6, 3, 8, 5, 10, 7, 9)
PROMPTS = (640, 800, 512, 960, 704, 576, 864, 736, 608, 928)
GROWING = 3  # number of times that the slots of policy full double
PROMPT, BUDGET, SHARE = 64, 256, 0.25
MOST, OF_KNOWN = 2, 2.0


@dataclasses.dataclass(frozen=True)
class Counting(Backend):
    """A backend that counts the step graphs that it compiles."""

    compiled: list[int] = dataclasses.field(default_factory=list, compare=False)

    def compile_step(self, gm: Any, *how: Any) -> Callable[..., Any]:
        self.compiled.append(len(gm.graph.nodes))
        return super().compile_step(gm, *how)


def counting(policy: str, budget: float | None) -> Counting:
    """Return a backend that counts."""
    made = kvpass.backend(policy, budget=budget)
    return Counting(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})


def measure(settings: Settings) -> list[Row]:
    """Return the rows of each kind."""
    layers = 2 if settings.quick else 8
    rows: list[Row] = []
    for kind in tqdm(KINDS, unit="kind", desc="sizes", dynamic_ncols=True):
        with tempfile.TemporaryDirectory() as folder:
            environment = {"TORCHINDUCTOR_CACHE_DIR": folder}
            rows += apart.run("benchmarks.sizes:values", environment=environment, kind=kind, layers=layers)
    return rows


@torch.inference_mode()
def values(kind: str, layers: int) -> list[Row]:
    """Return seconds and compiled step graphs of each value, first new and then known."""
    policy, budget, calls = KINDS[kind]
    backend, rows = counting(policy, budget), []
    talk = _Talk(torch.compile(build(layers=layers), backend=backend))
    for known in (False, True):
        for value, call in calls(talk):
            before = len(backend.compiled)
            seconds = timed(call)
            made = len(backend.compiled) - before
            rows.append({"kind": kind, "value": value, "known": known, "seconds": seconds, "compiled": made})
    return rows


class _Talk:
    """Conversations with timed calls, as pairs of a value and a call."""

    def __init__(self, model: Any) -> None:
        self.model, self.past = model, None

    def _call(self, rows: int, count: int, begins: bool = False) -> None:
        past = None if begins else self.past
        out = model_access.call_model(self.model, tokens(count).expand(rows, -1).contiguous(), past)
        self.past = model_access.cache_of_output(out)

    def turns(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Yield turns of one conversation; each has a step after it, of which only the first is timed."""
        self._call(1, PROMPT, begins=True)
        self._call(1, 1)
        for count in LENGTHS:
            yield count, lambda count=count: self._call(1, count)  # type: ignore[misc]
            self._call(1, 1)

    def batches(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Yield the first step of each batch size; prompts are not timed."""
        for rows in BATCHES:
            self._call(rows, PROMPT, begins=True)
            yield rows, lambda rows=rows: self._call(rows, 1)  # type: ignore[misc]

    def prompts(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Yield the first step after prompts under a share."""
        for count in PROMPTS:
            self._call(1, count, begins=True)
            yield count, lambda: self._call(1, 1)

    def doublings(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Yield a step, and then the steps at which the slots double."""
        self._call(1, PROMPT, begins=True)
        yield 0, lambda: self._call(1, 1)
        for times in range(1, GROWING + 1):
            room = kvpass.inspect(self.past).layers[0].capacity - kvpass.inspect(self.past).seen
            self._call(1, room)
            yield times, lambda: self._call(1, 1)


KINDS: dict[str, tuple[str, float | None, Callable[[_Talk], Iterator[tuple[int, Callable[[], None]]]]]] = {
    "lengths": ("h2o", BUDGET, _Talk.turns),
    "batches": ("h2o", BUDGET, _Talk.batches),
    "shares": ("h2o", SHARE, _Talk.prompts),
    "growing": ("full", None, _Talk.doublings),
}
"""The policy, the budget and the timed calls of each kind."""


def _by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}


def _line(kind: str, rows: Sequence[Row]) -> dict[str, Any]:
    new, known = ([row for row in rows if row["known"] == is_known] for is_known in (False, True))
    settled = [row["seconds"] for row in new if not row["compiled"]]
    usual = statistics.median(row["seconds"] for row in known)
    return {
        "what": kind,
        "values": len(new),
        "compilations": sum(row["compiled"] for row in rows),
        "seconds with one": statistics.median(row["seconds"] for row in new if row["compiled"]),
        "a new value without, ms": 1000 * statistics.median(settled) if settled else None,
        "a known value, ms": 1000 * usual,
        "new, of known": statistics.median(settled) / usual if settled else None,
    }


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = [_line(kind, found) for kind, found in _by_kind(rows).items() if found]
    return [
        Table("Step graphs that are compiled for values that come one after the other, and what a call takes", lines)
    ]


def targets(rows: Sequence[Row]) -> list[Target]:
    return [target for line in tables(rows)[0].rows for target in _targets(line)]


def _targets(line: Row) -> Iterator[Target]:
    yield Target("sizes", f"{line['what']}: compilations of {line['values']} values", MOST, line["compilations"])
    if line["new, of known"] is not None:
        yield Target("sizes", f"{line['what']}: a new value, of a known one", OF_KNOWN, line["new, of known"])
