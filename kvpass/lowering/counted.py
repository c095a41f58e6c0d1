"""Lookups at places that count a dimension, which need nobody to check that they are in range.

Masks are made so: `padding[rows, places]`, where both are counted out from 0 to the size of what is looked up in.  The
compiler cannot always see that of an open size, and checks every place.  (That of torch 2.11 writes such a check before
what it checks, which is no C++.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from kvpass.graphs import expr

aten, prims = torch.ops.aten, torch.ops.prims

OF_ITS_NUMBERS = (
    aten.unsqueeze.default,
    aten.view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.clone.default,
)
"""Operators that give numbers of their first argument and no others."""


def look_up_unchecked(graph: fx.Graph) -> None:
    """Leave out the check of places that are in range, in a graph of aten's operators."""
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        table, places = node.args
        sizes = table.meta["val"].shape
        if all(place is None or counts(place, size) for place, size in zip(places, sizes, strict=False)):
            node.target = aten._unsafe_index.Tensor


def counts(place: fx.Node, size: Any) -> bool:
    """Whether all its numbers are from 0 up to a size that is left out."""
    while place.target in OF_ITS_NUMBERS or _adds_nothing(place):
        place = place.args[0]  # type: ignore[assignment]
    if place.target is not prims.iota.default or (place.kwargs["start"], place.kwargs["step"]) != (0, 1):
        return False
    return bool(expr(place.meta["val"].shape[0]) == expr(size))


def _adds_nothing(node: fx.Node) -> bool:
    number = node.args[1] if node.target is aten.add.Tensor else None
    return isinstance(number, int) and number == 0
