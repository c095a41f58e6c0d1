"""Check token ids and positions outside of compiled loops.

Inductor checks an index inside the loop that reads the table.  If several threads share the loop, the exception cannot
leave its thread and ends the process.  So an operator in front of the loop checks the row indices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.errors import LookupRangeError

aten = torch.ops.aten


torch.library.define("kvpass::checked_rows", "(Tensor index, int least, int rows) -> Tensor")


@torch.library.impl("kvpass::checked_rows", "CPU")
def checked_rows(index: Tensor, least: int, rows: int) -> Tensor:
    """Return row indices of a table with negative ones counted from the end, and check their range.

    It runs in every step, so it is no `custom_op`, whose wrapper takes as long as the check.

    Args:
        least: the lowest index allowed: 0, or -rows if negative indices count from the end.

    Raises:
        LookupRangeError: an index is outside of the table.
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


def _fake(index: Tensor, least: int, rows: int) -> Tensor:
    return torch.empty_like(index)


torch.library.register_fake("kvpass::checked_rows", _fake)


def check_rows(graph: fx.Graph) -> None:
    """Insert range checks before CPU lookups of table rows, in an aten graph."""
    for node in list(graph.nodes):
        lookup = _lookup(node)
        if lookup is None:
            continue
        table, index, least = lookup
        rows = table.meta["val"].shape[0]
        with graph.inserting_before(node):
            checked = graph.call_function(torch.ops.kvpass.checked_rows.default, (index, least, rows))
        checked.meta["val"] = torch.empty_like(index.meta["val"])
        node.target, node.args, node.kwargs = aten._unsafe_index.Tensor, (table, [checked]), {}


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Return the table, the index and the lowest index allowed of a lookup in floating-point rows, or None."""
    args: Any = node.args
    if node.target is aten.embedding.default:
        table, index, least = args[0], args[1], 0
    elif node.target is aten.index.Tensor and len(args[1]) == 1:
        (table, (index,)), least = args, -1
    else:
        return None
    val = table.meta["val"]
    rows = val.shape[0]
    is_checked = val.is_floating_point() and val.device.type == "cpu" and val.ndim <= 2 and isinstance(rows, int)
    if not is_checked or index is None or index.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    return table, index, least * rows
