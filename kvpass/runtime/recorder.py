"""Records of a backend's graphs for the reports of `kvpass.explain`."""

from __future__ import annotations

import dataclasses

import torch.fx as fx

from kvpass.rewrite import logs
from kvpass.rewrite.record import Record
from kvpass.runtime.timings import Stopwatch


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One attention call, or a cache update that feeds no attention call.

    Attributes:
        graph: number of the graph that contains the call, from 1.
        module: the path of the module that makes the call, as far as it is known.
        line: file, line and code of the user's source.
        verdict: "rewritten", "left alone" or "refused".
        reason: the reason of the verdict; "" for "rewritten".
    """

    graph: int
    module: str
    line: str
    verdict: str
    reason: str


@dataclasses.dataclass
class Recorder:
    """Collected facts about the graphs that a backend compiles.

    Attributes:
        graphs: the kind of each graph: "prompt", "step" or "no cache".
        sites: the attention calls, and cache updates that feed none.
        notes: further facts.
        passes: the records of the passes over step graphs.
        programs: a title and a program for each stage of each graph; empty unless `keeps_programs`.
        watch: counts the backend's seconds.
    """

    graphs: list[str] = dataclasses.field(default_factory=list)
    sites: list[SiteReport] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    passes: list[Record] = dataclasses.field(default_factory=list)
    programs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    keeps_programs: bool = False
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)

    def note_program(self, title: str, graph: fx.Graph) -> None:
        """Keep a graph in its present state, as text, if `keeps_programs` is set."""
        if self.keeps_programs:
            self.programs.append((title, logs.program(graph)))
