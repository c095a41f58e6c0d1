"""Time calls on a device, and keep the rows of the table and the deadline."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PREDICTED = Path(__file__).with_name("predicted.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        target: the intended figure as text, empty if there is none.
        met: whether the target is met.
        predicted: prediction of `predict` from the kernels' machine code, or None.
    """

    section: str
    case: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    predicted: float | None = None

    def beside(self, predicted: Mapping[tuple[str, str], float]) -> Row:
        """Return the row with the prediction for its section and case."""
        return dataclasses.replace(self, predicted=predicted.get((self.section, self.case)))


@dataclasses.dataclass
class Bench:
    """The device, the sizes and the deadline.

    Attributes:
        small: whether to rehearse with small sizes, whose figures mean nothing.
        layers: layers of the model with the shape of an 8B.
        end: deadline on `time.monotonic`.
    """

    device: torch.device
    small: bool
    layers: int
    end: float
    left_out: list[str] = dataclasses.field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def in_time(self, what: str, seconds: float = 0.0) -> bool:
        """Return whether `seconds` are left; a section without time is listed as left out."""
        fits = time.monotonic() + seconds < self.end
        if not fits:
            self.left_out.append(what)
        return fits

    def few(self, names: Sequence[str]) -> Sequence[str]:
        """Return all values, or two of them in a rehearsal."""
        return names[:2] if self.small else names

    @property
    def inner(self) -> str:
        """Return the inner compiler of rewritten graphs."""
        return "eager" if self.small else "inductor"

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], turns: int = 30) -> float:
        """Return the median seconds of a warm compiled call, with the caches flushed before each.

        The call is queued while the GPU still flushes a GiB. So the time excludes launching on the host, like the CUDA
        graph that a `DecodeLoop` replays.
        """
        for _ in range(3):
            run()
        flush = torch.empty(1 << (20 if self.small else 30), dtype=torch.int8, device=self.device)
        return statistics.median(self._once(run, flush) for _ in range(3 if self.small else turns))

    def _once(self, run: Callable[[], Any], flush: torch.Tensor) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        self.sync()
        return float(start.elapsed_time(end)) / 1e3

    def memory(self) -> int:
        """Return the bytes of available memory."""
        return torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 1 << 30

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def predicted(device: str) -> dict[tuple[str, str], float]:
    """Return the predictions of `python -m benchmarks.gpu --predict` for a device, by section and case."""
    found = json.loads(PREDICTED.read_text())
    rows = next((rows for name, rows in found.items() if name in device), [])
    return {(row["section"], row["case"]): row["value"] for row in rows}


def table(rows: list[Row]) -> Iterator[str]:
    """Return the rows as Markdown."""
    yield "| section | case | value | predicted | target | met |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        met = "" if row.met is None else "yes" if row.met else "NO"
        predicted = "" if row.predicted is None else f"{row.predicted:.4g}"
        yield f"| {row.section} | {row.case} | {row.value:.4g} {row.unit} | {predicted} | {row.target} | {met} |"
