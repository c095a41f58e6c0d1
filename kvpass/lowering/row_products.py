"""Compute products of a few rows with a matrix by loops of the compiler, for decode steps on a CPU.

A decode step of one conversation multiplies one row with every weight of the model.  Reading the weights bounds its
time, but the matrix products of torch's libraries are made for many rows and reach about half of that bandwidth.
Written as multiply and sum, the product becomes loops of the compiler that read the weights in their own dtype at about
memory bandwidth, and fuse the operations that follow.  Sums are in float32 for every dtype.

A batch has one sum per row.  The compiler puts the sums into one loop, so weights are still read once and multiplied in
registers with every row.  A loop over two halves or four quarters of the columns has more loads in flight, because a
processor prefetches within a page of each.  The library keeps its rows in tiles and is faster from a number of rows
given in `LIMITS`.  The same is true for attention's products of queries and keys, and of probabilities and
values.

On processors with AVX2 or AVX-512 `row_kernel` multiplies with weights faster than both, and is used where it fits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import splicing
from kvpass.lowering import float32_products, row_kernel
from kvpass.lowering.formats.code_products import MAX_SUMS
from kvpass.torch_private import inductor, processor, symbolic_shapes, tensors

aten, prims = torch.ops.aten, torch.ops.prims
Function = Callable[..., torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8)  # dtypes of weights whose numbers all `DTYPES` have
MAX_UNCUT_LAYERS = 2  # layers that may become one kernel, because they share no code


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
    ("AVX512", torch.bfloat16, True): RowLimits(quartered=2, paired=4, cached=8, uncached=4, scores=3, values=4),
    ("AVX512", torch.float16, True): RowLimits(quartered=2, paired=4, cached=8, uncached=4, scores=3, values=4),
}
"""Row limits by vector instructions, by dtype, and by whether the processor has dot products of the dtype.

AVX512-BF16 and AMX have dot products of bfloat16.  The limits come from the last table that
`python -m benchmarks row_products` prints, for one thread, 1 to 16 rows and matrices that come from memory.  The rows
for AVX-512 without dot products of bfloat16 were measured by keeping the library from using them.  float16 with dot
products is assumed to behave like bfloat16.  Quarters, and values in float32, with AVX2 were timed on a processor that
has AVX-512 too.  The size of the matrix does not matter: it is read once.

Three rows of `scores` with AVX512-BF16 come from steps of SmolLM2-135M, which has three query heads for each KV head.
A step takes 0.90 (d2o), 0.91 (h2o), 0.94 (window), 0.95 (tova) and 1.01 (streaming) of the time with the library.
"""

MAX_QUARTERED_UNCACHED = 4
"""The largest number of `uncached` rows for which one loop takes four quarters, for every dtype."""

MAX_INTEGER_ROWS = 8
"""The number of rows up to which loops beat the library for integer weights, on any processor.

The library multiplies with a converted copy of the weights.
"""

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

    @property
    def has_row_kernel(self) -> bool:
        """Whether `row_kernel` runs here."""
        return self.vectors in ("AVX2", "AVX512") and inductor.targets_this_processor() and row_kernel.is_compiled()

    @staticmethod
    def here() -> Processor:
        """Return the properties of this machine's processor."""
        return Processor(processor.l1_cache_bytes(), processor.dot_products(), torch.backends.cpu.get_cpu_capability())

    def limits(self, dtype: torch.dtype) -> RowLimits:
        """Return the limits of products in a dtype."""
        has_dots = dtype in self.dots
        return LIMITS.get((self.vectors, dtype, has_dots)) or LIMITS[DEFAULT_VECTORS, dtype, has_dots]


