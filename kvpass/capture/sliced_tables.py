"""Replace slices of precomputed rotary embeddings by lookups of positions.

    before   angles = table[past : past + q]              after    position = arange(past, past + q)
                                                                   angles = index_select(table, 0, position)

Hand-written models often precompute the angles of all positions and slice this table by the number of cached tokens.
After the change they read positions, as in models that look their angles up, and every later stage treats both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.capture import rotary
from kvpass.capture.canonical import AttentionSite
from kvpass.fx import alias, op_table, shapes, splicing, walk
from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import dynamo


def index_sliced_tables(graph: fx.Graph, sites: Sequence[AttentionSite]) -> None:
    """Replace the slices of tables that rotate queries or keys; other slices stay, such as a part of a weight.

    A slice is replaced if it has one entry for each new token, and these lie along the tokens of a query or key.  In a
    prompt it must start at the first entry, because nothing shows which positions another start would mean.
    """
    dims = {node: dim for node in graph.nodes if (dim := _sliced_dim(node, sites[0])) is not None}
    if not dims:
        return
    alias_sets, positions = alias.AliasSets(graph), dict[Any, fx.Node]()
    rotated = [node for site in sites for node in (site.key, *(each.query for each in site.attention_calls))]
    behind = [(node, rotary.nodes_behind(node)) for node in rotated]
    for node, dim in dims.items():
        first = next((each for each, computed_from in behind if node in computed_from), None)
        if alias_sets.writers(node) or first is None or rotary.follow_to(node, dim, first) != 2:
            continue
        table, part = walk.operand_of(node), op_table.subscript(node)[dim]
        key = shapes.expr(part.start or 0), shapes.expr(part.stop), example_value(table).device
        if key not in positions:  # one node for all tables, as a key is rotated by one tensor of positions
            positions[key] = _count_entries(node, dim)
        lookup = splicing.emit_before(node, torch.index_select, table, dim, positions[key])
        node.replace_all_uses_with(lookup)
        graph.erase_node(node)


def _sliced_dim(node: fx.Node, site: AttentionSite) -> int | None:
    """Return the dimension along which a node slices q adjacent entries of a table; None for any other node."""
    if op_table.operator_name(node) != "getitem" or not is_tensor(node.args[0]):
        return None
    table, parts = node.args[0], op_table.subscript(node)
    if not dynamo.is_attribute_of_module(table) or not walk.is_inexact(example_value(table)):
        return None
    cut = [dim for dim, part in enumerate(parts) if not op_table.keeps_whole_dimension(part)]
    if len(cut) != 1 or Ellipsis in parts[: cut[0]] or not isinstance(part := parts[cut[0]], slice):
        return None
    start, stop = part.start or 0, part.stop
    if part.step not in (None, 1) or not (_is_count(start) and _is_count(stop)):
        return None
    if not isinstance(example_value(table).shape[cut[0]], int) or (site.past_key is None and start != 0):
        return None
    counted, size = shapes.expr(stop) - shapes.expr(start), shapes.expr(example_value(node).shape[cut[0]])
    return cut[0] if sympy.expand(counted - size) == 0 and size == shapes.expr(site.query_len) else None


def _is_count(bound: Any) -> bool:
    return walk.is_size(bound) or (isinstance(bound, int) and bound >= 0)


def _count_entries(node: fx.Node, dim: int) -> fx.Node:
    """Add the positions of the entries that a slice takes, int64 [q], before its node."""
    part, table = op_table.subscript(node)[dim], example_value(walk.operand_of(node))
    bounds = (part.start, part.stop) if part.start else (part.stop,)
    counted = table.new_zeros((example_value(node).shape[dim],), dtype=torch.int64)
    return splicing.emit_before(node, torch.arange, *bounds, value=counted, device=table.device)
