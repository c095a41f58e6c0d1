"""Checks of token ids and positions outside of compiled loops.

Inductor checks an index inside of the loop that reads the table.  Where several threads share the loop, the exception
cannot leave its thread and ends the process.  So the rows of a table are checked by an operator in front of the loop.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.errors import LookupRangeError

aten = torch.ops.aten


@torch.library.custom_op("kvpass::checked_rows", mutates_args=())
def checked_rows(index: Tensor, least: int, rows: int) -> Tensor:
    """Return the numbers of rows in a table, counted from its first row.

    Args:
        index: integers; least: the lowest one allowed, 0, or -rows where negative ones count from the end.

    Raises:
        LookupRangeError: a number outside of the table.
    """
    if index.numel():
        low, high = (int(end) for end in index.aminmax())
        if low < least or high >= rows:
            wrong = low if low < least else high
            raise LookupRangeError(
                f"index {wrong} is looked up in a table of {rows} rows: a token id outside of the vocabulary, or a "
                "position past the model's last; check the ids, and keep the conversation within the model's positions"
            )
    return index.clone() if least == 0 else torch.where(index < 0, index + rows, index)


@checked_rows.register_fake
def _(index: Tensor, least: int, rows: int) -> Tensor:
    return torch.empty_like(index)


def check_rows(graph: fx.Graph) -> None:
    """Check lookups of a table's rows on a CPU beforehand, in a graph of aten's operators."""
    for node in list(graph.nodes):
        found = _lookup(node)
        if found is None:
            continue
        table, index, least = found
        rows = table.meta["val"].shape[0]
        with graph.inserting_before(node):
            checked = graph.call_function(torch.ops.kvpass.checked_rows.default, (index, least, rows))
        checked.meta["val"] = torch.empty_like(index.meta["val"])
        node.target, node.args, node.kwargs = aten._unsafe_index.Tensor, (table, [checked]), {}


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """The table, the index and the lowest number allowed, if this looks up rows of a table of numbers."""
    arguments: Any = node.args
    if node.target is aten.embedding.default:
        table, index, least = arguments[0], arguments[1], 0
    elif node.target is aten.index.Tensor and len(arguments[1]) == 1:
        (table, (index,)), least = arguments, -1
    else:
        return None
    values = table.meta["val"]
    rows = values.shape[0]
    numbers = values.is_floating_point() and values.device.type == "cpu" and values.ndim <= 2 and isinstance(rows, int)
    if not numbers or index is None or index.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    return table, index, least * rows
