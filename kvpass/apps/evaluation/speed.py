"""Throughput, time to the first token, and memory."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

import kvpass
from kvpass.apps.evaluation.session import Row, Session
from kvpass.decoding.loop import DecodeLoop

MEBIBYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Speed:
    """Greedy decoding after a prompt, compiling left out.

    Attributes:
        length: tokens of the prompt, out of the texts.
        batch: prompts that are rows of one batch.
        new: tokens that are decoded and timed, at the same number of held tokens once the budget is full.
        times: how often the prompt is timed.
    """

    length: int = 1024
    batch: int = 1
    new: int = 64
    times: int = 3
    name: ClassVar[str] = "speed"
    across: ClassVar[str] = "budget"
    up: ClassVar[str] = "tokens a second"

    @property
    def room(self) -> int:
        return self.length + 2 * self.new + 1

    def rows(self, session: Session) -> Iterator[Row]:
        """One row."""
        loop = session.loop
        _forget_peak(loop.device)
        ids = torch.tensor([session.filler(row * self.length, self.length) for row in range(self.batch)])
        first = [_timed_prompt(loop, ids) for _ in range(self.times + 1)][1:]
        session.tick(self.length * (self.times + 1))
        loop.generate(self.new)  # compiles the step
        start = time.perf_counter()
        made = loop.generate(self.new).numel()
        seconds = time.perf_counter() - start
        session.tick(2 * self.new)
        report = kvpass.inspect(loop)
        yield {
            "tokens a second": made / seconds,
            "ms a step": 1e3 * seconds / self.new,
            "time to first token, s": statistics.median(first),
            "cache, MiB": report.nbytes / MEBIBYTE,
            "of a full one": report.ratio,
            **_peak(loop.device),
        }

    def columns(self, rows: Sequence[Row]) -> Row:
        (row,) = rows
        return row


def _timed_prompt(loop: DecodeLoop, ids: Tensor) -> float:
    """Seconds from a prompt [B, T] to the first token on the host."""
    loop.state = None  # a new conversation
    start = time.perf_counter()
    loop.prompt(ids)
    loop.generate(1)
    return time.perf_counter() - start


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> Row:
    """What the device held at most since `_forget_peak`, where it says."""
    if device.type != "cuda":
        return {}
    return {"peak of the device, MiB": torch.cuda.max_memory_allocated(device) / MEBIBYTE}
