"""Find the inputs that mark padding: a zero provably masks that token for every query.

A token that no query ever sees need not be stored.  Neither an input's shape nor the tokens that one mask hides prove
this.  So the model's own mask is evaluated for a token whose entry in the input is zero, with everything else unknown.
Numbers are intervals, followed along the axis over the tokens.  If the mask of that key is false in every case, or low
enough to hide it, the input marks padding.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import alias, op_table, walk
from kvpass.fx.precision import HIDDEN
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, value

LARGE = 1e30
"""Bound of all numbers that a model computes at run time; constants in its code may be larger."""

Interval = tuple[float, float]


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


def padding_inputs(gm: fx.GraphModule, masks: list[fx.Node | None], step: bool) -> tuple[fx.Node, ...]:
    """Return the inputs that hide tokens in all masks of the attention calls on one cache.

    Args:
        masks: the mask of each call, at least one.
        step: whether the graph continues a cache.
    """
    first, *others = [hiding_inputs(gm, mask, step) for mask in masks]
    return tuple(node for node in first if all(node in other for other in others))


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
    known = {candidate: TensorBounds(_anything(candidate), {token_dim: (0.0, 0.0)}, row_dim)}
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
    return bounds is not None and bounds[1] <= (0.0 if value(mask).dtype == torch.bool else HIDDEN)


def _indices(order: list[fx.Node]) -> set[fx.Node]:
    """Return the tensors of integers and bools that depend on aranges."""
    found: set[fx.Node] = set()
    for node in order:
        if op_table.known_name(node) == "arange" or (is_tensor(node) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return {node for node in found if is_tensor(node) and not value(node).is_floating_point()}


def _anything(node: fx.Node) -> Interval:
    tensor = value(node)
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bool:
        return (0.0, 1.0)
    return (-LARGE, LARGE)


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
    return op_table.propagate_dim(node, parents[0], axes[parents[0]])


def _adds_offset(node: fx.Node, step: bool) -> bool:
    offsets = [arg for arg in node.args if not is_tensor(arg)]
    is_zero = bool(offsets) and isinstance(offsets[0], int) and offsets[0] == 0
    return not node.kwargs and len(offsets) == 1 and ((step and walk.is_size(offsets[0])) or is_zero)


def _evaluate(node: fx.Node, known: dict[fx.Node, TensorBounds], axes: dict[fx.Node, int]) -> TensorBounds:
    anything = _anything(node)
    constant = _constant(node)
    if constant is not None:
        return TensorBounds(_in_dtype(node, (constant, constant)), {})
    lookup = op_table.lookup(node)
    if lookup is not None:
        return TensorBounds(anything, _looked_up(node, *lookup, known, axes))
    if op_table.is_a(node, "moves"):
        source = node.args[0] if node.args else None
        return TensorBounds(known[source].overall if source in known else anything, _propagated(node, source, known))  # type: ignore[index, arg-type]
    rule = _RULES.get(op_table.known_name(node))
    if rule is None or not is_tensor(node):
        return TensorBounds(anything, {})
    at_token = {operand: _propagated(node, operand, known) for operand in node.all_input_nodes}

    def bounds_at(dim: int | None) -> Interval:
        """Evaluate the rule on all elements of the operands, or with those at the token along a dimension."""

        def bounds_of(operand: fx.Node) -> Interval:
            overall = known[operand].overall if operand in known else _anything(operand)
            return overall if dim is None else at_token[operand].get(dim, overall)

        return _apply(rule, node, bounds_of, anything)

    return TensorBounds(bounds_at(None), {dim: bounds_at(dim) for dims in at_token.values() for dim in dims})


def _with_rows(
    node: fx.Node, bounds: TensorBounds, known: dict[fx.Node, TensorBounds], axes: dict[fx.Node, int]
) -> TensorBounds:
    """Add the dimension over rows to a result's bounds, and drop its bounds per token if rows may be mixed."""
    rows: set[int | None] = set()
    for parent in node.all_input_nodes:
        if parent in known and known[parent].row_dim is not None:
            rows.add(_row_dim(node, parent, known[parent].row_dim, axes))  # type: ignore[arg-type]
    if not rows:
        return bounds
    return (
        TensorBounds(bounds.overall, {})
        if None in rows or len(rows) > 1
        else dataclasses.replace(bounds, row_dim=rows.pop())
    )


def _row_dim(node: fx.Node, parent: fx.Node, row_dim: int, axes: dict[fx.Node, int]) -> int | None:
    """Return the dimension of a node that follows an operand's dimension over rows, or None."""
    lookup = op_table.lookup(node)
    if lookup is None or lookup[0] is not parent:
        return op_table.propagate_dim(node, parent, row_dim)
    index = lookup[1].get(row_dim)
    if not isinstance(index, fx.Node) or index not in axes:
        return None
    return op_table.index_axis(node, index, axes[index])


