"""Time contenders by turns, so that other work on the machine affects all of them equally."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Contender(Protocol):
    """A timed contender, which may run in another process."""

    name: str

    def seconds(self, count: int) -> list[float]:
        """Return the seconds of each of `count` consecutive steps."""


@dataclasses.dataclass(frozen=True)
class Local:
    """A contender in this process: repeated calls of `step`, timed by a clock in seconds."""

    name: str
    step: Callable[[], object]
    clock: Callable[[], float] = time.perf_counter

    def seconds(self, count: int) -> list[float]:
        return [timed(self.step, self.clock) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The number of turns and steps.

    Attributes:
        rounds: turns of each contender.
        steps: timed steps of a turn.
        skipped: steps before them that are not timed, while the processor's caches fill.
    """

    rounds: int = 12
    steps: int = 8
    skipped: int = 2

    @property
    def total(self) -> int:
        """Return the number of steps of each contender, including skipped ones."""
        return self.rounds * (self.steps + self.skipped)

    def fewer(self, share: float) -> Plan:
        """Return a plan with a share of the rounds, at least three."""
        return dataclasses.replace(self, rounds=max(3, round(share * self.rounds)))


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call."""
    start = clock()
    action()
    return clock() - start


def interleaved(
    contenders: Sequence[Contender], plan: Plan, tick: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds of every timed step, by contender.

    Each round begins with a different contender, so that none always follows the same one.
    """
    found: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(plan.rounds):
        start = turn % len(contenders)
        for contender in [*contenders[start:], *contenders[:start]]:
            found[contender.name] += contender.seconds(plan.skipped + plan.steps)[plan.skipped :]
            tick()
    return found


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the medians in milliseconds."""
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def spread(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the interquartile ranges as shares of the medians: smaller differences mean nothing."""
    return {name: _spread(values) for name, values in seconds.items()}


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(values, n=4)
    return (upper - lower) / middle
