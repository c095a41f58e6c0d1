"""Compute products of a few rows with a matrix by loops of the compiler, for decode steps on a CPU.

A decode step of one conversation multiplies one row with every weight of the model.  Reading the weights bounds its
time, but the matrix products of torch's libraries are made for many rows and reach about half of that bandwidth.
Written as multiply and sum, the product becomes loops of the compiler that read the weights in their own dtype at about
memory bandwidth, and fuse the operations that follow.  Sums are in float32 for every dtype.

A batch has one sum per row.  The compiler puts the sums into one loop, so weights are still read once and multiplied in
registers with every row.  A loop over two halves or four quarters of the columns has more loads in flight, because a
processor prefetches within a page of each.  The library keeps its rows in tiles and is faster from some number of rows
on; `LIMITS` has that number.  The same holds for attention's products of queries and keys, and of probabilities and
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
MOST_UNCUT_LAYERS = 2  # layers that may become one kernel, because they share no code
CACHE_LINE = 64  # bytes
MOST_SUMS = 16  # sums of one loop that fit in registers


@dataclasses.dataclass(frozen=True)
class RowLimits:
    """The largest numbers of rows for which loops beat the library, for one dtype and kind of processor.

    Attributes:
        quartered: rows for which one loop takes four quarters of the columns.
        paired: rows for which one loop takes two halves.
        cached: rows if all of them, in float32, fill at most half of the L1 cache; each is read for every column.
        uncached: rows that fill more.
        scores, values: rows of attention's products, with matrices whose columns, or rows, are contiguous.
    """

    quartered: int
    paired: int
    cached: int
    uncached: int
    scores: int = 0
    values: int = 0


LIMITS = {
    ("AVX2", torch.float32, False): RowLimits(quartered=2, paired=8, cached=12, uncached=8, scores=8, values=4),
    ("AVX2", torch.bfloat16, False): RowLimits(quartered=2, paired=4, cached=16, uncached=16, scores=16, values=16),
    ("AVX2", torch.float16, False): RowLimits(quartered=2, paired=4, cached=16, uncached=16, scores=16, values=16),
    ("AVX512", torch.float32, False): RowLimits(quartered=3, paired=8, cached=12, uncached=8, scores=8, values=4),
    ("AVX512", torch.bfloat16, False): RowLimits(quartered=2, paired=4, cached=16, uncached=8, scores=2, values=4),
    ("AVX512", torch.float16, False): RowLimits(quartered=2, paired=4, cached=16, uncached=16, scores=4, values=4),
    ("AVX512", torch.bfloat16, True): RowLimits(quartered=2, paired=4, cached=8, uncached=4, scores=2, values=4),
    ("AVX512", torch.float16, True): RowLimits(quartered=2, paired=4, cached=8, uncached=4, scores=2, values=4),
}
"""Row limits by vector instructions, by dtype, and by whether the processor has dot products of the dtype.

AVX512-BF16 and AMX have dot products of bfloat16.  The limits come from the last table that
`python -m benchmarks row_products` prints, for one thread, 1 to 16 rows and matrices that come from memory.  The rows
for AVX-512 without dot products of bfloat16 were measured by keeping the library from using them.  float16 with dot
products is assumed to behave like bfloat16.  Quarters, and values in float32, with AVX2 were timed on a processor that
has AVX-512 as well.  The size of the matrix does not matter: it is read once.
"""

MOST_QUARTERED_UNCACHED = 4
"""The largest number of `uncached` rows for which one loop takes four quarters, for every dtype."""

DEFAULT_VECTORS = "AVX512"  # assumed for processors that are not in the table


@dataclasses.dataclass(frozen=True)
class Processor:
    """The properties of a processor that decide between loops and library.

    Attributes:
        cache: bytes of a core's L1 data cache.
        dots: half-precision dtypes with dot-product instructions.
        vectors: the vector instructions, as torch names them.
    """

    cache: int
    dots: frozenset[torch.dtype]
    vectors: str = DEFAULT_VECTORS

    @staticmethod
    def here() -> Processor:
        """Return the properties of this machine's processor."""
        return Processor(inductor.l1_cache_bytes(), inductor.dot_products(), torch.backends.cpu.get_cpu_capability())

    def limits(self, dtype: torch.dtype) -> RowLimits:
        """Return the limits of products in a dtype."""
        has_dots = dtype in self.dots
        return LIMITS.get((self.vectors, dtype, has_dots)) or LIMITS[DEFAULT_VECTORS, dtype, has_dots]