def _apply(rule: Rule, node: fx.Node, bounds_of: Callable[[fx.Node], Interval], anything: Interval) -> Interval:
    """Evaluate a rule on intervals of a node's arguments."""

    def interval(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return bounds_of(argument)
        if isinstance(argument, (bool, int, float)):
            return _scalar(node, float(argument))
        return argument

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), interval)
    try:
        result = rule(node, *args, **kwargs)
    except TypeError:  # the rule does not know an argument
        return anything
    return anything if result is None else _in_dtype(node, result)


def _in_dtype(node: fx.Node, bounds: Interval) -> Interval:
    """Return the bounds of a result once it is stored in the node's dtype.

    Integers wrap around, so a bound that the dtype cannot hold says nothing. A floating-point result may be rounded
    twice, so a bound that is not exact moves outwards by one step.
    """
    dtype, (low, high) = value(node).dtype, bounds
    if dtype == torch.bool:
        return _truth(bounds)
    if math.isnan(low) or math.isnan(high):
        return _anything(node)
    if not dtype.is_floating_point:
        return (float(math.trunc(low)), float(math.trunc(high))) if _holds(dtype, low, high) else _anything(node)
    return _rounded(low, dtype, -math.inf), _rounded(high, dtype, math.inf)


def _holds(dtype: torch.dtype, *numbers: float) -> bool:
    """Return whether an integer dtype holds all of these numbers, of which a float is exact up to 2^53."""
    info = torch.iinfo(dtype)
    return all(max(info.min, -(2**53)) <= number <= min(info.max, 2**53) for number in numbers)


def _rounded(number: float, dtype: torch.dtype, towards: float) -> float:
    """Return the number if the dtype has it, else the neighbour in a direction of the number nearest to it."""
    nearest = torch.tensor(number, dtype=torch.float64).to(dtype)
    if nearest.item() == number:
        return number
    return float(torch.nextafter(nearest, torch.full_like(nearest, towards)))


def _scalar(node: fx.Node, number: float) -> Interval:
    """Return the bounds of a number in the code, which the operation may convert to the dtype of its tensors first."""
    dtypes = [value(parent).dtype for parent in node.all_input_nodes if is_tensor(parent)]
    low = high = number
    for dtype in dtypes:
        if dtype.is_floating_point:
            nearest = torch.tensor(number, dtype=torch.float64).to(dtype).item()
            low, high = min(low, nearest), max(high, nearest)
        elif dtype != torch.bool and number.is_integer() and not _holds(dtype, number):
            return (-LARGE, LARGE)
    return low, high


def _propagated(node: fx.Node, operand: fx.Node | None, known: dict[fx.Node, TensorBounds]) -> dict[int, Interval]:
    """Return the bounds of an operand's elements at the token, by the dimensions of the result."""
    if operand not in known:
        return {}
    indices = {op_table.propagate_dim(node, operand, dim): bounds for dim, bounds in known[operand].at_token.items()}
    return {dim: bounds for dim, bounds in indices.items() if dim is not None}


def _looked_up(
    node: fx.Node, base: fx.Node, indices: dict[int, Any], known: dict[fx.Node, TensorBounds], axes: dict[fx.Node, int]
) -> dict[int, Interval]:
    """Return the bounds of a lookup's elements at the token: an index over the keys reads each token's own entry."""
    found: dict[int, Interval] = {}
    for dim, bounds in known[base].at_token.items() if base in known else ():
        index = indices.get(dim)
        if isinstance(index, fx.Node) and index in axes:
            axis = op_table.index_axis(node, index, axes[index])
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


# -- rules: the interval of a result from those of its operands; None if unknown

Rule = Callable[..., Any]


def _ends(function: Callable[[float, float], float], a: Any, b: Any) -> Any:
    """Return the interval of a function that grows with both operands, None if one of them is no interval."""
    intervals = all(isinstance(x, tuple) and len(x) == 2 for x in (a, b))
    return (function(a[0], b[0]), function(a[1], b[1])) if intervals else None


def _added(node: fx.Node, a: Any, b: Any, *, alpha: Any = (1.0, 1.0)) -> Any:
    return _ends(operator.add, a, _multiplied(node, b, alpha) if alpha != (1.0, 1.0) else b)


def _subtracted(node: fx.Node, a: Any, b: Any, *, alpha: Any = (1.0, 1.0)) -> Any:
    return _added(node, a, _negated(node, b), alpha=alpha) if _ends(min, b, b) else None


