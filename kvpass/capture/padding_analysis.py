"""Find the inputs that mark padding: a zero provably masks that token for every query.

A token that no query ever sees need not be stored.  Neither an input's shape nor the tokens that one mask hides prove
this.  So the model's own mask is evaluated for a token whose entry in the input is zero, with everything else unknown.
Numbers are intervals, followed along the axis over the tokens.  If the mask of that key is false in every case, or low
enough to hide it, the input marks padding.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx

from kvpass.capture.canonical import AttentionSite
from kvpass.capture.intervals import FALSE, Interval, evaluate, has_rule, in_dtype, unknown_bounds
from kvpass.fx import alias, op_table, propagation, walk
from kvpass.fx.precision import HIDDEN
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, value


@dataclasses.dataclass(frozen=True)
class TensorBounds:
    """The known bounds of a tensor.

    Attributes:
        overall: the bounds of all elements.
        at_token: by dimension, the bounds of the elements at the token's index along it.
        row_dim: the dimension over the input's rows, None if the input has one row for all.
    """

    overall: Interval
    at_token: dict[int, Interval]
    row_dim: int | None = None


def hiding_inputs(gm: fx.GraphModule, mask: fx.Node | None, step: bool) -> list[fx.Node]:
    """Return the inputs [B, S], [1, S] or [S] in which a zero hides its token in a mask.

    Args:
        mask: the mask [..., S] of an attention call, or None.
        step: whether the graph continues a cache.
    """
    if mask is None:
        return []
    computed_from = walk.ancestors(mask)
    if alias.writers_to(computed_from):  # a later write changes what the node's operation computed
        return []
    order = [node for node in gm.graph.nodes if node in computed_from]
    inputs = [node for node in order if node.op == "placeholder" and is_tensor(node) and value(node).ndim in (1, 2)]
    candidates = [node for node in inputs if not isinstance(value(node), torch.nn.Parameter)]
    return [node for node in candidates if _zero_hides(order, mask, node, step)]


def padding_inputs_of_sites(gm: fx.GraphModule, sites: list[AttentionSite], step: bool) -> list[tuple[fx.Node, ...]]:
    """Return for each site the inputs that mark padding: those that hide tokens in all masks on its cache."""
    masks = dict.fromkeys(each.mask for site in sites for each in site.all)
    hiding = {mask: hiding_inputs(gm, mask, step) for mask in masks}
    found = [[hiding[each.mask] for each in site.all] for site in sites]
    return [tuple(node for node in first if all(node in other for other in others)) for first, *others in found]


def _zero_hides(order: list[fx.Node], mask: fx.Node, candidate: fx.Node, step: bool) -> bool:
    """Return whether a zero in an input hides its token in the mask."""
    token_dim = value(candidate).ndim - 1
    dependent = {candidate}
    for node in order:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    relevant = dependent.union(*(node.all_input_nodes for node in dependent)) | _indices(order)
    order = [node for node in order if node in relevant]
    row_dim = None if token_dim == 0 or expr(value(candidate).shape[0]) == 1 else 0
    known = {candidate: TensorBounds(unknown_bounds(candidate), {token_dim: FALSE}, row_dim)}
    axes: dict[fx.Node, int] = {}  # of tensors that hold the keys' indices
    for node in order:
        if node not in known and not walk.is_size(node):
            known[node] = _with_rows(node, _evaluate(node, known, axes), known, axes)
        axis = _index_axis(node, step, axes)
        if axis is not None:
            axes[node] = axis
    bounds = known[mask].at_token.get(value(mask).ndim - 1)
    if row_dim is not None and (known[mask].row_dim != 0 or value(mask).ndim != 4):
        return False
    return bounds is not None and bounds.high <= (0.0 if value(mask).dtype == torch.bool else HIDDEN)


def _indices(order: list[fx.Node]) -> set[fx.Node]:
    """Return the tensors of integers and bools that depend on aranges."""
    found: set[fx.Node] = set()
    for node in order:
        if op_table.known_name(node) == "arange" or (is_tensor(node) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return {node for node in found if is_tensor(node) and not value(node).is_floating_point()}


def _index_axis(node: fx.Node, step: bool, axes: dict[fx.Node, int]) -> int | None:
    """Return the dimension along which a tensor holds the keys' indices 0, 1, ... in the padded sequence, or None.

    In a step they may start at a size, for a layer that stores its last tokens only.  `KeyAxis` proves that this size
    is the index of the first of them.
    """
    name = op_table.known_name(node)
    if is_tensor(node) and not op_table.holds_indices(value(node).dtype):
        return None
    if name == "arange":
        start = node.args[0] if len(node.args) == 2 else 0
        return 0 if len(node.args) < 3 and expr(start) == 0 else None
    parents = [parent for parent in node.all_input_nodes if is_tensor(parent)]
    if len(parents) != 1 or parents[0] not in axes or not is_tensor(node):
        return None
    if not op_table.is_a(node, "moves", "keeps") and not (name == "add" and _adds_offset(node, step)):
        return None
    return propagation.propagate_dim(node, parents[0], axes[parents[0]])


def _adds_offset(node: fx.Node, step: bool) -> bool:
    offsets = [arg for arg in node.args if not is_tensor(arg)]
    is_zero = bool(offsets) and isinstance(offsets[0], int) and offsets[0] == 0
    return not node.kwargs and len(offsets) == 1 and ((step and walk.is_size(offsets[0])) or is_zero)


def _evaluate(node: fx.Node, known: dict[fx.Node, TensorBounds], axes: dict[fx.Node, int]) -> TensorBounds:
    constant = _constant(node)
    if constant is not None:
        return TensorBounds(in_dtype(node, Interval(constant, constant)), {})
    lookup = propagation.lookup(node)
    if lookup is not None:
        return TensorBounds(unknown_bounds(node), _look_up_bounds(node, *lookup, known, axes))
    if op_table.is_a(node, "moves"):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in known:
            return TensorBounds(unknown_bounds(node), {})
        return TensorBounds(known[source].overall, _propagate_bounds(node, source, known))
    if not has_rule(node):
        return TensorBounds(unknown_bounds(node), {})
    at_token = {operand: _propagate_bounds(node, operand, known) for operand in node.all_input_nodes}

    def bounds_at(dim: int | None) -> Interval:
        """Evaluate the rule on all elements of the operands, or with those at the token along a dimension."""

        def bounds_of(operand: fx.Node) -> Interval:
            overall = known[operand].overall if operand in known else unknown_bounds(operand)
            return overall if dim is None else at_token[operand].get(dim, overall)

        return evaluate(node, bounds_of)

    return TensorBounds(bounds_at(None), {dim: bounds_at(dim) for dims in at_token.values() for dim in dims})


def _with_rows(
    node: fx.Node, bounds: TensorBounds, known: dict[fx.Node, TensorBounds], axes: dict[fx.Node, int]
) -> TensorBounds:
    """Add the dimension over rows to a result's bounds, and drop its bounds per token if rows may be mixed."""
    rows: set[int | None] = set()
    for parent in node.all_input_nodes:
        if parent in known and (row_dim := known[parent].row_dim) is not None:
            rows.add(_row_dim(node, parent, row_dim, axes))
    if not rows:
        return bounds
    return (
        TensorBounds(bounds.overall, {})
        if None in rows or len(rows) > 1
        else dataclasses.replace(bounds, row_dim=rows.pop())
    )