def decompose_products(graph: fx.Graph) -> None:
    """Replace each `mm`, `addmm` and `bmm` of few rows on a CPU by multiply and sum, in an aten graph."""
    processor, stored, replacement = Processor.here(), dict[fx.Node, fx.Node](), _Replacement(graph)
    for node in batches(graph, processor):
        replacement.replace(node, _batch_of_sums, *node.args)
    for node in list(graph.nodes):
        if node.target is aten.mm.default or (node.target is aten.addmm.default and not node.kwargs):
            *bias, rows, matrix = node.args
            if has_dynamic_rows(rows.meta["val"], matrix.meta["val"]):
                replacement.replace(node, _transposed_product, rows, matrix, *bias)
                continue
            stored_matrix = _unconverted(matrix)
            tensors_read = rows.meta["val"], stored_matrix.meta["val"]
            if uses_row_kernel(*tensors_read, processor):
                function = _bind(_row_kernel, node.meta["val"].dtype)
                replacement.replace(node, function, rows, stored_matrix, *bias)
                continue
            if count := column_part_count(*tensors_read, processor):
                if rows not in stored:
                    stored[rows] = replacement.splice(node, _copy_to_buffer, rows)
                function = _bind(_sums, count, node.meta["val"].dtype)
                replacement.replace(node, function, stored[rows], stored_matrix, *bias)
    for node in _all_batches(graph):
        if node.meta["val"].shape[0] == 1 and not symbolic_shapes.symbols(node.meta["val"]):
            replacement.replace(node, _one_batch, *node.args)


def convert_operands(graph: fx.Graph) -> None:
    """Convert operands of CPU products of many rows to dtypes that the library multiplies fast, in an aten graph.

    Inductor would multiply with int8 weights by torch's own product, which takes three times as long for many rows.
    """
    replacement = _Replacement(graph)
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            continue
        value = node.meta["val"]
        if value.device.type != "cpu":
            continue
        in_float32 = float32_products.is_faster(value.dtype) and not node.kwargs
        if node.target is aten.bmm.default:
            count = value.shape[1]  # of rows; `float32_products` leaves a small number to torch
            if in_float32 and not (isinstance(count, int) and count < float32_products.MIN_ROWS):
                replacement.replace(node, _float32_batch, *node.args)
            continue
        *bias, rows, matrix = node.args
        stored = _unconverted(matrix)
        if in_float32:
            replacement.replace(node, _float32_product, rows, stored, *bias)
        elif stored is not matrix:
            function = _bind(_converted, matrix.meta["val"].dtype)
            node.replace_input_with(matrix, replacement.splice(node, function, stored))


def _unconverted(matrix: fx.Node) -> fx.Node:
    """Return integer weights before their conversion to the dtype of the rows, adding a permute of them if needed.

    The conversion changes no number.  Loops then read one byte per weight, and not a converted copy of all weights.
    """
    source = matrix.args[0] if matrix.args else None
    if not isinstance(source, fx.Node):
        return matrix
    if matrix.target is prims.convert_element_type.default and source.meta["val"].dtype in INTEGERS:
        return source
    if matrix.target is not aten.permute.default or (stored := _unconverted(source)) is source:
        return matrix
    with matrix.graph.inserting_before(matrix):
        permuted = matrix.graph.call_function(aten.permute.default, (stored, *matrix.args[1:]))
    permuted.meta["val"] = stored.meta["val"].permute(*matrix.args[1:])
    return permuted


_bind: Callable[..., Function] = functools.cache(functools.partial)
"""Return a function with some first arguments, always the same object, because traces are shared by it."""


