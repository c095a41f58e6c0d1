"""Products of a few rows with a matrix, for decode steps on a CPU.

A step of one conversation multiplies one row with every weight of the model.  That is bound by reading the weights,
but the matrix products of torch's libraries are made for many rows and reach about half of that.  Spelled as multiply
and sum, the compiler makes loops of it that read the weights about as fast as memory gives them, and fuses what comes
after.  Sums are in float32 whatever the dtype.

A small batch has the same from a linear layer in float32, one row after another, as long as its matrix stays in the
cache from row to row.  For larger matrices, other layouts and the dtypes that processors multiply themselves, the
libraries are the faster ones from two rows on.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from kvpass import compat
from kvpass.graphs import call_aten

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = 4  # rows; with 8 the libraries are as fast
CACHED = 8 << 20  # bytes of a matrix that a processor's last cache has room for


def spell_out(graph: fx.Graph) -> None:
    """Replace each `mm` and `addmm` of one row or a few on a CPU in a graph of aten's operators."""
    stored: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.mm.default and is_worth_it(*node.args):
            _replace(graph, node, stored, *node.args)
        if node.target is aten.addmm.default and not node.kwargs and is_worth_it(*node.args[1:]):
            bias, rows, matrix = node.args
            _replace(graph, node, stored, rows, matrix, bias)


def is_worth_it(rows: fx.Node, matrix: fx.Node) -> bool:
    """Whether a product of [R, K] and [K, N] is faster spelled out: on a CPU, and as the module says."""
    x, weight = rows.meta["val"], matrix.meta["val"]
    if x.device.type != "cpu" or x.dtype not in DTYPES:
        return False
    return x.shape[0] == 1 or (x.shape[0] <= FEW and _is_small_linear(weight))


def _is_small_linear(weight: torch.Tensor) -> bool:
    """Whether [K, N] is float32, its columns lie together in memory, and it fits a cache."""
    return weight.dtype == torch.float32 and weight.stride(0) == 1 and 4 * weight.numel() <= CACHED


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    stored: dict[fx.Node, fx.Node],
    rows: fx.Node,
    matrix: fx.Node,
    bias: fx.Node | None = None,
) -> None:
    """The product [R, N] of rows [R, K] and matrix [K, N], as multiply and sum; `stored` has rows made before."""
    with graph.inserting_before(node):
        if rows not in stored:
            stored[rows] = _stored(graph, rows)
        column = call_aten(graph, aten.unsqueeze.default, _wide(graph, matrix), 2)
        products = call_aten(graph, aten.mul.Tensor, column, stored[rows])  # [K, N, R]
        made = call_aten(graph, aten.sum.dim_IntList, products, [0])  # [N, R]
        made = compat.write_out(graph, made, [1, made.meta["val"].shape[0]])  # what follows reads row by row
        made = call_aten(graph, aten.permute.default, made, [1, 0])
        if bias is not None:
            made = call_aten(graph, aten.add.Tensor, made, _wide(graph, bias))
        made = call_aten(graph, aten.to.dtype, made, node.meta["val"].dtype)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _stored(graph: fx.Graph, rows: fx.Node) -> fx.Node:
    """Rows [R, K] as float32 [K, 1, R], in a buffer of their own.

    What the rows are computed from is so computed once, and not for every column.  The product with one is there for
    rows that are views of something larger.
    """
    own = call_aten(graph, aten.mul.Scalar, _wide(graph, rows), 1.0)
    written = compat.write_out(graph, own, [rows.meta["val"].shape[1], 1])
    return call_aten(graph, aten.unsqueeze.default, call_aten(graph, aten.permute.default, written, [1, 0]), 1)


def _wide(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call_aten(graph, aten.to.dtype, x, torch.float32)
