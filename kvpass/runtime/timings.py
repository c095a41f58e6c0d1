"""Compile times, by the part of the compiler stack."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from kvpass.torch_private import inductor


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of one call that was compiled, from its beginning to its end.

    Attributes:
        total: the whole call.
        kvpass: reading and rewriting graphs.
        validation: comparing rewritten graphs with the model's own.
        compiler: the inner compiler: AOTAutograd and Inductor, or another `inner`.
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
        return f"{self.total:.2f} s: {shares}; the C++ compiler took {self.cpp:.2f} s, in processes of its own"


class Stopwatch:
    """Sums of seconds by name; a nested section does not count for the section around it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    @contextlib.contextmanager
    def spending(self, name: str) -> Iterator[None]:
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
    def timing(self, found: list[Timings]) -> Iterator[None]:
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
