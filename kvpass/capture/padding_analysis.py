"""Find the inputs that mark padding: a zero provably masks that token for every query.

A token that no query ever sees need not be stored.  Neither an input's shape nor the hidden tokens of one mask prove
this.  So the model's own mask is evaluated for a token whose entry in the input is zero, with everything else unknown.
Numbers are intervals, followed along the axis over the tokens.  If the mask of that key is false in every case, or low
enough to hide it, the input marks padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.fx as fx

from kvpass.capture.canonical import AttentionSite, attention_calls
from kvpass.capture.intervals import FALSE, Interval, evaluate, has_rule, in_dtype, unknown_bounds
from kvpass.fx import alias, op_table, propagation, walk
from kvpass.fx.precision import HIDDEN
from kvpass.fx.shapes import expr
from kvpass.fx.walk import example_value, is_tensor


@dataclasses.dataclass(frozen=True)
class TensorBounds:
    """The known bounds of a tensor.

    Attributes:
        overall: the bounds of all elements.
        at_token: by dimension, the bounds of the elements at the token's index along it.
        row_dim: the dimension over the input's rows, None if all rows share one row of the input.
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
    if alias.writers_to(computed_from):  # a later write changes the values that the node's operation computed
        return []
    order = [node for node in gm.graph.nodes if node in computed_from]
    inputs = [
        node for node in order if node.op == "placeholder" and is_tensor(node) and example_value(node).ndim in (1, 2)
    ]
    candidates = [node for node in inputs if not isinstance(example_value(node), torch.nn.Parameter)]
    return [node for node in candidates if _zero_hides(order, mask, node, step)]


def padding_inputs_of_sites(
    canonical_gm: fx.GraphModule, sites: list[AttentionSite], step: bool
) -> list[tuple[fx.Node, ...]]:
    """Return for each site the inputs that mark padding: inputs that hide tokens in all masks on its cache."""
    masks = dict.fromkeys(each.mask for each in attention_calls(sites))
    hiding = {mask: hiding_inputs(canonical_gm, mask, step) for mask in masks}
    inputs_by_mask = [[hiding[each.mask] for each in site.attention_calls] for site in sites]
    return [
        tuple(node for node in first if all(node in other for other in others)) for first, *others in inputs_by_mask
    ]


def _zero_hides(order: list[fx.Node], mask: fx.Node, candidate: fx.Node, step: bool) -> bool:
    """Return whether a zero in an input hides its token in the mask."""
    dependent = {candidate}
    for node in order:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    relevant = dependent.union(*(node.all_input_nodes for node in dependent)) | _indices(order)
    row_dim = None if example_value(candidate).ndim == 1 or expr(example_value(candidate).shape[0]) == 1 else 0
    evaluation = _Evaluation(candidate, row_dim, step)
    for node in order:
        if node in relevant:
            evaluation.add(node)
    mask_bounds = evaluation.bounds[mask]
    if row_dim is not None and (mask_bounds.row_dim != 0 or example_value(mask).ndim != 4):
        return False
    bounds = mask_bounds.at_token.get(example_value(mask).ndim - 1)
    return bounds is not None and bounds.high <= (0.0 if example_value(mask).dtype == torch.bool else HIDDEN)


def _indices(order: list[fx.Node]) -> set[fx.Node]:
    """Return the tensors of integers and bools that depend on aranges."""
    counting: set[fx.Node] = set()
    for node in order:
        if op_table.operator_name(node) == "arange" or (
            is_tensor(node) and not counting.isdisjoint(node.all_input_nodes)
        ):
            counting.add(node)
    return {node for node in counting if is_tensor(node) and not example_value(node).is_floating_point()}


