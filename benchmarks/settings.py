"""Define the settings that all parts of the benchmark get."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.timing import Plan


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        quick: small sizes, for a look at everything in a few minutes; targets are compared all the same.
        out: the folder for JSON, tables and plots.
        threads, dtypes: of the steps; each combination is timed.
        kvpress: the folder for the environment of kvpress.
    """

    quick: bool
    out: Path
    threads: tuple[int, ...]
    dtypes: tuple[str, ...]
    kvpress: Path

    @property
    def plan(self) -> Plan:
        """Number of turns and steps."""
        return Plan(rounds=5, steps=6) if self.quick else Plan()

    def combinations(self) -> list[tuple[str, int]]:
        """Return pairs of dtype and threads; parts measure the first pair most widely."""
        return [(dtype, threads) for dtype in self.dtypes for threads in self.threads]
