"""Time products of a few rows, and of attention: by torch's library, and as `lowering.row_products` writes them.

The kernel is that of `lowering.row_kernel`, where the processor has what it needs.  Each matrix is one of many, so it
is read from memory, as in a step of a model larger than the processor's caches.  `LIMITS` of
`kvpass.lowering.row_products` and `MAX_ROWS` of the kernel are derived from the results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch import Tensor
from tqdm import tqdm

from benchmarks import apart
from benchmarks.report import Row, Table, under
from benchmarks.settings import Settings
from benchmarks.timing import Local, Plan, interleaved, medians
from kvpass.lowering import row_kernel, row_products
from kvpass.lowering.row_products import Processor
from kvpass.torch_private import inductor, processor

TITLE = "Products of a few rows"
LIBRARY, ONE, TWO, FOUR, KERNEL = "library", "loops", "loops over halves", "loops over quarters", "kernel"
PARTS = {LIBRARY: 0, ONE: 1, TWO: 2, FOUR: 4, KERNEL: None}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
SIZES = ((512, 512), (512, 1408), (1408, 512), (2048, 2048), (2048, 8192))  # [K, N]
HEADS, SLOTS, DIM = 4, 1025, 64  # of attention
SCORES, VALUES = "queries and keys", "probabilities and values"
QUICK: dict[str, Any] = dict(counts=(1, 4), sizes=SIZES[1:2])
WHOLE: dict[str, Any] = dict(counts=ROWS, sizes=SIZES)
READ = 128 << 20  # bytes of all matrices in a contender's turn, more than the caches hold
DTYPES = ("float32", "bfloat16", "float16")


def measure(settings: Settings) -> list[Row]:
    """Return rows for each dtype and number of threads; float16 is always included."""
    plan = dataclasses.asdict(settings.plan.fewer(0.5))
    found: list[Row] = []
    for threads in settings.threads:
        for dtype in DTYPES:
            given = dict(dtype=dtype, count=threads, plan=plan, **(QUICK if settings.quick else WHOLE))
            found += apart.run("benchmarks.row_products:rows", threads=threads, **given)
    return found


@torch.inference_mode()
def rows(dtype: str, count: int, plan: Row, counts: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """Return the rows of one dtype and number of threads."""
    cases = [(height, tuple(size)) for size in sizes for height in counts]
    about = {"dtype": dtype, "threads": count}
    found: list[Row] = []
    for height, (wide, columns) in tqdm(cases, unit="case", desc=f"row products, {under(about)}", dynamic_ncols=True):
        torch._dynamo.reset()
        given = _Given.random(height, wide, columns, getattr(torch, dtype))
        ways = [name for name in PARTS if name != KERNEL or Processor.here().has_row_kernel]
        found.append({**about, "rows": height, "what": f"{wide:,} x {columns:,}", **given.timed(ways, Plan(**plan))})
    for height, what in itertools.product(counts, (SCORES, VALUES)):
        torch._dynamo.reset()
        attended = _Given.of_attention(height, what, getattr(torch, dtype))
        found.append({**about, "rows": height, "what": what, **attended.timed((LIBRARY, ONE), Plan(**plan))})
    return found


@dataclasses.dataclass(frozen=True)
class _Given:
    """Operands of a product: rows, and the matrices to multiply them with in turn."""

    x: Tensor
    matrices: list[Tensor]
    product: Callable[[Tensor, Tensor], Tensor]

    @staticmethod
    def random(height: int, wide: int, columns: int, dtype: torch.dtype) -> _Given:
        """Return random rows [R, K], and matrices [N, K] like those of linear layers."""
        number = max(2, READ // (wide * columns * dtype.itemsize))
        matrices = [torch.randn(columns, wide).to(dtype) for _ in range(number)]
        return _Given(torch.randn(height, wide).to(dtype), matrices, _linear)

    @staticmethod
    def of_attention(height: int, what: str, dtype: torch.dtype) -> _Given:
        """Return random queries [H, R, D] or probabilities [H, R, C], and keys or values [H, C, D]."""
        number = READ // 2 // (HEADS * SLOTS * DIM * dtype.itemsize)
        held = [torch.randn(HEADS, SLOTS, DIM).to(dtype) for _ in range(number)]
        x = torch.rand(HEADS, height, DIM if what == SCORES else SLOTS).to(dtype)
        return _Given(x, held, _scores if what == SCORES else _mixture)

    def timed(self, names: Iterable[str], plan: Plan) -> dict[str, float]:
        """Return the milliseconds of a product in each of the named ways."""
        taken = medians(interleaved([self.contender(name) for name in names], plan))
        return {name: ms / len(self.matrices) for name, ms in taken.items()}

    def contender(self, name: str) -> Local:
        """Return a contender whose step multiplies with every matrix."""
        product = compiled(self.product, PARTS[name])

        def step() -> None:
            for matrix in self.matrices:
                product(self.x, matrix)

        step()
        return Local(name, step)


def _linear(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, matrix)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(1, 2)


def _mixture(probabilities: Tensor, value: Tensor) -> Tensor:
    return probabilities @ value


def compiled(function: Callable[[Tensor, Tensor], Tensor], parts: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Compile a product into one loop over `parts` ranges of the columns; 0 is torch's library, None the kernel."""
    change = _by_kernel if parts is None else functools.partial(_by_loops, parts=parts)
    spelled = inductor.graph_pass(uuid.uuid4().bytes, change)

    def product(x: Tensor, matrix: Tensor) -> Tensor:
        return function(x, matrix)

    return torch.compile(product, dynamic=False, options={"post_grad_custom_pre_pass": spelled})


