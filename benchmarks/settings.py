"""How much is measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.timing import Plan


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the parts of the benchmark need to know.

    Attributes:
        quick: small sizes, for a look at everything in a few minutes; the targets are held against them all the same.
        out: the folder for JSON, tables and plots.
        threads, dtypes: steps are timed under each combination.
        kvpress: the folder of kvpress's environment.
    """

    quick: bool
    out: Path
    threads: tuple[int, ...]
    dtypes: tuple[str, ...]
    kvpress: Path

    @property
    def plan(self) -> Plan:
        """How often steps are timed."""
        return Plan(rounds=5, steps=6) if self.quick else Plan()

    def combinations(self) -> list[tuple[str, int]]:
        """Dtype and threads, the first of which is measured most widely."""
        return [(dtype, threads) for dtype in self.dtypes for threads in self.threads]
