"""Run the alternatives on the reference model: full caches, StreamingLLM by concatenation, and kvpress."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import apart, environments
from benchmarks.model import Conversation, dynamic, static
from benchmarks.worker import Worker

SINKS = 4


def uncompiled(model: Any, seen: int) -> Conversation:
    """Return a conversation with the uncompiled model, whose cache grows by concatenation."""
    return Conversation(model, dynamic(model, seen))


def stock(model: Any, seen: int, room: int) -> Conversation:
    """Return a conversation under torch.compile, with a preallocated cache of `seen` tokens, `room` of them free."""
    made = Conversation(torch.compile(model, fullgraph=True), static(model, seen, room))
    for _ in range(2):
        made.step()
    return made


def concatenating(model: Any, budget: int) -> Conversation:
    """Return a conversation that concatenates sinks and recent tokens after every step, like StreamingLLM.

    StreamingLLM (arXiv:2309.17453) also rotates all keys to their new positions at every step. That is left out here,
    to its advantage.
    """
    return Conversation(model, dynamic(model, budget), after=lambda cache: keep_sinks_and_recent(cache, budget))


def keep_sinks_and_recent(cache: Any, budget: int) -> None:
    for layer in cache.layers:
        recent = layer.keys.shape[2] - (budget - SINKS)
        for name in ("keys", "values"):
            rows = getattr(layer, name)
            setattr(layer, name, torch.cat([rows[:, :, :SINKS], rows[:, :, recent:]], 2))


def environment(folder: Path) -> Path:
    """Return a Python with kvpress and the same torch; make its environment if it is missing.

    Raises:
        Unavailable: it cannot be made.
    """
    torch_version = torch.__version__.partition("+")[0]
    return environments.python(folder, [f"torch=={torch_version}", "kvpress", "transformers<5.3"])


@dataclasses.dataclass(frozen=True)
class Remote:
    """A press of kvpress in a worker process."""

    name: str
    worker: Worker
    press: str
    seen: int

    def seconds(self, count: int) -> list[float]:
        found: list[float] = self.worker.ask(press=self.press, seen=self.seen, count=count)
        return found


def worker(python: Path, dtype: str, threads: int, budget: int) -> Worker:
    """Start kvpress in a separate process.

    Raises:
        Unavailable: it does not start.
    """
    given = json.dumps({"dtype": dtype, "threads": threads, "budget": budget})
    return Worker([str(python), "-m", "benchmarks.kvpress_worker", given], apart.surroundings(threads))
