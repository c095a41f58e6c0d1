"""Medians of contenders that take turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Contender(Protocol):
    """Something that is timed; it may run in another process."""

    name: str

    def seconds(self, count: int) -> list[float]:
        """The time of each of `count` steps in a row."""


@dataclasses.dataclass(frozen=True)
class Local:
    """A contender of this process: `step` is called again and again, by a clock in seconds."""

    name: str
    step: Callable[[], object]
    clock: Callable[[], float] = time.perf_counter

    def seconds(self, count: int) -> list[float]:
        return [timed(self.step, self.clock) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How often contenders are timed.

    Attributes:
        rounds: how many times each has its turn.
        steps: timed in a turn.
        skipped: steps at the beginning of a turn that are not timed, while caches fill again.
    """

    rounds: int = 12
    steps: int = 8
    skipped: int = 2

    @property
    def total(self) -> int:
        """Steps of each contender, those that are not timed included."""
        return self.rounds * (self.steps + self.skipped)

    def fewer(self, share: float) -> Plan:
        """The same with a share of the rounds, at least three."""
        return dataclasses.replace(self, rounds=max(3, round(share * self.rounds)))


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    start = clock()
    action()
    return clock() - start


def interleaved(
    contenders: Sequence[Contender], plan: Plan, tick: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """The seconds of every timed step of every contender, in the order of the contenders.

    Each round begins with another contender, so that none is always behind the same one.
    """
    found: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(plan.rounds):
        start = turn % len(contenders)
        for contender in [*contenders[start:], *contenders[:start]]:
            found[contender.name] += contender.seconds(plan.skipped + plan.steps)[plan.skipped :]
            tick()
    return found


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each, in milliseconds."""
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def spread(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The distance of the quartiles as a share of the median: how much of a difference means nothing."""
    return {name: _spread(values) for name, values in seconds.items()}


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(values, n=4)
    return (upper - lower) / middle
