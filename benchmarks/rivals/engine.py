"""Define the interface of an engine, and run one in a separate process.

The module needs only the standard library, because it runs in the environments of the rivals.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import json
import sys
import time
from typing import Any

from benchmarks import memory, worker


@dataclasses.dataclass(frozen=True)
class Setup:
    """Settings of an engine.

    Attributes:
        weights: the file or folder with the model.
        precision: "bfloat16", "int8" for int8 weights and bfloat16 activations, or "float32" for engines of torch.
        threads: number of threads that the engine may use.
        budget: the number of tokens that the cache keeps; None for all.
        policy: the eviction policy, for engines that have several.
    """

    weights: str
    precision: str
    threads: int
    budget: int | None = None
    policy: str | None = None


class Engine(abc.ABC):
    """An engine with a loaded model; decoding is greedy, and no token ends it."""

    @abc.abstractmethod
    def __init__(self, setup: Setup) -> None: ...

    @abc.abstractmethod
    def prompt(self, ids: list[list[int]], room: int) -> list[int]:
        """Begin new conversations and return the first token of each.

        Args:
            ids: token lists of the prompts, one for each row, all of one length.
            room: the largest number of tokens that will be decoded after the prompts.
        """

    @abc.abstractmethod
    def steps(self, count: int) -> list[list[int]]:
        """Decode `count` further tokens of every row; return one list for each row."""


class Timed:
    """An engine that answers the questions of `compare`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, **question: Any) -> dict[str, Any]:
        """Run a prompt (`ids`, `room`) or steps (`steps`, after `skipped` steps that are not timed)."""
        return self._prompt(**question) if "ids" in question else self._steps(**question)

    def _prompt(self, ids: list[list[int]], room: int) -> dict[str, Any]:
        first: list[int] = []
        began = time.perf_counter()
        added = memory.added(lambda: first.extend(self.engine.prompt(ids, room)))
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": first, "MiB": added, "resident": memory.resident() / memory.MEBIBYTE}

    def _steps(self, steps: int, skipped: int = 0) -> dict[str, Any]:
        if skipped:
            self.engine.steps(skipped)
        began = time.perf_counter()
        made = self.engine.steps(steps)
        return {"seconds": (time.perf_counter() - began) / steps, "tokens": made}


def load(adapter: str, setup: Setup) -> Engine:
    """Return the engine that the class `module:Class` makes."""
    module, name = adapter.split(":")
    made: Engine = getattr(importlib.import_module(module), name)(setup)
    return made


def main(adapter: str, setup: str) -> None:
    """Serve one engine over pipes until stdin is closed."""
    worker.serve(lambda: Timed(load(adapter, Setup(**json.loads(setup)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
