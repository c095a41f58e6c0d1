"""Record a backend's passes, graphs and compile times, for `kvpass.explain` and for logs.

    KVPASS_LOGS=passes python ...           a line for every pass over every step graph: its rewrites and its time
    KVPASS_LOGS=passes,graphs python ...    and the program after it
    TORCH_TRACE=/tmp/trace python ...       the same programs as artifacts, for tlparse

The loggers are `kvpass.passes` and `kvpass.graphs`; a program may set their levels itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator

import torch.fx as fx

from kvpass.errors import PolicyError
from kvpass.rewrite.context import PassRecord
from kvpass.torch_private import dynamo, inductor


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of one call that was compiled, from its beginning to its end.

    Attributes:
        total: the whole call.
        kvpass: reading and rewriting graphs.
        validation: comparing rewritten graphs with the model's own.
        compiler: the inner compiler: AOTAutograd and Inductor, or another `Backend.inner`.
        inductor: the part of `compiler` in Inductor, including the wait for the C++ compiler; 0 for cache hits.
        cpp: the C++ compiler, which runs in parallel processes.
    """

    total: float
    kvpass: float
    validation: float
    compiler: float
    inductor: float
    cpp: float

    @property
    def tracing(self) -> float:
        """Remaining seconds: Dynamo, and running the call."""
        return self.total - self.kvpass - self.validation - self.compiler

    def __str__(self) -> str:
        parts = {
            "Dynamo and the call": self.tracing,
            "kvpass": self.kvpass,
            "validation": self.validation,
            "AOTAutograd": self.compiler - self.inductor,
            "Inductor": self.inductor,
        }
        shares = ", ".join(f"{name} {seconds:.2f} s ({seconds / self.total:.0%})" for name, seconds in parts.items())
        return f"{self.total:.2f} s: {shares}; the C++ compiler took {self.cpp:.2f} s, in other processes"


class Stopwatch:
    """Sums of seconds by name; a nested section does not count for the section around it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    @contextlib.contextmanager
    def time_section(self, name: str) -> Iterator[None]:
        """Return a context whose running time is added to a name."""
        began = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.add(name, spent - self._inside.pop())
            if self._inside:
                self._inside[-1] += spent

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def time_call(self, found: list[Timings]) -> Iterator[None]:
        """Return a context that appends its timings to `found`; the code inside uses this watch."""
        began, before = time.perf_counter(), inductor.inductor_seconds()
        self.seconds.clear()
        try:
            yield
        finally:
            total, after = time.perf_counter() - began, inductor.inductor_seconds()
            kvpass, validation, compiler = (
                self.seconds.get(name, 0.0) for name in ("kvpass", "validation", "compiler")
            )
            found.append(Timings(total, kvpass, validation, compiler, after[0] - before[0], after[1] - before[1]))


@dataclasses.dataclass(frozen=True)
class AttentionReport:
    """One attention call, or a cache update that feeds no attention call.

    Attributes:
        graph: number of the graph that contains the call, from 1.
        module: the path of the module that makes the call, if it is known.
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
        stopwatch: counts the backend's seconds.
    """

    graphs: list[str] = dataclasses.field(default_factory=list)
    sites: list[AttentionReport] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    passes: list[PassRecord] = dataclasses.field(default_factory=list)
    programs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    keeps_programs: bool = False
    stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)

    def keep_graph_code(self, title: str, graph: fx.Graph) -> None:
        """Keep a graph in its present state, as text, if `keeps_programs` is set."""
        if self.keeps_programs:
            self.programs.append((title, program(graph)))


LOGS = ("passes", "graphs", "regions", "layer_dedup", "attention", "warm", "dynamo")
"""Names of loggers; the loggers after the first two report what runs or compiles slowly, and why."""
PASSES = logging.getLogger("kvpass.passes")
GRAPHS = logging.getLogger("kvpass.graphs")


def configure_logs() -> None:
    """Let the loggers named in KVPASS_LOGS write to stderr.

    Raises:
        PolicyError: KVPASS_LOGS contains an unknown name.
    """
    named = [name.strip() for name in os.environ.get("KVPASS_LOGS", "").split(",") if name.strip()]
    for name in named:
        if name not in LOGS:
            raise PolicyError(f"KVPASS_LOGS={name!r}: must be one of {', '.join(LOGS)}")
        logger = logging.getLogger(f"kvpass.{name}")
        logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())


def log_graph(title: str, graph: fx.Graph, recorder: Recorder | None) -> None:
    """Record a graph in its present state for logs, and for reports if there is a recorder."""
    if GRAPHS.isEnabledFor(logging.INFO):
        GRAPHS.info("# %s\n%s", title, program(graph))
    dynamo.note_artifact(f"kvpass {title}".replace(" ", "_"), lambda: program(graph))
    if recorder is not None:
        recorder.keep_graph_code(title, graph)


def program(graph: fx.Graph) -> str:
    """Return a graph as Python code, a line for every node."""
    return graph.python_code("self").src.strip()
