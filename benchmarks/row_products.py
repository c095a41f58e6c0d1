"""Products of a few rows with a matrix: torch's library beside the loops of `lowering.row_products`.

Matrices come from memory, as in a step of a model that no cache has room for: each is one of many.  `LIMITS` of
`kvpass.lowering.row_products` says where the loops stop being the faster ones, from what this prints.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from benchmarks import apart
from benchmarks.report import Row, Table, Target, under
from benchmarks.settings import Settings
from benchmarks.timing import Local, Plan, interleaved, medians
from kvpass import compat
from kvpass.lowering.row_products import spell_out

TITLE = "Products of a few rows"
LIBRARY, ONE, TWO = "library", "loops", "loops over halves"
PARTS = {LIBRARY: 0, ONE: 1, TWO: 2}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
SIZES = ((512, 512), (512, 1408), (1408, 512), (2048, 2048), (2048, 8192))  # [K, N]
QUICK = dict(counts=(1, 4), sizes=SIZES[1:2])
WHOLE = dict(counts=ROWS, sizes=SIZES)
READ = 128 << 20  # bytes of all matrices of a contender's turn: more than caches have room for
DTYPES = ("float32", "bfloat16", "float16")


def measure(settings: Settings) -> list[Row]:
    """Rows for each dtype and number of threads; float16 is always among them."""
    plan = dataclasses.asdict(settings.plan.fewer(0.5))
    found: list[Row] = []
    for threads in settings.threads:
        for dtype in DTYPES:
            given = dict(dtype=dtype, count=threads, plan=plan, **(QUICK if settings.quick else WHOLE))
            found += apart.run("benchmarks.row_products:rows", threads=threads, **given)
    return found


@torch.inference_mode()
def rows(dtype: str, count: int, plan: Row, counts: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows of one dtype and number of threads."""
    cases = [(height, tuple(size)) for size in sizes for height in counts]
    about = {"dtype": dtype, "threads": count}
    found: list[Row] = []
    for height, (wide, columns) in tqdm(cases, unit="case", desc=f"row products, {under(about)}", dynamic_ncols=True):
        torch._dynamo.reset()
        given = _Given.random(height, wide, columns, getattr(torch, dtype))
        taken = medians(interleaved([given.contender(name) for name in PARTS], Plan(**plan)))
        each = {name: ms / len(given.matrices) for name, ms in taken.items()}
        found.append({**about, "rows": height, "K": wide, "N": columns, **each})
    return found


@dataclasses.dataclass(frozen=True)
class _Given:
    """What is multiplied: rows [R, K], and matrices [N, K] as of linear layers, one after another."""

    x: Tensor
    matrices: list[Tensor]

    @staticmethod
    def random(height: int, wide: int, columns: int, dtype: torch.dtype) -> _Given:
        number = max(2, READ // (wide * columns * dtype.itemsize))
        matrices = [torch.randn(columns, wide).to(dtype) for _ in range(number)]
        return _Given(torch.randn(height, wide).to(dtype), matrices)

    def contender(self, name: str) -> Local:
        """A contender whose step is the product with every matrix."""
        product = compiled(PARTS[name])

        def step() -> None:
            for matrix in self.matrices:
                product(self.x, matrix)

        step()
        return Local(name, step)


def compiled(parts: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A linear layer: with so many parts of its columns in one loop, or with none by the library."""
    spelled = compat.graph_pass(uuid.uuid4().bytes, functools.partial(spell_out, parts=parts))

    def product(x: Tensor, matrix: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, matrix)

    return torch.compile(product, dynamic=False, options={"post_grad_custom_pre_pass": spelled})


def tables(rows: Sequence[Row]) -> list[Table]:
    """For each dtype and number of threads, a line per case."""
    made: dict[str, list[Row]] = {}
    for row in rows:
        line = {"K x N": f"{row['K']:,} x {row['N']:,}", "rows": row["rows"]}
        made.setdefault(under(row), []).append(line | {f"{name}, ms": row[name] for name in PARTS})
    return [Table(f"Products of a few rows, {title}", lines) for title, lines in made.items()]


def targets(rows: Sequence[Row]) -> list[Target]:
    return []


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    return {}
