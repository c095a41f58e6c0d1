"""Products of a few rows with a matrix, for decode steps on a CPU.

A step of one conversation multiplies one row with every weight of the model.  That is bound by reading the weights,
but the matrix products of torch's libraries are made for many rows and reach about half of that.  Spelled as multiply
and sum, the compiler makes loops of it that read the weights about as fast as memory gives them, in the weights' own
dtype, and fuses what comes after.  Sums are in float32 whatever the dtype.

A batch has a sum for each of its rows.  The compiler makes one loop of them, so the weights are read once all the same:
what is in a register is multiplied with every row.  Loops over two halves or four quarters of the columns at once have
more loads on their way, as a processor looks ahead within a page of each.  All are worth it up to the number of rows at
which the library, which has its rows in tiles, is faster.
`LIMITS` says which that is.  The same goes for attention's products, of queries and keys, and of probabilities and
values.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx.splicing import call_aten
from kvpass.torch_private import inductor, symbolic_shapes

aten, prims = torch.ops.aten, torch.ops.prims
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = 2  # layers in a graph
LINE = 64  # bytes that memory gives at once
SUMS = 16  # of one loop, which registers have room for


@dataclasses.dataclass(frozen=True)
class RowLimits:
    """Up to how many rows a product is faster spelled out, for one dtype and kind of processor.

    Attributes:
        quartered: rows for which four quarters of the columns go through one loop.
        paired: rows for which two halves do.
        near: rows if all of them, in float32, fill no more than half of the first cache: each is read for every column.
        far: rows that fill more.
        scores, values: rows of attention's products, whose matrices have columns, or rows, that lie together.
    """

    quartered: int
    paired: int
    near: int
    far: int
    scores: int = 0
    values: int = 0


LIMITS = {
    ("AVX2", torch.float32, False): RowLimits(quartered=2, paired=8, near=12, far=8, scores=8, values=4),
    ("AVX2", torch.bfloat16, False): RowLimits(quartered=2, paired=4, near=16, far=16, scores=16, values=16),
    ("AVX2", torch.float16, False): RowLimits(quartered=2, paired=4, near=16, far=16, scores=16, values=16),
    ("AVX512", torch.float32, False): RowLimits(quartered=3, paired=8, near=12, far=8, scores=8, values=4),
    ("AVX512", torch.bfloat16, False): RowLimits(quartered=2, paired=4, near=16, far=8, scores=2, values=4),
    ("AVX512", torch.float16, False): RowLimits(quartered=2, paired=4, near=16, far=16, scores=4, values=4),
    ("AVX512", torch.bfloat16, True): RowLimits(quartered=2, paired=4, near=8, far=4, scores=2, values=4),
    ("AVX512", torch.float16, True): RowLimits(quartered=2, paired=4, near=8, far=4, scores=2, values=4),
}
"""By the vectors that loops are made of, by dtype, and by whether the processor has dot products of it, as those with
AVX512-BF16 or AMX have of bfloat16.

From the last table that `python -m benchmarks row_products` prints, of one thread, 1 to 16 rows and matrices that come
from memory.  With AVX-512 without dot products of bfloat16, by keeping the library from using them; float16 with dot
products is taken to be as bfloat16 is; quarters, and values in float32, with AVX2 were timed on a processor that has
AVX-512 as well.  The size of the matrix decides nothing: it is read once.
"""

QUARTERED_FAR = 4
"""Rows that fill more, see `RowLimits.near`, for which four quarters go through one loop: with every dtype."""

OTHERS = "AVX512"  # what processors that are not in the table are taken to be


@dataclasses.dataclass(frozen=True)
class Processor:
    """What decides between loops and library.

    Attributes:
        cache: bytes of a core's first data cache.
        dots: the dtypes of half precision that there are dot products of.
        vectors: what loops are made of, as torch names it.
    """

    cache: int
    dots: frozenset[torch.dtype]
    vectors: str = OTHERS

    @staticmethod
    def here() -> Processor:
        """This machine's."""
        return Processor(inductor.l1_cache_bytes(), inductor.dot_products(), torch.backends.cpu.get_cpu_capability())

    def limits(self, dtype: torch.dtype) -> RowLimits:
        """What holds for products in a dtype."""
        has_dots = dtype in self.dots
        return LIMITS.get((self.vectors, dtype, has_dots)) or LIMITS[OTHERS, dtype, has_dots]


