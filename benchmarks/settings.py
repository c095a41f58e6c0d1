"""Define the settings of all parts of the benchmark."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.timing import Plan


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        quick: whether to use small sizes, for a run of a few minutes; targets are compared nevertheless.
        out: the folder for JSON, tables and plots.
        threads, dtypes: values for timed steps; each combination is timed.
        kvpress: the folder for the environment of kvpress.
    """

    quick: bool
    out: Path
    threads: tuple[int, ...]
    dtypes: tuple[str, ...]
    kvpress: Path

    @property
    def plan(self) -> Plan:
        """Return the number of turns and steps."""
        return Plan(rounds=5, steps=6) if self.quick else Plan()

    def combinations(self) -> list[tuple[str, int]]:
        """Return pairs of dtype and threads; parts measure the first pair most widely."""
        return [(dtype, threads) for dtype in self.dtypes for threads in self.threads]
