"""Drop bounds checks for indices that are an arange over the indexed dimension.

Masks use such lookups: `padding[rows, positions]`, where both indices count from 0 to the size of the dimension.  For a
dynamic size the compiler cannot always prove this, and checks every index.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from kvpass.fx.shapes import expr
from kvpass.lowering.materialize import write_out
from kvpass.torch_private import inductor

aten, prims = torch.ops.aten, torch.ops.prims

OF_ITS_NUMBERS = (
    aten.unsqueeze.default,
    aten.view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.clone.default,
)
"""Operators whose results contain only numbers of their first argument."""


def look_up_unchecked(graph: fx.Graph) -> None:
    """Drop the bounds checks of indices that are in range, in an aten graph."""
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        table, indices = node.args
        sizes = table.meta["val"].shape
        counted = [(_counter(place), size) for place, size in zip(indices, sizes, strict=False) if place is not None]
        if all(counter and expr(counter.meta["val"].shape[0]) == expr(size) for counter, size in counted):
            node.target = aten._unsafe_index.Tensor
        elif inductor.CHECKS_TOO_EARLY:
            for counter in dict.fromkeys(counter for counter, _ in counted if counter):
                write_out(graph, counter, counter.args, [1])  # the check then follows the load of the index


def _counter(index: fx.Node) -> fx.Node | None:
    """Return the node 0, 1, 2, ... from which all numbers of an index come, or None."""
    while index.target in OF_ITS_NUMBERS or _adds_nothing(index):
        index = index.args[0]  # type: ignore[assignment]
    counts = index.target is prims.iota.default and (index.kwargs["start"], index.kwargs["step"]) == (0, 1)
    return index if counts else None


def _adds_nothing(node: fx.Node) -> bool:
    number = node.args[1] if node.target is aten.add.Tensor else None
    return isinstance(number, int) and number == 0
