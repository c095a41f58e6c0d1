"""Read Dynamo's counters of captured and compiled graphs in this process."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters


def forget_compiled_code() -> None:
    """Drop all compiled code; Dynamo allows only a few variants of one function at a time."""
    torch._dynamo.reset()


def captured_graphs() -> int:
    """Return the number of graphs that Dynamo has captured."""
    return int(counters["stats"]["unique_graphs"])


def graph_breaks() -> int:
    """Return the number of graph breaks."""
    return sum(counters["graph_break"].values())


def activity() -> int:
    """Return a number that changes with every compilation, including recompilations that Dynamo does not count."""
    return sum(value for counter in counters.values() for value in counter.values())