def decompose_products(graph: fx.Graph, parts: int | None = None) -> None:
    """Replace each `mm`, `addmm` and `bmm` of few rows on a CPU by multiply and sum, in an aten graph.

    Args:
        parts: for measurements, the number of parts of all columns; 0 also leaves attention's products alone.  By
            default `split` and `is_faster_as_sums` decide.
    """
    processor = Processor.here()
    stored: dict[fx.Node, fx.Node] = {}
    for node in batches(graph, processor) if parts is None else _all_batches(graph) if parts else []:
        _replace_batch(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.mm.default or (node.target is aten.addmm.default and not node.kwargs):
            *bias, rows, matrix = node.args
            if has_dynamic_rows(rows.meta["val"], matrix.meta["val"]):
                _multiply_transposed(graph, node, rows, matrix, *bias)
                continue
            count = split(rows.meta["val"], matrix.meta["val"], processor) if parts is None else parts
            if count:
                _replace(graph, node, stored, count)
    for node in _all_batches(graph) if parts is None else []:
        _without_batch(graph, node)


def _substitute(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def split(rows: torch.Tensor, matrix: torch.Tensor, processor: Processor) -> int:
    """Return the number of column parts for [R, K] @ [K, N], or 0 if the library is faster."""
    if rows.device.type != "cpu" or rows.dtype not in DTYPES or symbolic_shapes.symbols(rows):
        return 0  # each row is its own sum, so their number must be static
    count, columns = rows.shape[0], matrix.shape[1]
    if matrix.stride(0) != 1:
        return int(count == 1)  # columns are not contiguous, as in GPT-2
    limits = processor.limits(rows.dtype)
    cached = 4 * rows.numel() <= processor.cache // 2
    if count > (limits.cached if cached else limits.uncached):
        return 0
    if count <= (limits.quartered if cached else MOST_QUARTERED_UNCACHED):
        return math.gcd(columns, 4)
    return math.gcd(columns, 2) if count <= limits.paired or not cached else 1


def has_dynamic_rows(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Return whether a float32 CPU product has dynamically many rows [R, K] and a column-contiguous matrix [K, N]."""
    is_supported = rows.device.type == "cpu" and rows.dtype == torch.float32 and matrix.stride(0) == 1
    return is_supported and bool(symbolic_shapes.symbols(rows)) and not symbolic_shapes.symbols(matrix)


def _multiply_transposed(
    graph: fx.Graph, node: fx.Node, rows: fx.Node, matrix: fx.Node, bias: fx.Node | None = None
) -> None:
    """Compute x W' as (W x')', which takes half the time for few rows and the same for many.

    Measured like `LIMITS`: 2 to 4 rows take 0.3 to 0.8 of the time, 8 rows 0.7 to 1.7, 16 and more 0.9 to 1.1.  In
    bfloat16 it is slower.
    """
    with graph.inserting_before(node):
        transposed = [call_aten(graph, aten.permute.default, operand, [1, 0]) for operand in (matrix, rows)]
        product = call_aten(graph, aten.permute.default, call_aten(graph, aten.mm.default, *transposed), [1, 0])
        if bias is not None:
            product = call_aten(graph, aten.add.Tensor, product, bias)
    _substitute(graph, node, product)


def batches(graph: fx.Graph, processor: Processor) -> list[fx.Node]:
    """Return the products of attention to write as multiply and sum.

    A library call ends a kernel.  Without one the compiler would make a single kernel of all layers, which could not
    share code.  So with more than `MOST_UNCUT_LAYERS` layers, products of probabilities and values stay with the
    library, unless those of queries and keys do.
    """
    found = [node for node in _all_batches(graph) if is_faster_as_sums(node, processor)]
    keys = [node for node in found if _is_of_keys(node)]
    return keys if keys and len(found) - len(keys) > MOST_UNCUT_LAYERS else found


def _all_batches(graph: fx.Graph) -> list[fx.Node]:
    """Return the CPU products [B, R, K] @ [B, K, N] that can be written as one sum per row."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        rows, matrix = (parent.meta["val"] for parent in node.args)
        dense = matrix.stride(1) == 1 or matrix.stride(2) == 1
        if rows.device.type == "cpu" and rows.dtype in DTYPES and dense and not isinstance(rows.shape[1], torch.SymInt):
            found.append(node)
    return found


def _without_batch(graph: fx.Graph, node: fx.Node) -> None:
    """Leave a product of one batch, of one row and one KV head, to the library as a product of two matrices.

    The compiler writes a stride of 0 for a dimension of size one, and the library copies all keys or values for it.
    """
    if symbolic_shapes.symbols(node.meta["val"]) or node.meta["val"].shape[0] != 1:
        return
    with graph.inserting_before(node):
        matrices = [call_aten(graph, aten.select.int, operand, 0, 0) for operand in node.args]
        product = call_aten(graph, aten.unsqueeze.default, call_aten(graph, aten.mm.default, *matrices), 0)
    _substitute(graph, node, product)


def is_faster_as_sums(node: fx.Node, processor: Processor) -> bool:
    """Return whether attention's product of [B, R, K] and [B, K, N] is faster as multiply and sum."""
    rows = node.args[0].meta["val"]  # type: ignore[union-attr]
    limits = processor.limits(rows.dtype)
    return bool(rows.shape[1] <= (limits.scores if _is_of_keys(node) else limits.values))


def _is_of_keys(node: fx.Node) -> bool:
    """Return whether a product is of queries and keys, whose columns are contiguous; of values, the rows are."""
    return bool(node.args[1].meta["val"].stride(1) == 1)  # type: ignore[union-attr]


def _replace_batch(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a product of rows [B, R, K] and matrices [B, K, N] by multiply and sum."""
    rows, matrix = node.args
    assert isinstance(rows, fx.Node)
    assert isinstance(matrix, fx.Node)
    with graph.inserting_before(node):
        stored, upcast = _buffered(graph, rows), _as(graph, matrix, torch.float32)
        columns = _columns(graph, upcast, column_parts(rows.meta["val"], matrix.meta["val"]))
        row_products = [_multiply_row(graph, stored, r, columns) for r in range(rows.meta["val"].shape[1])]
        result = _as(graph, call_aten(graph, aten.cat.default, row_products, 1), node.meta["val"].dtype)
    _substitute(graph, node, result)


def column_parts(rows: torch.Tensor, matrix: torch.Tensor) -> int:
    """Return the number of column parts for [B, R, K] @ [B, K, N], each a sum in one loop.

    A row of values is contiguous: a loop over one part would skip most of it, and another loop would read it again.
    """
    if matrix.stride(1) == 1:
        return 1
    lines = matrix.shape[2] * matrix.element_size() // CACHE_LINE
    limit = min(lines, MOST_SUMS // rows.shape[1])
    return math.gcd(matrix.shape[2], 1 << max(limit.bit_length() - 1, 0))


def _multiply_row(graph: fx.Graph, rows: fx.Node, row_index: int, columns: list[fx.Node]) -> fx.Node:
    """Multiply one row of [B, R, K] with columns [B, K, ...]; return [B, 1, N]."""
    row = call_aten(graph, aten.unsqueeze.default, call_aten(graph, aten.select.int, rows, 1, row_index), 2)
    products = [call_aten(graph, aten.mul.Tensor, part, row) for part in columns]
    sums = [call_aten(graph, aten.sum.dim_IntList, product, [1]) for product in products]
    return call_aten(graph, aten.unsqueeze.default, call_aten(graph, aten.cat.default, sums, 1), 1)


def _replace(graph: fx.Graph, node: fx.Node, stored: dict[fx.Node, fx.Node], parts: int) -> None:
    """Replace a product of rows [R, K] and a matrix [K, N], with or without bias, by multiply and sum.

    Args:
        stored: the buffered rows of earlier products.
        parts: of how many parts of the columns each row has a sum.
    """
    operands: Any = node.args
    *bias, rows, matrix = operands
    with graph.inserting_before(node):
        if rows not in stored:
            stored[rows] = _buffered(graph, rows)
        columns = _columns(graph, _as(graph, matrix, torch.float32), parts)
        result = _multiply(graph, stored[rows], columns)
        for each in bias:
            result = call_aten(graph, aten.add.Tensor, result, _as(graph, each, torch.float32))
        result = _as(graph, result, node.meta["val"].dtype)
    _substitute(graph, node, result)


def _buffered(graph: fx.Graph, rows: fx.Node) -> fx.Node:
    """Copy rows [..., R, K] as float32 to a buffer, so that their inputs are not computed anew per column.

    The multiplication by one serves rows that are views of a larger tensor.
    """
    copy = call_aten(graph, aten.mul.Scalar, _as(graph, rows, torch.float32), 1.0)
    return inductor.write_out(graph, copy, _strides(graph, copy))


def _strides(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """Return the strides of a dense tensor of a node's shape, as nodes where they are not numbers."""
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
    """Split a matrix [..., K, N] into parts of equally many columns."""
    if parts == 1:
        return [matrix]
    size, last = matrix.meta["val"].shape[-1] // parts, matrix.meta["val"].ndim - 1
    return [call_aten(graph, aten.slice.Tensor, matrix, last, part * size, (part + 1) * size) for part in range(parts)]


def _multiply(graph: fx.Graph, rows: fx.Node, columns: list[fx.Node]) -> fx.Node:
    """Multiply rows [R, K] with columns [K, ...] to [R, N], row by row in memory.

    Sums of one length share a loop.
    """
    count, sums = rows.meta["val"].shape[0], []
    for index in range(count):
        row = call_aten(graph, aten.unsqueeze.default, call_aten(graph, aten.select.int, rows, 0, index), 1)  # [K, 1]
        for part in columns:
            product = call_aten(graph, aten.mul.Tensor, part, row)
            sums.append(call_aten(graph, aten.sum.dim_IntList, product, [0]))
    joined = call_aten(graph, aten.cat.default, sums)
    return call_aten(graph, aten.view.default, joined, [count, joined.meta["val"].shape[0] // count])


def _as(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Convert a node to another dtype; `aten.to` would stay uncompiled, because decompositions have already run."""
    return (
        node if node.meta["val"].dtype == dtype else call_aten(graph, prims.convert_element_type.default, node, dtype)
    )
