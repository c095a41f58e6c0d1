"""The residual stream of a decode step, written to memory once in every layer.

A layer adds what it computes to the stream.  The compiler would rather add up the terms of the last few layers
wherever the stream is read, which makes another kernel of every layer.  Where the sums are written out, layers share
their kernels, and fewer are compiled.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from kvpass.lowering.materialize import write_out
from kvpass.torch_private import symbolic_shapes

aten = torch.ops.aten


def write_out_sums(graph: fx.Graph) -> None:
    """Have sums [B, T, D] with several readers written to buffers, in a graph of aten's operators with fixed sizes."""
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and len(node.users) > 1 and is_stream(node):
            write_out(graph, node, node.meta["val"].shape, node.meta["val"].stride())


def is_stream(node: fx.Node) -> bool:
    """Whether a sum is of two floating-point tensors of the same three dimensions, and dense."""
    values = [node.meta["val"], *(parent.meta["val"] for parent in node.args if isinstance(parent, fx.Node))]
    if any(map(symbolic_shapes.symbols, values)):
        return False
    shapes = {value.shape for value in values}
    total = values[0]
    return (
        len(values) == 3
        and len(shapes) == 1
        and total.ndim == 3
        and total.is_floating_point()
        and total.is_contiguous()
    )