def _multiplied(node: fx.Node, a: Any, b: Any) -> Any:
    if is_bool(node) or _ends(min, a, b) is None:
        return _ends(min, a, b)
    products = [0.0 if 0.0 in (x, y) else x * y for x in a for y in b]
    return (min(products), max(products))


def _divided(node: fx.Node, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    by_number = rounding_mode is None and _ends(min, b, b) and b[0] == b[1] and b[0] > 0
    return (a[0] / b[0], a[1] / b[0]) if by_number else None


def _negated(node: fx.Node, a: Any) -> Any:
    return (-a[1], -a[0])


def _not(node: fx.Node, a: Any) -> Any:
    return (1 - a[1], 1 - a[0]) if is_bool(node) else None


def _and(node: fx.Node, a: Any, b: Any) -> Any:
    a, b = _truth(a), _truth(b)
    if not is_bool(node):
        return (0.0, 0.0) if (0.0, 0.0) in (a, b) else None
    return _ends(min, a, b)


def _or(node: fx.Node, a: Any, b: Any) -> Any:
    return _ends(max, _truth(a), _truth(b)) if is_bool(node) else None


def _truth(a: Interval) -> Interval:
    """Return the bounds of `a != 0`."""
    if a == (0.0, 0.0):
        return (0.0, 0.0)
    return (1.0, 1.0) if a[0] > 0 or a[1] < 0 else (0.0, 1.0)


def _chosen(node: fx.Node, condition: Any, a: Any, b: Any) -> Any:
    if _ends(min, a, b) is None:
        return None
    return a if condition == (1.0, 1.0) else b if condition == (0.0, 0.0) else (min(a[0], b[0]), max(a[1], b[1]))


def _filled(node: fx.Node, x: Any, mask: Any, value: Any) -> Any:
    return _chosen(node, mask, value, x)


def _less(node: fx.Node, a: Any, b: Any) -> Any:
    return (1.0, 1.0) if a[1] < b[0] else (0.0, 0.0) if a[0] >= b[1] else None


def _less_or_equal(node: fx.Node, a: Any, b: Any) -> Any:
    return (1.0, 1.0) if a[1] <= b[0] else (0.0, 0.0) if a[0] > b[1] else None


def _equal(node: fx.Node, a: Any, b: Any) -> Any:
    if a[0] == a[1] == b[0] == b[1]:
        return (1.0, 1.0)
    return (0.0, 0.0) if a[1] < b[0] or b[1] < a[0] else None


def _unequal(node: fx.Node, a: Any, b: Any) -> Any:
    same = _equal(node, a, b)
    return None if same is None else (1 - same[1], 1 - same[0])


def _cast(node: fx.Node, a: Any, *args: Any, **kwargs: Any) -> Any:
    return a


def _clamp(node: fx.Node, a: Any, min: Any = None, max: Any = None) -> Any:
    return _ends(builtins.max, a, min) if max is None else None


def is_bool(node: fx.Node) -> bool:
    return bool(value(node).dtype == torch.bool)


def _swapped(rule: Rule) -> Rule:
    return lambda node, a, b, **kwargs: rule(node, b, a, **kwargs)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "iadd", "add_", "__radd__"), _added),
    **dict.fromkeys(("sub", "subtract", "isub", "sub_"), _subtracted),
    **dict.fromkeys(("rsub", "__rsub__"), _swapped(_subtracted)),
    **dict.fromkeys(("mul", "multiply", "imul", "mul_", "__rmul__"), _multiplied),
    **dict.fromkeys(("truediv", "div", "itruediv"), _divided),
    **dict.fromkeys(("neg", "negative"), _negated),
    **dict.fromkeys(("logical_not", "bitwise_not", "invert", "inv", "__invert__"), _not),
    **dict.fromkeys(("logical_and", "bitwise_and", "and_", "iand", "__and__"), _and),
    **dict.fromkeys(("logical_or", "bitwise_or", "or_", "ior", "__or__"), _or),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _filled),
    **dict.fromkeys(("lt", "less"), _less),
    **dict.fromkeys(("gt", "greater"), _swapped(_less)),
    **dict.fromkeys(op_table.tagged("keeps", "keeps_integers") | {"bool"}, _cast),
    **dict.fromkeys(("clamp", "clip", "clamp_min"), _clamp),
    "where": _chosen,
    "le": _less_or_equal,
    "ge": _swapped(_less_or_equal),
    "eq": _equal,
    "ne": _unequal,
    "minimum": lambda node, a, b: _ends(min, a, b),
    "maximum": lambda node, a, b: _ends(max, a, b),
}