def _row_dim(node: fx.Node, parent: fx.Node, row_dim: int, axes: dict[fx.Node, int]) -> int | None:
    """Return the dimension over rows of a node, given that of an operand; None if rows may be mixed."""
    lookup = propagation.lookup(node)
    if lookup is None or lookup[0] is not parent:
        return propagation.propagate_dim(node, parent, row_dim)
    index = lookup[1].get(row_dim)
    if not isinstance(index, fx.Node) or index not in axes:
        return None
    return propagation.index_axis(node, index, axes[index])


def _propagate_bounds(node: fx.Node, operand: fx.Node, known: dict[fx.Node, TensorBounds]) -> dict[int, Interval]:
    """Return the bounds of an operand's elements at the token, by the dimensions of the result."""
    if operand not in known:
        return {}
    indices = {propagation.propagate_dim(node, operand, dim): bounds for dim, bounds in known[operand].at_token.items()}
    return {dim: bounds for dim, bounds in indices.items() if dim is not None}


def _look_up_bounds(
    node: fx.Node,
    base: fx.Node,
    indices: dict[int, object],
    known: dict[fx.Node, TensorBounds],
    axes: dict[fx.Node, int],
) -> dict[int, Interval]:
    """Return the bounds of a lookup's elements at the token: an index over the keys reads each token's own entry."""
    found: dict[int, Interval] = {}
    for dim, bounds in known[base].at_token.items() if base in known else ():
        index = indices.get(dim)
        if isinstance(index, fx.Node) and index in axes:
            axis = propagation.index_axis(node, index, axes[index])
            if axis is not None:
                found[axis] = bounds
    return found


def _constant(node: fx.Node) -> float | None:
    """Return the number that fills a tensor, if the code states it."""
    name, args = op_table.known_name(node), [*node.args, *node.kwargs.values()]
    if name in ("zeros", "new_zeros", "zeros_like"):
        return 0.0
    if name in ("ones", "new_ones", "ones_like"):
        return 1.0
    if name in ("full", "new_full", "full_like"):
        number = node.kwargs.get("fill_value", node.args[-1] if node.args else None)
        return float(number) if isinstance(number, (bool, int, float)) else None
    if name in ("tensor", "scalar_tensor") and isinstance(args[0], (bool, int, float)):
        return float(args[0])
    return None
