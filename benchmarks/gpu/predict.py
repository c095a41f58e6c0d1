"""Predict the figures of the benchmark for GPUs from counted machine code and a roofline.

python -m benchmarks.gpu --predict

Writes `predicted.json` next to this file; a run on a GPU shows it in a separate column.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import layer, roofline
from benchmarks.gpu.bench import PREDICTED, Row
from benchmarks.gpu.layer import Case
from benchmarks.gpu.roofline import Gpu, Time, Work
from kvpass.lowering import attend_kernel, column_kernel
from kvpass.lowering.attention_blocks import AttentionInputs
from tests.gpu.binaries import Binary
from tests.gpu.launches import Launched, launched
from tests.gpu.listing import ASYNCHRONOUS, GLOBAL_LOADS, GLOBAL_STORES, SHARED, TENSOR, WARP

TARGET = "sm_90"
THERE = torch.device("meta")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launch, its machine code, and its loop counts.

    Attributes:
        turns: iterations of each loop each time it is entered; a mean over programs.
        memory: bytes outside the cache that all programs together need.
        near: whether the launch loads data that has just been written, and is in the cache.
    """

    launch: Launched
    binary: Binary
    turns: tuple[float, ...]
    memory: int
    near: bool = False

    def work(self) -> Work:
        """Return the work of the launch, for the roofline."""
        binary, listing, programs = self.binary, self.binary.listing, self.launch.programs
        return Work(
            programs=programs,
            warps=binary.warps,
            resident=binary.resident,
            memory=self.memory,
            cache=listing.moved(self.turns) * binary.warps * programs,
            counts=listing.executed(self.turns),
            waits=listing.waited(self.turns),
            latency=roofline.NEAR if self.near else roofline.LATENCY,
        )


class Compiler:
    """Compile launches; code depends on the number of slots only by constants, so one size is enough."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Binary] = {}

    def __call__(self, launch: Launched) -> Binary:
        names = ("BITS", "ROTARY", "BLOCK", "WIDTH", "PIECE", "SQUARES", "BQ")
        same = (launch.name, *(launch.arguments.get(name) for name in names))
        if same not in self.made:
            self.made[same] = launch.binary(TARGET)
        return self.made[same]


def attention(case: Case, compiler: Compiler) -> list[Kernel]:
    """Return the launches `split` and `join` of one call."""
    query = torch.empty(case.rows, layer.HEADS, layer.GROUPS, 1, layer.DIM, dtype=torch.bfloat16, device=THERE)
    key, value = case.held(THERE, torch.bfloat16)
    mask = torch.ones(case.rows, 1, 1, 1, case.slots, dtype=torch.bool, device=THERE)
    rope = layer.rotary(case.slots, query)[1] if case.turned else None
    given: dict[str, Any] = dict(
        scale=0.1, mask=mask, bias=None, cap=None, sink_logit=None, with_logits=False, rope=rope
    )
    split, join = launched(attend_kernel.attend_by_kernel, query, key, value, **given)
    turns = -(-split.arguments["PART"] // split.arguments["BLOCK"])
    memory = layer.size_of(case) + _bytes([query, mask, *([rope.cos, rope.sin] if rope else [])])
    return [Kernel(split, compiler(split), (turns,), memory), Kernel(join, compiler(join), (), 0, near=True)]


def prompt(powers: int, compiler: Compiler) -> list[Kernel]:
    """Return the launches `totals` and `columns` of a causal prompt."""
    kind: dict[str, Any] = dict(dtype=torch.bfloat16, device=THERE)
    query = torch.empty(1, layer.HEADS * layer.GROUPS, layer.PROMPT, layer.DIM, **kind)
    key = torch.empty(1, layer.HEADS, layer.PROMPT, layer.DIM, **kind)
    weight = torch.ones(1, layer.PROMPT, device=THERE)
    made = launched(column_kernel.column_sums_by_kernel, AttentionInputs(query, key, None, True, 0.1), weight, powers)
    size = _bytes([query, key])  # in the cache after the first program of a head
    return [Kernel(launch, compiler(launch), _mean_turns(launch), size, near=True) for launch in made]


def _mean_turns(launch: Launched) -> tuple[float, float]:
    """Return the iterations of both loops of a causal kernel: complete blocks, and the block on the diagonal."""
    assert launch.arguments["BQ"] == launch.arguments["BK"]
    whole = (layer.PROMPT // launch.arguments["BQ"] - 1) / 2
    return (whole, 1.0) if launch.name == "totals" else (1.0, whole)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A row of the benchmark as consecutive launches of kernels.

    Attributes:
        size: the minimum number of bytes to move.
    """

    section: str
    case: str
    kernels: list[Kernel]
    size: int

    def times(self, gpu: Gpu) -> list[Time]:
        return [roofline.seconds(gpu, kernel.work()) for kernel in self.kernels]

    def row(self, gpu: Gpu) -> Row:
        """Return the figure in the unit of the benchmark: share of a copy, multiple of its time, or milliseconds."""
        spent, reached = sum(time.total for time in self.times(gpu)), gpu.memory * roofline.REACHED
        if self.section == "attend, of copy":
            return Row(self.section, self.case, self.size / spent / reached, "")
        return Row(self.section, self.case, spent * 1e3, "ms")