def spell_out(graph: fx.Graph, parts: int | None = None) -> None:
    """Replace each `mm`, `addmm` and `bmm` of one row or a few on a CPU in a graph of aten's operators.

    Args:
        parts: into how many parts all columns go, for measuring, and whether attention's products are spelled out; by
            default `split` and `is_worth_it` say.
    """
    processor = Processor.here()
    stored: dict[fx.Node, fx.Node] = {}
    for node in batches(graph, processor) if parts is None else _all_batches(graph) if parts else []:
        _replace_batch(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.mm.default or (node.target is aten.addmm.default and not node.kwargs):
            *bias, rows, matrix = node.args
            if has_dynamic_rows(rows.meta["val"], matrix.meta["val"]):
                _multiplied_transposed(graph, node, rows, matrix, *bias)
                continue
            count = split(rows.meta["val"], matrix.meta["val"], processor) if parts is None else parts
            if count:
                _replace(graph, node, stored, _Product(rows, matrix, count, *bias))


@dataclasses.dataclass(frozen=True)
class _Product:
    """Rows [R, K] times a matrix [K, N] whose columns go into so many parts, and a bias [N] or [R, N] on top."""

    rows: fx.Node
    matrix: fx.Node
    parts: int
    bias: fx.Node | None = None


def split(rows: torch.Tensor, matrix: torch.Tensor, processor: Processor) -> int:
    """Into how many parts the columns of [R, K] @ [K, N] go to be faster spelled out; 0 if the library is."""
    if rows.device.type != "cpu" or rows.dtype not in DTYPES or symbolic_shapes.symbols(rows):
        return 0  # each row has a sum of its own, so an open number of rows has none
    count, columns = rows.shape[0], matrix.shape[1]
    if matrix.stride(0) != 1:
        return int(count == 1)  # columns do not lie together, as in GPT-2
    limits = processor.limits(rows.dtype)
    near = 4 * rows.numel() <= processor.cache // 2
    if count > (limits.near if near else limits.far):
        return 0
    if count <= (limits.quartered if near else QUARTERED_FAR):
        return math.gcd(columns, 4)
    return math.gcd(columns, 2) if count <= limits.paired or not near else 1


def has_dynamic_rows(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether an open number of rows [R, K] meets a matrix [K, N] whose columns lie together, in float32 on a CPU."""
    known = rows.device.type == "cpu" and rows.dtype == torch.float32 and matrix.stride(0) == 1
    return known and bool(symbolic_shapes.symbols(rows)) and not symbolic_shapes.symbols(matrix)


def _multiplied_transposed(
    graph: fx.Graph, node: fx.Node, rows: fx.Node, matrix: fx.Node, bias: fx.Node | None = None
) -> None:
    """(W x')' for x W': of few rows the library makes it in half the time, of many in the same.

    Measured as the figures of `LIMITS`: of 2 to 4 rows in 0.3 to 0.8 of the time, of 8 in 0.7 to 1.7, of 16 and more
    in 0.9 to 1.1; in bfloat16 it is the slower way.
    """
    with graph.inserting_before(node):
        across = [call_aten(graph, aten.permute.default, each, [1, 0]) for each in (matrix, rows)]
        made = call_aten(graph, aten.permute.default, call_aten(graph, aten.mm.default, *across), [1, 0])
        if bias is not None:
            made = call_aten(graph, aten.add.Tensor, made, bias)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def batches(graph: fx.Graph, processor: Processor) -> list[fx.Node]:
    """Attention's products that are to be spelled out.

    What calls the library ends a kernel, without which the layers of a graph would be one and share nothing: so where
    there are more than a `FEW`, probabilities and values are left to it.
    """
    found = [node for node in _all_batches(graph) if is_worth_it(node, processor)]
    values = [node for node in found if not _is_of_keys(node)]
    return found if len(values) <= FEW else [node for node in found if _is_of_keys(node)]


def _all_batches(graph: fx.Graph) -> list[fx.Node]:
    """Products of [B, R, K] and [B, K, N] on a CPU that can be spelled out: each of the R rows has a sum of its own."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        rows, matrix = (parent.meta["val"] for parent in node.args)
        dense = matrix.stride(1) == 1 or matrix.stride(2) == 1
        if rows.device.type == "cpu" and rows.dtype in DTYPES and dense and not isinstance(rows.shape[1], torch.SymInt):
            found.append(node)
    return found


def is_worth_it(node: fx.Node, processor: Processor) -> bool:
    """Whether attention's product of [B, R, K] and [B, K, N] is faster spelled out."""
    rows = node.args[0].meta["val"]  # type: ignore[union-attr]
    limits = processor.limits(rows.dtype)
    return bool(rows.shape[1] <= (limits.scores if _is_of_keys(node) else limits.values))


def _is_of_keys(node: fx.Node) -> bool:
    """Whether a product is of queries and keys: the columns of the second lie together.  Of values the rows do."""
    return bool(node.args[1].meta["val"].stride(1) == 1)  # type: ignore[union-attr]


def _replace_batch(graph: fx.Graph, node: fx.Node) -> None:
    """Rows [B, R, K] times matrices [B, K, N], as multiply and sum."""
    rows, matrix = node.args
    assert isinstance(rows, fx.Node)
    assert isinstance(matrix, fx.Node)
    with graph.inserting_before(node):
        stored, wide = _stored(graph, rows), _as(graph, matrix, torch.float32)
        columns = _columns(graph, wide, pieces(rows.meta["val"], matrix.meta["val"]))
        made = [_mixed(graph, stored, at, columns) for at in range(rows.meta["val"].shape[1])]
        whole = _as(graph, call_aten(graph, aten.cat.default, made, 1), node.meta["val"].dtype)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


def pieces(rows: torch.Tensor, matrix: torch.Tensor) -> int:
    """Into how many parts the columns of [B, R, K] @ [B, K, N] go, each with a sum in one loop.

    A row of values lies together: a loop over a part alone would leave out most of it, and another come back for it.
    """
    if matrix.stride(1) == 1:
        return 1
    lines = matrix.shape[2] * matrix.element_size() // LINE
    most = min(lines, SUMS // rows.shape[1])
    return math.gcd(matrix.shape[2], 1 << max(most.bit_length() - 1, 0))


def _mixed(graph: fx.Graph, rows: fx.Node, at: int, columns: list[fx.Node]) -> fx.Node:
    """A row of [B, R, K] times columns [B, K, ...], as [B, 1, N]."""
    row = call_aten(graph, aten.unsqueeze.default, call_aten(graph, aten.select.int, rows, 1, at), 2)
    products = [call_aten(graph, aten.mul.Tensor, part, row) for part in columns]
    sums = [call_aten(graph, aten.sum.dim_IntList, product, [1]) for product in products]
    return call_aten(graph, aten.unsqueeze.default, call_aten(graph, aten.cat.default, sums, 1), 1)


def _replace(graph: fx.Graph, node: fx.Node, stored: dict[fx.Node, fx.Node], product: _Product) -> None:
    """The product as multiply and sum; `stored` has rows that were made for products before."""
    with graph.inserting_before(node):
        if product.rows not in stored:
            stored[product.rows] = _stored(graph, product.rows)
        columns = _columns(graph, _as(graph, product.matrix, torch.float32), product.parts)
        made = _multiplied(graph, stored[product.rows], columns)
        if product.bias is not None:
            made = call_aten(graph, aten.add.Tensor, made, _as(graph, product.bias, torch.float32))
        made = _as(graph, made, node.meta["val"].dtype)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _stored(graph: fx.Graph, rows: fx.Node) -> fx.Node:
    """Rows [..., R, K] as float32 in a buffer of their own.

    What the rows are computed from is so computed once, and not for every column.  The product with one is there for
    rows that are views of something larger.
    """
    own = call_aten(graph, aten.mul.Scalar, _as(graph, rows, torch.float32), 1.0)
    return inductor.write_out(graph, own, _strides(graph, own))


def _strides(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """Those of a dense tensor of a node's shape, as nodes where they are no numbers."""
    strides: list[Any] = [1]
    for dim in range(node.meta["val"].ndim - 1, 0, -1):
        size = node.meta["val"].shape[dim]
        factors = (
            call_aten(graph, symbolic_shapes.SIZE, node, dim) if isinstance(size, torch.SymInt) else size,
            strides[-1],
        )
        is_number = all(isinstance(factor, int) for factor in factors)
        strides.append(operator.mul(*factors) if is_number else call_aten(graph, operator.mul, *factors))
    return strides[::-1]


def _columns(graph: fx.Graph, matrix: fx.Node, parts: int) -> list[fx.Node]:
    """A matrix [..., K, N] in parts of as many columns."""
    if parts == 1:
        return [matrix]
    size, last = matrix.meta["val"].shape[-1] // parts, matrix.meta["val"].ndim - 1
    return [call_aten(graph, aten.slice.Tensor, matrix, last, at * size, (at + 1) * size) for at in range(parts)]


def _multiplied(graph: fx.Graph, rows: fx.Node, columns: list[fx.Node]) -> fx.Node:
    """Rows [R, K] times columns [K, ...] as [R, N], row by row in memory: sums of one loop, if they have one length."""
    count = rows.meta["val"].shape[0]
    sums = [_sum(graph, _row(graph, rows, at), part) for at in range(count) for part in columns]
    made = call_aten(graph, aten.cat.default, sums)
    return call_aten(graph, aten.view.default, made, [count, made.meta["val"].shape[0] // count])


def _row(graph: fx.Graph, rows: fx.Node, at: int) -> fx.Node:
    """A row of [R, K] as [K, 1]."""
    return call_aten(graph, aten.unsqueeze.default, call_aten(graph, aten.select.int, rows, 0, at), 1)


def _sum(graph: fx.Graph, row: fx.Node, columns: fx.Node) -> fx.Node:
    """A row [K, 1] times columns [K, N], as [N]."""
    return call_aten(graph, aten.sum.dim_IntList, call_aten(graph, aten.mul.Tensor, columns, row), [0])


def _as(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The node in another dtype.  `aten.to` would be called and not compiled: it is too late to decompose it."""
    return x if x.meta["val"].dtype == dtype else call_aten(graph, prims.convert_element_type.default, x, dtype)
