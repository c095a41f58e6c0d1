"""What the compiler has been doing: every use of Dynamo's private counters is in this module."""

from __future__ import annotations

import dataclasses

import torch
from torch._dynamo.utils import counters


def forget_compiled_code() -> None:
    """Drop all compiled code: Dynamo allows only a few variants of one function at a time."""
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs that Dynamo has captured in this process."""
    return counters["stats"]["unique_graphs"]


def graph_breaks() -> int:
    """Graph breaks in this process."""
    return sum(counters["graph_break"].values())


def activity() -> int:
    """A number that changes whenever anything is compiled, recompilations behind Dynamo's back included."""
    return sum(value for counter in counters.values() for value in counter.values())


@dataclasses.dataclass(frozen=True)
class Mark:
    """The counts at one moment, to subtract from later ones."""

    graphs: int
    graph_breaks: int

    @staticmethod
    def now() -> Mark:
        return Mark(graphs(), graph_breaks())
