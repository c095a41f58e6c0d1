"""Drop bounds checks for indices that are an arange over the indexed dimension.

Masks use such lookups: `padding[rows, positions]`, where both indices count from 0 to the size of the dimension.  The
compiler cannot always prove this for a dynamic size, and then checks every index.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from kvpass.fx.shapes import expr
from kvpass.lowering.materialize import write_out
from kvpass.torch_private import inductor

aten, prims = torch.ops.aten, torch.ops.prims

REARRANGING = (
    aten.unsqueeze.default,
    aten.view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.clone.default,
)
"""Operators whose results contain only elements of their first operand."""


def look_up_unchecked(graph: fx.Graph) -> None:
    """Drop the bounds checks of indices that are in range, in an aten graph."""
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        table, indices = node.args
        sizes = table.meta["val"].shape
        aranges = [(_arange_of(index), size) for index, size in zip(indices, sizes, strict=False) if index is not None]
        if all(arange and expr(arange.meta["val"].shape[0]) == expr(size) for arange, size in aranges):
            node.target = aten._unsafe_index.Tensor
        elif inductor.CHECKS_TOO_EARLY:
            for arange in dict.fromkeys(arange for arange, _ in aranges if arange):
                write_out(graph, arange, arange.args, [1])  # the check then follows the load of the index


def _arange_of(index: fx.Node) -> fx.Node | None:
    """Return the node 0, 1, 2, ... whose elements an index consists of, or None."""
    while index.target in REARRANGING or _adds_zero(index):
        index = index.args[0]  # type: ignore[assignment]
    is_arange = index.target is prims.iota.default and (index.kwargs["start"], index.kwargs["step"]) == (0, 1)
    return index if is_arange else None


def _adds_zero(node: fx.Node) -> bool:
    number = node.args[1] if node.target is aten.add.Tensor else None
    return isinstance(number, int) and number == 0
