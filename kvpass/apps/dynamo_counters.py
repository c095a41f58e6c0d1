"""What the compiler has been doing: every use of Dynamo's private counters is in this module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.utils import counters

from kvpass.apps.switch import Switch


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
class CounterMark:
    """The counts at one moment, to subtract from later ones."""

    graphs: int
    graph_breaks: int

    @staticmethod
    def now() -> CounterMark:
        return CounterMark(graphs(), graph_breaks())


class CountedCalls(Switch):
    """A switch that knows in how many graphs a model ran since a backend was chosen, and how often they broke."""

    def __init__(self) -> None:
        super().__init__()
        self._broken: list[int] = []
        self._breaks = graph_breaks()

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        now = graph_breaks()
        self._broken.append(now - self._breaks)
        self._breaks = now
        return super().__call__(gm, examples)

    def mark(self) -> CounterMark:
        """What would be counted if everything had been traced since then."""
        return CounterMark(len(self.ran), sum(self._broken[number] for number in self.ran))
