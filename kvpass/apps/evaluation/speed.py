"""Measure throughput, the time to the first token, and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import kvpass
from kvpass.apps.evaluation.session import Loop, Row, Session
from kvpass.cache.model_cache import caches_in
from kvpass.torch_private import dynamo

MEBIBYTE = 2**20
COMPILING = 3  # prompts that may compile something and do not count


@dataclasses.dataclass(frozen=True)
class Speed:
    """Speed and memory of greedy decoding after a prompt, without the time of compiling.

    Attributes:
        length: tokens of the prompt, cut from the texts.
        batch: prompts that are rows of one batch.
        new: tokens that are decoded and timed; with a bounded cache the number of cached tokens stays constant.
        times: how often the prompt is timed; a prompt during which something is compiled does not count.
    """

    length: int = 1024
    batch: int = 1
    new: int = 64
    times: int = 3
    name: ClassVar[str] = "speed"
    x_key: ClassVar[str] = "budget"
    y_key: ClassVar[str] = "tokens a second"

    @property
    def needed_slots(self) -> int:
        return self.length + 2 * self.new + 1

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield one row."""
        loop = session.loop
        if loop.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(loop.device)
        ids = torch.tensor([session.filler(row * self.length, self.length) for row in range(self.batch)])
        first_token_seconds: list[float] = []
        with _without_stops(loop):
            for _ in range(self.times + COMPILING):
                before, seconds = dynamo.compilation_count(), _timed_prompt(loop, ids)
                session.tick(self.length)
                first_token_seconds += [seconds] if dynamo.compilation_count() == before else []
                if len(first_token_seconds) == self.times:
                    break
            loop.generate(self.new)  # compiles the step
            start = time.perf_counter()
            loop.generate(self.new)
            seconds = time.perf_counter() - start
        session.tick(2 * self.new)
        yield {
            "tokens a second": self.batch * self.new / seconds,
            "ms a step": 1e3 * seconds / self.new,
            "time to first token, s": statistics.median(first_token_seconds) if first_token_seconds else None,
            "cache, MiB": cache_bytes(loop.cache) / MEBIBYTE,
            "of a full one": kvpass.inspect(loop.cache).ratio if caches_in(loop.cache) else 1.0,
            **_peak(loop.device),
        }

    def columns(self, rows: Sequence[Row]) -> Row:
        (row,) = rows
        return row


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a model's cache, of kvpass or of transformers."""
    if caches_in(cache):
        return kvpass.inspect(cache).nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@contextlib.contextmanager
def _without_stops(loop: Loop) -> Iterator[None]:
    """Let conversations that begin in this context continue after stop tokens."""
    stop, loop.stop = loop.stop, loop.stop[:0]
    try:
        yield
    finally:
        loop.stop = stop


def _timed_prompt(loop: Loop, ids: Tensor) -> float:
    """Return the seconds from a prompt int64 [B, T] to the first token on the host."""
    loop.reset()
    start = time.perf_counter()
    loop.prompt(ids)
    loop.generate(1)
    return time.perf_counter() - start


def _peak(device: torch.device) -> Row:
    """Return the most memory that the device used in this measurement; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"peak of the device, MiB": torch.cuda.max_memory_allocated(device) / MEBIBYTE}
