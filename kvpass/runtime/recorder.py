"""What a backend writes down of its graphs for a report."""

from __future__ import annotations

import dataclasses

import torch.fx as fx

from kvpass.rewrite import logs
from kvpass.rewrite.record import Record
from kvpass.runtime.timings import Stopwatch


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One attention call, or a cache update that feeds none.

    Attributes:
        graph: number of the graph it is in, from 1.
        module: the module of the model that it belongs to, as far as it is known.
        line: file, line and code of the user's source.
        verdict: "rewritten", "left alone" or "refused".
        reason: why, unless it was rewritten.
    """

    graph: int
    module: str
    line: str
    verdict: str
    reason: str


@dataclasses.dataclass
class Recorder:
    """Collects what a backend finds and does while it compiles; programs only if it is to keep them.

    Attributes:
        watch: counts its seconds.
    """

    graphs: list[str] = dataclasses.field(default_factory=list)
    sites: list[SiteReport] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    passes: list[Record] = dataclasses.field(default_factory=list)
    programs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    keeps_programs: bool = False
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)

    def note_program(self, title: str, graph: fx.Graph) -> None:
        """A graph as it stands now."""
        if self.keeps_programs:
            self.programs.append((title, logs.program(graph)))
