"""Write the residual stream of a decode step to memory once per layer.

A layer adds its output to the stream.  The compiler would add up the terms of several layers wherever the stream is
read, and so make another kernel for every layer.  With the sums in buffers, layers share their kernels.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from kvpass.lowering.materialize import write_out
from kvpass.torch_private import symbolic_shapes

aten = torch.ops.aten


def write_out_sums(graph: fx.Graph) -> None:
    """Write sums [B, T, D] with several readers to buffers, in an aten graph with fixed sizes."""
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and len(node.users) > 1 and is_stream(node):
            write_out(graph, node, node.meta["val"].shape, node.meta["val"].stride())


def is_stream(node: fx.Node) -> bool:
    """Check whether a sum is dense and has two floating-point operands of its three-dimensional shape."""
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
