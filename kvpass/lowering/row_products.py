"""Products of a single row with a matrix, for decode steps on a CPU.

A step of one conversation multiplies one row with every weight of the model.  That is bound by reading the weights,
but the matrix products of torch's libraries are made for many rows and reach about half of that.  Spelled as multiply
and sum, the compiler makes loops of it that read the weights about as fast as memory gives them, and fuses what comes
after.  Sums are in float32 whatever the dtype.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from kvpass.graphs import call_aten

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def spell_out(graph: fx.Graph) -> None:
    """Replace each `mm` and `addmm` of a single row on a CPU in a graph of aten's operators."""
    stored: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.mm.default and is_of_one_row(node.args[0]):
            _replace(graph, node, stored, *node.args)
        if node.target is aten.addmm.default and not node.kwargs and is_of_one_row(node.args[1]):
            bias, row, matrix = node.args
            _replace(graph, node, stored, row, matrix, bias)


def is_of_one_row(rows: fx.Node) -> bool:
    """Whether the first operand is [1, K], floating-point and on a CPU."""
    x = rows.meta["val"]
    return x.device.type == "cpu" and x.dtype in DTYPES and x.shape[0] == 1


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    stored: dict[fx.Node, fx.Node],
    row: fx.Node,
    matrix: fx.Node,
    bias: fx.Node | None = None,
) -> None:
    """The product [1, N] of row [1, K] and matrix [K, N], as multiply and sum; `stored` has rows [K] made before."""
    with graph.inserting_before(node):
        if row not in stored:
            stored[row] = _stored(graph, row)
        products = call_aten(graph, aten.mul.Tensor, _wide(graph, matrix), stored[row])
        made = call_aten(graph, aten.sum.dim_IntList, products, [0])
        if bias is not None:
            made = call_aten(graph, aten.add.Tensor, made, _wide(graph, bias))
        made = call_aten(graph, aten.unsqueeze.default, made, 0)
        made = call_aten(graph, aten.to.dtype, made, node.meta["val"].dtype)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _stored(graph: fx.Graph, row: fx.Node) -> fx.Node:
    """The row [1, K] as float32 [K, 1], in a buffer of its own.

    Of a strided view the compiler makes a buffer: what the row is computed from is computed once, and not for every
    column.  The product with one is there for rows that are views of something larger.
    """
    own = call_aten(graph, aten.mul.Scalar, _wide(graph, row), 1.0)
    return call_aten(graph, aten.as_strided.default, own, [row.meta["val"].shape[1], 1], [1, 1])


def _wide(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call_aten(graph, aten.to.dtype, x, torch.float32)
