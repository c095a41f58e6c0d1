"""Judge random models: each is held or refused, never wrong, and raises only exceptions of kvpass."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.adversary.generator import Program, program
from tests.adversary.oracle import Invalid, Verdict, judge
from tests.quick import trace_quickly

MIN_HELD = 0.3
"""The minimum share of examples that are held; a judge that refuses all of them would test nothing."""


@dataclasses.dataclass
class Tally:
    """Counts of verdicts, and the programs with a verdict that is a failure."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[tuple[Program, Verdict]] = dataclasses.field(default_factory=list)
    known: set[str] = dataclasses.field(default_factory=set)

    @property
    def judged(self) -> int:
        return sum(self.counts.values()) - self.counts["invalid"]

    def judge(self, made: Program) -> None:
        """Judge a program unless it was judged before."""
        if str(made) in self.known:
            return
        self.known.add(str(made))
        try:
            verdict = judge(made.case(), made.policy[0], **made.settings)
        except Invalid:
            self.counts["invalid"] += 1
            return
        self.counts[verdict.kind] += 1
        if verdict.kind not in ("held", "refused"):
            self.failures.append((made, verdict))

    def check(self) -> None:
        """Check that nothing is wrong and enough is held; show the shortest programs that failed."""
        shortest = sorted(self.failures, key=lambda failure: len(failure[0].source))[:5]
        shown = "\n\n".join(f"{verdict}\n{made}" for made, verdict in shortest)
        assert not self.failures, f"{len(self.failures)} of {self.judged} {dict(self.counts)}, the shortest:\n\n{shown}"
        assert self.counts["held"] >= MIN_HELD * self.judged, f"too little was held: {dict(self.counts)}"


def run(examples: int, start: int = 0) -> Tally:
    """Judge a number of examples, always the same for the same `start`."""
    tally, number = Tally(), 0
    while tally.judged < examples:
        tally.judge(program(f"{start}/{number}"))
        number += 1
    return tally


def test_generated_models() -> None:
    run(12).check()


def sources(count: int) -> list[str]:
    return [str(program(f"0/{number}")) for number in range(count)]


@pytest.mark.slow
def test_programs_do_not_depend_on_the_process() -> None:
    with alone() as pool:
        assert pool.submit(sources, 200).result() == sources(200)


def alone() -> ProcessPoolExecutor:
    """Return a fresh process, without earlier imports and compiled models."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def checked(examples: int, start: int) -> None:
    trace_quickly()
    run(examples, start).check()


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("start", range(1, 9))
def test_many_generated_models(start: int) -> None:
    with alone() as pool:
        pool.submit(checked, 250, start).result()