class _Evaluation:
    """The bounds of tensors that are computed from an input with a zero at a token.

    Attributes:
        bounds: the bounds of each tensor.
        axes: for tensors that hold the keys' indices, the dimension along which they count.
    """

    def __init__(self, candidate: fx.Node, row_dim: int | None, step: bool) -> None:
        self.step, self.axes = step, dict[fx.Node, int]()
        at_token = {example_value(candidate).ndim - 1: FALSE}
        self.bounds = {candidate: TensorBounds(unknown_bounds(candidate), at_token, row_dim)}

    def add(self, node: fx.Node) -> None:
        """Evaluate a node; its operands come before it."""
        if node not in self.bounds and not walk.is_size(node):
            self.bounds[node] = self._with_rows(node, self._evaluate(node))
        axis = self._index_axis(node)
        if axis is not None:
            self.axes[node] = axis

    def _index_axis(self, node: fx.Node) -> int | None:
        """Return the dimension along which a tensor holds the keys' indices 0, 1, ... in the padded sequence, or None.

        In a step they may start at a size, for a layer that stores its last tokens only.  `KeyAxis` proves that this
        size is the index of the first of these tokens.
        """
        name = op_table.operator_name(node)
        if is_tensor(node) and not op_table.holds_indices(example_value(node).dtype):
            return None
        if name == "arange":
            start = node.args[0] if len(node.args) == 2 else 0
            return 0 if len(node.args) < 3 and expr(start) == 0 else None
        parents = [parent for parent in node.all_input_nodes if is_tensor(parent)]
        if len(parents) != 1 or parents[0] not in self.axes or not is_tensor(node):
            return None
        if not op_table.has_tag(node, "moves", "keeps") and not (name == "add" and self._adds_offset(node)):
            return None
        return propagation.propagate_dim(node, parents[0], self.axes[parents[0]])

    def _adds_offset(self, node: fx.Node) -> bool:
        offsets = [arg for arg in node.args if not is_tensor(arg)]
        is_zero = bool(offsets) and isinstance(offsets[0], int) and offsets[0] == 0
        return not node.kwargs and len(offsets) == 1 and ((self.step and walk.is_size(offsets[0])) or is_zero)

    def _evaluate(self, node: fx.Node) -> TensorBounds:
        constant, unknown = op_table.constant(node), unknown_bounds(node)
        if constant is not None:
            return TensorBounds(in_dtype(node, Interval(constant, constant)), {})
        if (lookup := propagation.lookup(node)) is not None:
            base, indices = lookup
            return TensorBounds(unknown, self._at_token(base, lambda dim: self._entry_axis(node, indices.get(dim))))
        if op_table.has_tag(node, "moves"):
            source = node.args[0] if node.args else None
            if not isinstance(source, fx.Node) or source not in self.bounds:
                return TensorBounds(unknown, {})
            return TensorBounds(self.bounds[source].overall, self._propagate(node, source))
        if not has_rule(node):
            return TensorBounds(unknown, {})
        at_token = {operand: self._propagate(node, operand) for operand in node.all_input_nodes}

        def bounds_at(dim: int | None) -> Interval:
            """Evaluate the rule on all elements of the operands, or on the elements at the token along a dimension."""

            def bounds_of(operand: fx.Node) -> Interval:
                overall = self.bounds[operand].overall if operand in self.bounds else unknown_bounds(operand)
                return overall if dim is None else at_token[operand].get(dim, overall)

            return evaluate(node, bounds_of)

        return TensorBounds(bounds_at(None), {dim: bounds_at(dim) for dims in at_token.values() for dim in dims})

    def _with_rows(self, node: fx.Node, bounds: TensorBounds) -> TensorBounds:
        """Add the dimension over rows to a result's bounds, and drop its bounds per token if rows may be mixed."""
        known = {parent: self.bounds[parent].row_dim for parent in node.all_input_nodes if parent in self.bounds}
        rows = {parent: dim for parent, dim in known.items() if dim is not None}
        if not rows:
            return bounds
        row_dim = propagation.common_dim(self._row_dim(node, parent, dim) for parent, dim in rows.items())
        return TensorBounds(bounds.overall, {}) if row_dim is None else dataclasses.replace(bounds, row_dim=row_dim)

    def _row_dim(self, node: fx.Node, parent: fx.Node, row_dim: int) -> int | None:
        """Return the dimension over rows of a node, given the dimension of an operand; None if rows may be mixed."""
        lookup = propagation.lookup(node)
        if lookup is None or lookup[0] is not parent:
            return propagation.propagate_dim(node, parent, row_dim)
        return self._entry_axis(node, lookup[1].get(row_dim))

    def _propagate(self, node: fx.Node, operand: fx.Node) -> dict[int, Interval]:
        return self._at_token(operand, functools.partial(propagation.propagate_dim, node, operand))

    def _at_token(self, operand: fx.Node, follow: Callable[[int], int | None]) -> dict[int, Interval]:
        """Return the bounds of an operand's elements at the token, by the dimensions of the result."""
        at_token = self.bounds[operand].at_token if operand in self.bounds else {}
        followed = {follow(dim): bounds for dim, bounds in at_token.items()}
        return {dim: bounds for dim, bounds in followed.items() if dim is not None}

    def _entry_axis(self, node: fx.Node, index: object) -> int | None:
        """Return the dimension along which a lookup reads each token's own entry; None for other indices."""
        if not isinstance(index, fx.Node) or index not in self.axes:
            return None
        return propagation.index_axis(node, index, self.axes[index])
