"""Measure steps, prompts, starts and memory of the contenders, by turns.

Every contender keeps its process, and only the one in turn works. A contender that fails is omitted from the rest of
its case; its row has the error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import memory
from benchmarks.environments import Unavailable
from benchmarks.report import Row
from benchmarks.rivals.contenders import Contender
from benchmarks.timing import Plan, interleaved
from benchmarks.worker import Worker

VOCABULARY = (100, 49_000)  # the range of random tokens
ROOM = 256  # tokens that fit after every prompt
WARM = (700, 600)  # untimed first prompts: kvpass compiles the graph of prompts at the second one
TURNS = {1024: 5, 4096: 2}  # turns of prompts by length; longer prompts have one
STEPS, SKIPPED = 8, 2  # steps of a turn: timed, and skipped before while the processor's caches fill

Start = Callable[[Contender, dict[str, str]], Worker]
"""Function that starts a contender with further environment variables."""
Say = Callable[[str], object]


class OutOfTime(Exception):
    """The time limit of the run is exceeded."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the measurements.

    Attributes:
        lengths: lengths of prompts, in tokens.
        rounds: turns of each contender at its steps.
        until: the value of `time.monotonic` after which nothing new begins.
    """

    lengths: Sequence[int]
    rounds: int
    until: float

    def check(self) -> None:
        """Raise `OutOfTime` if the time is over."""
        if time.monotonic() > self.until:
            raise OutOfTime


def tokens(count: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    drawn = random.Random(seed)
    return [drawn.randrange(*VOCABULARY) for _ in range(count)]


def prompts(rows: int, count: int) -> list[list[int]]:
    """Return a prompt for each row."""
    return [tokens(count, seed) for seed in range(rows)]


class Turns:
    """Processes of several contenders with the same settings.

    Attributes:
        workers: workers by the names of contenders that have not failed.
        errors: errors by the names of the others.
    """

    def __init__(self, contenders: Sequence[Contender], start: Start, rows: int, stack: contextlib.ExitStack) -> None:
        self.rows = rows
        self.workers: dict[str, Worker] = {}
        self.errors: dict[str, str] = {}
        for contender in contenders:
            with self._noting(contender.name):
                self.workers[contender.name] = stack.enter_context(start(contender, {}))

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Record an error of a contender, and omit it from then on."""
        try:
            yield
        except Unavailable as error:
            self.errors[name] = str(error)
            self.workers.pop(name, None)

    def warm(self, say: Say) -> None:
        """Make every contender compile its graphs, all at the same time."""
        say("compiling")
        for count in WARM:
            self._ask_all(ids=prompts(self.rows, count), room=ROOM)
            self._ask_all(steps=4)

    def fit(self, length: int, say: Say) -> None:
        """Make every contender prepare for this length, because a StaticCache is compiled for its size."""
        say(f"preparing for {length:,} tokens")
        self._ask_all(ids=prompts(self.rows, 64), room=length - 64 + ROOM)
        self._ask_all(steps=2)

    def _ask_all(self, **question: Any) -> None:
        for worker in self.workers.values():
            worker.send(**question)
        for name in [*self.workers]:
            with self._noting(name):
                self.workers[name].answer()

    def prompts(self, length: int, turns: int, tick: Callable[[], object]) -> dict[str, list[float]]:
        """Return the seconds of prompts, in turns."""
        given = {"ids": prompts(self.rows, length), "room": ROOM}
        return self._turns(Plan(turns, steps=1, skipped=0), tick, lambda count: given)

    def steps(self, rounds: int, tick: Callable[[], object]) -> dict[str, list[float]]:
        """Return the mean seconds of a step in each turn."""
        found = self._turns(Plan(rounds, STEPS, 0), tick, lambda count: {"steps": count, "skipped": SKIPPED})
        return {name: seconds[::STEPS] for name, seconds in found.items()}

    def _turns(self, plan: Plan, tick: Callable[[], object], ask: Callable[[int], Row]) -> dict[str, list[float]]:
        contenders = [_Asked(name, self, ask) for name in self.workers]
        found = interleaved(contenders, plan, tick)
        return {name: seconds for name, seconds in found.items() if name in self.workers}


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A contender of `timing.interleaved` in a worker process."""

    name: str
    turns: Turns
    question: Callable[[int], Row]

    def seconds(self, count: int) -> list[float]:
        with self.turns._noting(self.name):
            if self.name in self.turns.workers:
                return [self.turns.workers[self.name].ask(**self.question(count))["seconds"]] * count
        return [float("nan")] * count


def steps(
    contenders: Sequence[Contender], start: Start, rows: int, limits: Limits, say: Say, tick: Callable[[], object]
) -> Iterator[Row]:
    """Yield the milliseconds of a step and the seconds of a prompt, of each contender at each length.

    Raises:
        OutOfTime: the time was over before a length.
    """
    with contextlib.ExitStack() as stack:
        turns = Turns(contenders, start, rows, stack)
        turns.warm(say)
        for length in limits.lengths:
            limits.check()
            turns.fit(length, say)
            say(f"prompts of {length:,} tokens")
            prompted = turns.prompts(length, TURNS.get(length, 1) if rows == 1 else 1, tick)
            say(f"steps behind {length:,} tokens")
            stepped = turns.steps(limits.rounds, tick)
            for name, seconds in stepped.items():
                about = {"contender": name, "seen": length, "ms": 1e3 * statistics.median(seconds), "steps": seconds}
                yield about | {"s": statistics.median(prompted[name]), "prompts": prompted[name]}
        yield from ({"contender": name, "error": error} for name, error in turns.errors.items())


def starts(contenders: Sequence[Contender], start: Start, prompt: list[int], limits: Limits, say: Say) -> Iterator[Row]:
    """Yield the seconds from the start of a process to its first, second and twentieth token.

    The first process of a contender has an empty folder for compiled code; the second one has the code of the first.

    Raises:
        OutOfTime: the time was over before a contender.
    """
    for contender in contenders:
        limits.check()
        with tempfile.TemporaryDirectory() as compiled:
            for caches in ("cold", "second process"):
                say(f"{contender.name}, {caches}")
                try:
                    found = _first_tokens(contender, start, prompt, {"TORCHINDUCTOR_CACHE_DIR": compiled})
                except Unavailable as error:
                    yield {"contender": contender.name, "error": str(error)}
                    break
                yield {"contender": contender.name, "caches": caches, **found}


def _first_tokens(contender: Contender, start: Start, prompt: list[int], variables: dict[str, str]) -> Row:
    began = time.perf_counter()
    found: Row = {}
    with start(contender, variables) as worker:
        made = worker.ask(ids=[prompt], room=ROOM)["tokens"]
        found["first"] = time.perf_counter() - began
        for name, count in (("second", 1), ("twentieth", 18)):
            made += worker.ask(steps=count)["tokens"][0]
            found[name] = time.perf_counter() - began
    return found | {"tokens": made}


def peaks(contenders: Sequence[Contender], start: Start, limits: Limits, say: Say) -> Iterator[Row]:
    """Yield the peak MiB that a prompt of each length adds to a process that returns freed memory.

    Raises:
        OutOfTime: the time was over before a contender.
    """
    for contender in contenders:
        limits.check()
        say(contender.name)
        with contextlib.ExitStack() as stack:
            turns = Turns([contender], lambda each, more: start(each, memory.RETURNING | more), 1, stack)
            turns.warm(say)
            for length in limits.lengths:
                with turns._noting(contender.name):
                    for worker in turns.workers.values():
                        found: dict[str, Any] = worker.ask(ids=prompts(1, length), room=ROOM)
                        row = {"contender": contender.name, "seen": length, "MiB": found["MiB"]}
                        yield row | {"process": found["resident"]}
            yield from ({"contender": name, "error": error} for name, error in turns.errors.items())
