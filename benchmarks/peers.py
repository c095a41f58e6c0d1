"""What people use today: growing caches, StreamingLLM's concatenation, and kvpress in an environment of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import apart
from benchmarks.model import Conversation, dynamic, static

WORKER = "benchmarks.kvpress_worker"
SINKS = 4


def uncompiled(model: Any, seen: int) -> Conversation:
    """The model as it is, with a cache that grows by concatenation."""
    return Conversation(model, dynamic(model, seen))


def stock(model: Any, seen: int, room: int) -> Conversation:
    """The model under torch.compile, with a preallocated cache of `seen` tokens, the last `room` still free."""
    made = Conversation(torch.compile(model, fullgraph=True), static(model, seen, room))
    for _ in range(2):
        made.step()
    return made


def concatenating(model: Any, budget: int) -> Conversation:
    """StreamingLLM as it was published: sinks and recent tokens are concatenated anew after every step.

    It also turns all keys to their new places at every step; that is left out here, to its advantage.
    """
    return Conversation(model, dynamic(model, budget), after=lambda cache: keep_sinks_and_recent(cache, budget))


def keep_sinks_and_recent(cache: Any, budget: int) -> None:
    for layer in cache.layers:
        recent = layer.keys.shape[2] - (budget - SINKS)
        for name in ("keys", "values"):
            rows = getattr(layer, name)
            setattr(layer, name, torch.cat([rows[:, :, :SINKS], rows[:, :, recent:]], 2))


class Unavailable(Exception):
    """kvpress cannot be installed or run here; says why."""


def environment(folder: Path) -> Path:
    """A Python with kvpress and the same torch; made if it is not there.

    Raises:
        Unavailable: it cannot be made.
    """
    python = folder / "bin" / "python"
    if not (folder / "made").is_file():
        wanted = [f"torch=={torch.__version__.partition('+')[0]}", "kvpress", "transformers<5.3"]
        _must([sys.executable, "-m", "venv", str(folder)])
        _must([str(python), "-m", "pip", "install", "--quiet", *wanted])
        (folder / "made").touch()
    return python


def _must(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Unavailable(" ".join(reason[-1:]) or f"{command[1:4]} failed")


@dataclasses.dataclass(frozen=True)
class Remote:
    """A contender in the process of a `Worker`."""

    name: str
    worker: Worker
    press: str
    seen: int

    def seconds(self, count: int) -> list[float]:
        found: list[float] = self.worker.ask(press=self.press, seen=self.seen, count=count)
        return found


class Worker:
    """kvpress in a process that lives as long as this object is entered."""

    def __init__(self, python: Path, dtype: str, threads: int, budget: int) -> None:
        given = json.dumps({"dtype": dtype, "threads": threads, "budget": budget})
        self.command = [str(python), "-m", WORKER, given]
        self.threads = threads

    def __enter__(self) -> Worker:
        self.process = subprocess.Popen(
            self.command, env=apart.surroundings(self.threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def ask(self, **question: Any) -> Any:
        """The answer of the process to one question."""
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Unavailable(f"the process of kvpress ended with {self.process.wait()}")
        return json.loads(line)