def figures() -> list[Figure]:
    """Return all rows, compiled."""
    compiler = Compiler()
    made = [
        Figure("attend, of copy", case.name, attention(case, compiler), layer.size_of(case)) for case in layer.cases()
    ]
    for name, powers in (("sums", 1), ("sums and squares", 2)):
        both = prompt(powers, compiler)
        made.append(Figure("prompt", name, both, both[0].memory))
    return made


def main() -> None:
    """Count, predict, write and print all rows."""
    made = figures()
    rows = {gpu.name: [dataclasses.asdict(figure.row(gpu)) for figure in made] for gpu in roofline.GPUS}
    PREDICTED.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join([*counted(made), "", *predictions(made)]))


LOADS = (*GLOBAL_LOADS, *ASYNCHRONOUS)


def counted(made: list[Figure]) -> Iterator[str]:
    """Yield counts in Markdown: one iteration of each innermost loop of a warp, or all code without a loop."""
    yield (
        "| kernel | warps | registers | spills | shared | side by side | instructions | waits | global memory "
        "| bytes a load | tensor cores | powers | shared memory |"
    )
    yield "|---|" + "---:|" * 7 + "---|---:|---|---:|---:|"
    seen: set[int] = set()
    for figure in made:
        for kernel in figure.kernels:
            if id(kernel.binary) not in seen:
                yield from _rows(kernel, f"{kernel.launch.name}: {figure.case}")
            seen.add(id(kernel.binary))


def _rows(kernel: Kernel, label: str) -> Iterator[str]:
    binary, listing = kernel.binary, kernel.binary.listing
    size = f"{binary.warps} | {binary.registers} | {binary.spills} | {binary.shared / 1024:.0f} KiB | {binary.resident}"
    turns = [(listing.inside(loop), listing.waits(loop)) for loop in listing.innermost]
    for counts, waits in turns or [(listing.executed(()), listing.waited(()))]:
        each = counts.moved(*LOADS) / WARP / max(1, counts.of(*LOADS))
        cells = [
            f"{counts.instructions:g}", f"{waits:.2f}", _named(counts.widths(*LOADS, *GLOBAL_STORES)), f"{each:.1f}",
            _named(counts.widths(*TENSOR)), f"{counts.of('MUFU'):g}", f"{counts.moved(*SHARED) / 1024:.1f} KiB",
        ]  # fmt: skip
        yield f"| {label} | {size} | {' | '.join(cells)} |"


def _named(widths: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in widths.items())


def predictions(made: list[Figure]) -> Iterator[str]:
    """Yield predictions in Markdown: microseconds, the figure, and the limit of each launch."""
    yield "| figure | " + " | ".join(f"{gpu.name}, us | its figure | limits" for gpu in roofline.GPUS) + " |"
    yield "|---|" + "---:|---:|---|" * len(roofline.GPUS)
    for figure in made:
        cells = []
        for gpu in roofline.GPUS:
            times, row = figure.times(gpu), figure.row(gpu)
            spent, limits = sum(time.total for time in times), ", ".join(time.bound for time in times)
            cells.append(f"{spent * 1e6:.1f} | {row.value:.2f} | {limits}")
        yield f"| {figure.section}: {figure.case} | {' | '.join(cells)} |"


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