class _Replacement:
    """Replace nodes of an aten graph by functions of other nodes' values; equal functions share a trace."""

    def __init__(self, graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        self.graph, self._gm, self._traced = graph, graph.owning_module, dict[Any, fx.GraphModule]()

    def replace(self, node: fx.Node, function: Function, *operands: Any) -> None:
        node.replace_all_uses_with(self.splice(node, function, *operands))
        self.graph.erase_node(node)

    def splice(self, before: fx.Node, function: Function, *operands: Any) -> fx.Node:
        """Return the node of a function's result, computed before another node."""
        values = [operand.meta["val"] for operand in operands]
        key = function, str([(x.shape, x.stride(), x.dtype) for x in values])
        if key not in self._traced:
            with torch.autocast("cpu", enabled=False):  # it would change the dtypes of the products that are traced
                self._traced[key] = tensors.trace(function, values)
        spliced: list[fx.Node] = splicing.splice(self._gm, self._traced[key], list(operands), before, "rows")
        return spliced[0]


def has_static_rows(rows: torch.Tensor) -> bool:
    """Return whether rows [R, K] on a CPU have a dtype of `DTYPES` and a static number, one sum each."""
    return rows.device.type == "cpu" and rows.dtype in DTYPES and not symbolic_shapes.symbols(rows)


def uses_row_kernel(rows: torch.Tensor, matrix: torch.Tensor, processor: Processor) -> bool:
    """Return whether `row_kernel` computes [R, K] @ [K, N]."""
    return processor.has_row_kernel and has_static_rows(rows) and row_kernel.fits(rows, matrix)


def column_part_count(rows: torch.Tensor, matrix: torch.Tensor, processor: Processor) -> int:
    """Return the number of column parts for [R, K] @ [K, N], or 0 if the library is faster."""
    if not has_static_rows(rows):
        return 0
    count, columns = rows.shape[0], matrix.shape[1]
    if matrix.stride(0) != 1:
        return int(count == 1)  # columns are not contiguous, as in GPT-2
    limits = processor.limits(rows.dtype)
    cached = 4 * rows.numel() <= processor.cache // 2
    integer_rows = MAX_INTEGER_ROWS if matrix.dtype in INTEGERS else 0
    if count > max(limits.cached if cached else limits.uncached, integer_rows):
        return 0
    if count <= (limits.quartered if cached else MAX_QUARTERED_UNCACHED):
        return math.gcd(columns, 4)
    return math.gcd(columns, 2) if count <= limits.paired or not cached else 1


def has_dynamic_rows(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Return whether a float32 CPU product has dynamically many rows [R, K] and a column-contiguous matrix [K, N]."""
    is_supported = rows.device.type == "cpu" and rows.dtype == torch.float32 and matrix.stride(0) == 1
    return is_supported and bool(symbolic_shapes.symbols(rows)) and not symbolic_shapes.symbols(matrix)


def batches(graph: fx.Graph, processor: Processor) -> list[fx.Node]:
    """Return the products of attention to write as multiply and sum.

    A library call ends a kernel.  Without such a call the compiler would make one kernel of all layers, which could not
    share code.  So with more than `MAX_UNCUT_LAYERS` layers, products of probabilities and values stay with the
    library, unless products of queries and keys do.
    """
    found = [node for node in _all_batches(graph) if is_faster_as_sums(node, processor)]
    keys = [node for node in found if _is_of_keys(node)]
    return keys if keys and len(found) - len(keys) > MAX_UNCUT_LAYERS else found


def _all_batches(graph: fx.Graph) -> list[fx.Node]:
    """Return the CPU products [B, R, K] @ [B, K, N] that can be written as one sum per row."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        rows, matrix = (parent.meta["val"] for parent in node.args)
        dense = matrix.stride(1) == 1 or matrix.stride(2) == 1
        if rows.device.type == "cpu" and rows.dtype in DTYPES and dense and not isinstance(rows.shape[1], torch.SymInt):
            found.append(node)
    return found


def is_faster_as_sums(node: fx.Node, processor: Processor) -> bool:
    """Return whether attention's product of [B, R, K] and [B, K, N] is faster as multiply and sum."""
    rows = node.args[0].meta["val"]  # type: ignore[union-attr]
    limits = processor.limits(rows.dtype)
    return bool(rows.shape[1] <= (limits.scores if _is_of_keys(node) else limits.values))


def _is_of_keys(node: fx.Node) -> bool:
    """Return whether a product is of queries and keys, whose columns are contiguous; with values, rows are."""
    return bool(node.args[1].meta["val"].stride(1) == 1)  # type: ignore[union-attr]


def column_parts(rows: torch.Tensor, matrix: torch.Tensor) -> int:
    """Return the number of column parts for [B, R, K] @ [B, K, N], each a sum in one loop.

    A row of values is contiguous: a loop over one part would skip most of it, and another loop would read it again.
    """
    if matrix.stride(1) == 1:
        return 1
    lines = matrix.shape[2] * matrix.element_size() // row_kernel.CACHE_LINE
    limit = min(lines, MAX_SUMS // rows.shape[1])
    return math.gcd(matrix.shape[2], 1 << max(limit.bit_length() - 1, 0))


# -- functions that are traced to aten's operators, after which no decomposition runs -------------------------------


def _transposed_product(rows: torch.Tensor, matrix: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    """Compute x W' as (W x')', which takes half the time for few rows and the same for many.

    Measured like `LIMITS`: 2 to 4 rows take 0.3 to 0.8 of the time, 8 rows 0.7 to 1.7, 16 and more 0.9 to 1.1.  In
    bfloat16 it is slower.
    """
    product = torch.mm(matrix.permute(1, 0), rows.permute(1, 0)).permute(1, 0)
    return _with_bias(product, bias, torch.float32)


def _one_batch(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply one batch, of one row and one KV head, as two matrices by the library.

    The compiler writes a stride of 0 for a dimension of size one, and the library copies all keys or values for it.
    """
    return torch.mm(rows.select(0, 0), matrix.select(0, 0)).unsqueeze(0)


def _batch_of_sums(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply rows [B, R, K] with matrices [B, K, N] by multiply and sum."""
    stored, parts = _copy_to_buffer(rows), _columns(_convert(matrix, torch.float32), column_parts(rows, matrix))
    products = []
    for index in range(rows.shape[1]):
        row = stored.select(1, index).unsqueeze(2)
        products.append(torch.cat([(part * row).sum(1) for part in parts], 1).unsqueeze(1))
    return _convert(torch.cat(products, 1), rows.dtype)


def _sums(
    count: int, dtype: torch.dtype, rows: torch.Tensor, matrix: torch.Tensor, *bias: torch.Tensor
) -> torch.Tensor:
    """Multiply buffered rows [R, K] with a matrix [K, N] in parts of its columns, row by row in memory.

    Sums of one length share a loop.
    """
    parts = _columns(_convert(matrix, torch.float32), count)
    each = [rows.select(0, index).unsqueeze(1) for index in range(rows.shape[0])]  # [K, 1]
    joined = torch.cat([(part * row).sum(0) for row in each for part in parts])
    return _with_bias(joined.view(rows.shape[0], joined.shape[0] // rows.shape[0]), bias, dtype)


def _row_kernel(dtype: torch.dtype, rows: torch.Tensor, matrix: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    """Multiply rows [R, K] with a matrix [K, N] by the C++ kernel."""
    if not row_kernel.uses_dot_products(rows.dtype, matrix.dtype):
        rows = _convert(rows, torch.float32)
    return _with_bias(row_kernel.multiply(rows, matrix), bias, dtype)


def _float32_product(rows: torch.Tensor, matrix: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    """Multiply many rows [R, K] of 16 bits with a matrix [K, N] by `float32_products`."""
    product: torch.Tensor = torch.ops.kvpass.float32_product(rows, matrix, *(bias or (None,)))
    return product


def _float32_batch(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply rows [B, R, K] of 16 bits with matrices [B, K, N] in float32."""
    product = torch.bmm(_convert(rows, torch.float32), _convert(matrices, torch.float32))
    return _convert(product, rows.dtype)


def _with_bias(product: torch.Tensor, bias: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Add the bias, if there is one, to a product in float32, and convert the sum."""
    return _convert(functools.reduce(torch.add, [_convert(x, torch.float32) for x in bias], product), dtype)


def _copy_to_buffer(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows [..., R, K] as float32 to a buffer, so that no column computes their inputs again.

    The multiplication by one serves rows that are views of a larger tensor.
    """
    return inductor.to_buffer(aten.mul.Scalar(_convert(rows, torch.float32), 1.0))


def _converted(dtype: torch.dtype, matrix: torch.Tensor) -> torch.Tensor:
    """Convert int8 weights [K, N], and write the result to a buffer."""
    if matrix.stride(0) == 1:
        return inductor.to_buffer(_convert(matrix.permute(1, 0), dtype)).permute(1, 0)
    return inductor.to_buffer(_convert(matrix, dtype))


def _columns(matrix: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Split a matrix [..., K, N] into parts with equal numbers of columns."""
    size = matrix.shape[-1] // parts
    return [matrix] if parts == 1 else [matrix.narrow(-1, part * size, size) for part in range(parts)]


def _convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to another dtype; `to` would stay uncompiled, because decompositions have already run."""
    converted: torch.Tensor = x if x.dtype == dtype else prims.convert_element_type(x, dtype)
    return converted