def _by_kernel(graph: fx.Graph) -> None:
    """Rewrite products by the kernel, also those of more rows than `MAX_ROWS`, which this benchmark is to find."""
    with mock.patch.dict(row_kernel.MAX_ROWS, dict.fromkeys(row_kernel.MAX_ROWS, max(ROWS))):
        row_products.decompose_products(graph)


def _by_loops(graph: fx.Graph, parts: int) -> None:
    """Rewrite all products by loops over ranges of the columns, or none for 0, whatever `LIMITS` say."""
    chosen: dict[str, Any] = {
        "uses_row_kernel": lambda rows, matrix, processor: False,
        "column_part_count": lambda rows, matrix, processor: parts,
        "batches": lambda graph, processor: row_products._all_batches(graph) if parts else [],
    }
    with mock.patch.multiple(row_products, **chosen):
        row_products.decompose_products(graph)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each dtype and threads, and one of the largest number of rows at which loops win."""
    made: dict[str, list[Row]] = {}
    for row in rows:
        line = {"product": row["what"], "rows": row["rows"]}
        made.setdefault(under(row), []).append(line | {f"{name}, ms": row.get(name) for name in PARTS})
    timed = [Table(f"Products of a few rows, {title}", lines) for title, lines in made.items()]
    return [*timed, Table(f"The most rows for which loops are faster, {vectors()}", limits(rows))]


def limits(rows: Sequence[Row]) -> list[Row]:
    """Return the largest number of rows at which each way wins, by dtype, threads and product."""
    products: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["rows"]):
        products.setdefault((under(row), row["what"]), []).append(row)
    return [
        {
            "loops": title,
            "product": what,
            "over quarters, of the loops": _most(cases, lambda row: row.get(FOUR, math.inf) <= _fastest(row, ONE, TWO)),
            "over halves, of the others": _most(cases, lambda row: row.get(TWO, math.inf) <= row[ONE]),
            "any, of all": _most(cases, lambda row: _fastest(row, ONE, TWO, FOUR) <= row[LIBRARY]),
            "the kernel, of all": _most(cases, lambda row: row.get(KERNEL, math.inf) <= _fastest(row, *PARTS)),
        }
        for (title, what), cases in products.items()
    ]


def _fastest(row: Row, *ways: str) -> float:
    """Return the milliseconds of the fastest of the named ways that were timed."""
    return min(row.get(way, math.inf) for way in ways)


def _most(cases: Sequence[Row], holds: Callable[[Row], bool]) -> int:
    """Return the largest number of rows for which a predicate holds; 0 for none."""
    return max((row["rows"] for row in cases if holds(row)), default=0)


def vectors() -> str:
    """Return the vectors and dot products that loops use on this processor."""
    return f"{Processor.here().vectors}, dot products of {sorted(map(str, processor.dot_products())) or 'none'}"
