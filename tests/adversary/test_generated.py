"""Models at random: held or refused, never wrong, never an error of others."""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, seed, settings

from tests.adversary.generator import Program, programs
from tests.adversary.oracle import Invalid, Verdict, judge

LEAST_HELD = 0.3
"""The share of examples that must be held; a judge to whom all is refused has no teeth."""


@dataclasses.dataclass
class Tally:
    """Verdicts, and the programs that got one that may not be."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[tuple[Program, Verdict]] = dataclasses.field(default_factory=list)
    known: set[str] = dataclasses.field(default_factory=set)

    def judge(self, program: Program) -> None:
        """Judge a program that was not judged before."""
        assume(str(program) not in self.known)
        self.known.add(str(program))
        try:
            verdict = judge(program.case(), program.policy[0], **program.settings)
        except Invalid:
            self.counts["invalid"] += 1
            assume(False)
        event(verdict.kind)
        self.counts[verdict.kind] += 1
        if verdict.kind not in ("held", "refused"):
            self.failures.append((program, verdict))

    def check(self, examples: int) -> None:
        """Nothing wrong, and enough that was held; shows the shortest programs that failed."""
        judged = sum(self.counts.values()) - self.counts["invalid"]
        shortest = sorted(self.failures, key=lambda failure: len(failure[0].source))[:5]
        shown = "\n\n".join(f"{verdict}\n{program}" for program, verdict in shortest)
        assert not self.failures, f"{len(self.failures)} of {judged} {dict(self.counts)}, the shortest:\n\n{shown}"
        assert judged >= examples, f"{judged} examples were judged, and {examples} were to be: {dict(self.counts)}"
        assert self.counts["held"] >= LEAST_HELD * judged, f"too little was held: {dict(self.counts)}"


def run(examples: int, start: int = 0) -> Tally:
    """Judge so many examples, the same ones every time for the same `start`."""
    tally = Tally()

    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def each(program: Program) -> None:
        tally.judge(program)

    each()
    return tally


def test_generated_models() -> None:
    run(30).check(30)


def checked(examples: int, start: int) -> None:
    torch.set_num_threads(1)
    run(examples, start).check(examples)


@pytest.mark.slow
@pytest.mark.parametrize("start", [1, 2, 3])
def test_many_generated_models(start: int) -> None:
    """In a process of its own, where no model was compiled before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(checked, 250, start).result()
