"""Which inputs tell padding: those of which a zero is proven to hide its token from every query.

A token that no query will ever see need not be kept.  Whether it is one cannot be read off an input's shape, nor off
what one mask happens to hide.  `hiding` evaluates the model's own mask on what is known of a token whose entry in the
input is zero, with everything else unknown: numbers are intervals, followed along the axis that runs over the tokens.
If the mask of that key is false, or so low that it must be, whatever the rest is, then the input hides the token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import alias, op_table, walk
from kvpass.fx.precision import HIDDEN
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, value

LARGE = 1e30
"""No number that a model computes at run time is taken to be larger; those in its code may be."""

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class TensorBounds:
    """What is known of a tensor.

    Attributes:
        whole: bounds all of its elements.
        at: by dimension, bounds those of the token in question along it.
        row: the dimension that tells the rows of the input apart, None if it has one for all.
    """

    whole: Interval
    at: dict[int, Interval]
    row: int | None = None


def hiding(gm: fx.GraphModule, mask: fx.Node | None, step: bool) -> list[fx.Node]:
    """The inputs [B, S], or [1, S] or [S], of whose entries a zero hides its token in a mask [..., S].

    Args:
        step: whether the graph goes on with a cache.
    """
    if mask is None:
        return []
    behind = walk.ancestors(mask)
    if alias.writers_to(behind):  # what is written later is not what a node's own operation gives
        return []
    order = [node for node in gm.graph.nodes if node in behind]
    candidates = [node for node in order if _may_tell(node)]
    return [node for node in candidates if _hides(order, mask, node, step)]


def padding_inputs(gm: fx.GraphModule, masks: list[fx.Node | None], step: bool) -> tuple[fx.Node, ...]:
    """The inputs that hide tokens in all of these masks, those of the attention calls on one cache."""
    first, *others = [hiding(gm, mask, step) for mask in masks]
    return tuple(node for node in first if all(node in other for other in others))


def _may_tell(node: fx.Node) -> bool:
    if node.op != "placeholder" or not is_tensor(node) or isinstance(value(node), torch.nn.Parameter):
        return False
    return value(node).ndim in (1, 2)


def _hides(order: list[fx.Node], mask: fx.Node, column: fx.Node, step: bool) -> bool:
    last = value(column).ndim - 1
    after = {column}
    for node in order:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    near = after.union(*(node.all_input_nodes for node in after)) | _indices(order)
    order = [node for node in order if node in near]
    row = None if last == 0 or expr(value(column).shape[0]) == 1 else 0
    known = {column: TensorBounds(_anything(column), {last: (0.0, 0.0)}, row)}
    counting: dict[fx.Node, int] = {}
    for node in order:
        if node not in known and not walk.is_size(node):
            known[node] = _with_rows(node, _evaluate(node, known, counting), known, counting)
        axis = _counts_along(node, step, counting)
        if axis is not None:
            counting[node] = axis
    at = known[mask].at.get(value(mask).ndim - 1)
    if row is not None and (known[mask].row != 0 or value(mask).ndim != 4):
        return False
    return at is not None and at[1] <= (0.0 if value(mask).dtype == torch.bool else HIDDEN)


def _indices(order: list[fx.Node]) -> set[fx.Node]:
    """What is made of aranges, up to the first numbers that are not whole."""
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


def _counts_along(node: fx.Node, step: bool, counting: dict[fx.Node, int]) -> int | None:
    """The dimension along which a tensor has the keys' places in the padded sequence: 0, 1, ...

    In a step it may begin with a size, for a layer that stores its last tokens only.  That this is the place of the
    first of them is for `KeyAxis` to see.
    """
    name = op_table.known_name(node)
    if is_tensor(node) and not op_table.holds_indices(value(node).dtype):
        return None
    if name == "arange":
        start = node.args[0] if len(node.args) == 2 else 0
        return 0 if len(node.args) < 3 and expr(start) == 0 else None
    parents = [p for p in node.all_input_nodes if is_tensor(p)]
    if len(parents) != 1 or parents[0] not in counting or not is_tensor(node):
        return None
    if name not in op_table.MOVES | op_table.SAME_VALUE and not (name == "add" and _adds_place(node, step)):
        return None
    return op_table.propagate_dim(node, parents[0], counting[parents[0]])


def _adds_place(node: fx.Node, step: bool) -> bool:
    more = [arg for arg in node.args if not is_tensor(arg)]
    return not node.kwargs and len(more) == 1 and ((step and walk.is_size(more[0])) or _is_zero(more[0]))


def _is_zero(argument: Any) -> bool:
    return isinstance(argument, int) and argument == 0


def _evaluate(node: fx.Node, known: dict[fx.Node, TensorBounds], counting: dict[fx.Node, int]) -> TensorBounds:
    anything = _anything(node)
    constant = _constant(node)
    if constant is not None:
        return TensorBounds((constant, constant), {})
    looked_up = op_table.lookup(node)
    if looked_up is not None:
        return TensorBounds(anything, _looked_up(node, *looked_up, known, counting))
    if op_table.known_name(node) in op_table.MOVES:
        source = node.args[0] if node.args else None
        return TensorBounds(known[source].whole if source in known else anything, _carried(node, source, known))  # type: ignore[index, arg-type]
    rule = _RULES.get(op_table.known_name(node))
    if rule is None or not is_tensor(node):
        return TensorBounds(anything, {})
    where = [_carried(node, p, known) for p in node.all_input_nodes]
    dims = {dim for carried in where for dim in carried}
    whole = _apply(rule, node, lambda p: known[p].whole if p in known else _anything(p), anything)
    there = dict(zip(node.all_input_nodes, where, strict=True))

    def at(dim: int) -> Interval:
        return _apply(rule, node, lambda p: there[p].get(dim, known[p].whole if p in known else _anything(p)), anything)

    return TensorBounds(whole, {dim: at(dim) for dim in dims})


def _with_rows(
    node: fx.Node, made: TensorBounds, known: dict[fx.Node, TensorBounds], counting: dict[fx.Node, int]
) -> TensorBounds:
    """The same with the dimension of the rows; without what is known of the token where rows may be mixed."""
    rows: set[int | None] = set()
    for parent in node.all_input_nodes:
        if parent in known and known[parent].row is not None:
            rows.add(_row(node, parent, known[parent].row, counting))  # type: ignore[arg-type]
    if not rows:
        return made
    return TensorBounds(made.whole, {}) if None in rows or len(rows) > 1 else dataclasses.replace(made, row=rows.pop())


def _row(node: fx.Node, parent: fx.Node, row: int, counting: dict[fx.Node, int]) -> int | None:
    looked_up = op_table.lookup(node)
    if looked_up is None or looked_up[0] is not parent:
        return op_table.propagate_dim(node, parent, row)
    index = looked_up[1].get(row)
    if not isinstance(index, fx.Node) or index not in counting:
        return None
    return op_table.index_axis(node, index, counting[index])


def _apply(rule: Rule, node: fx.Node, of: Callable[[fx.Node], Interval], anything: Interval) -> Interval:
    def interval(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return of(argument)
        if isinstance(argument, (bool, int, float)):
            return (float(argument), float(argument))
        return argument

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), interval)
    try:
        made = rule(node, *args, **kwargs)
    except TypeError:  # an argument that the rule has no name for: nothing is known
        return anything
    return anything if made is None else made


def _carried(node: fx.Node, operand: fx.Node | None, known: dict[fx.Node, TensorBounds]) -> dict[int, Interval]:
    """What is known at the token of an operand, by the dimensions of the result."""
    if operand not in known:
        return {}
    indices = {op_table.propagate_dim(node, operand, dim): at for dim, at in known[operand].at.items()}
    return {dim: at for dim, at in indices.items() if dim is not None}


def _looked_up(
    node: fx.Node, base: fx.Node, by: dict[int, Any], known: dict[fx.Node, TensorBounds], counting: dict[fx.Node, int]
) -> dict[int, Interval]:
    """A lookup by an index that counts the tokens gives each one's own entry."""
    found: dict[int, Interval] = {}
    for dim, at in known[base].at.items() if base in known else ():
        index = by.get(dim)
        if isinstance(index, fx.Node) and index in counting:
            place = op_table.index_axis(node, index, counting[index])
            if place is not None:
                found[place] = at
    return found


def _constant(node: fx.Node) -> float | None:
    """The number of which a tensor consists, where the code spells it out."""
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


# -- rules: intervals of a result from those of its operands; None for nothing known

Rule = Callable[..., Any]


def _is_whole(argument: Any) -> bool:
    return isinstance(argument, tuple) and len(argument) == 2


def _added(node: fx.Node, a: Any, b: Any, *, alpha: Any = (1.0, 1.0)) -> Any:
    more = _multiplied(node, b, alpha) if alpha != (1.0, 1.0) else b
    return (a[0] + more[0], a[1] + more[1]) if _is_whole(a) and _is_whole(more) else None


def _subtracted(node: fx.Node, a: Any, b: Any, *, alpha: Any = (1.0, 1.0)) -> Any:
    return _added(node, a, _negated(node, b), alpha=alpha) if _is_whole(b) else None


def _multiplied(node: fx.Node, a: Any, b: Any) -> Any:
    if not (_is_whole(a) and _is_whole(b)):
        return None
    if is_bool(node):
        return (min(a[0], b[0]), min(a[1], b[1]))
    products = [0.0 if 0.0 in (x, y) else x * y for x in a for y in b]
    return (min(products), max(products))


def _divided(node: fx.Node, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    by_number = rounding_mode is None and _is_whole(b) and b[0] == b[1] and b[0] > 0
    return (a[0] / b[0], a[1] / b[0]) if by_number else None


def _negated(node: fx.Node, a: Any) -> Any:
    return (-a[1], -a[0])


def _not(node: fx.Node, a: Any) -> Any:
    return (1 - a[1], 1 - a[0]) if is_bool(node) else None


def _and(node: fx.Node, a: Any, b: Any) -> Any:
    a, b = _truth(a), _truth(b)
    return (min(a[0], b[0]), min(a[1], b[1])) if is_bool(node) else ((0.0, 0.0) if _zero(a, b) else None)


def _zero(a: Interval, b: Interval) -> bool:
    return (0.0, 0.0) in (a, b)


def _or(node: fx.Node, a: Any, b: Any) -> Any:
    a, b = _truth(a), _truth(b)
    return (max(a[0], b[0]), max(a[1], b[1])) if is_bool(node) else None


def _truth(a: Interval) -> Interval:
    """Whether numbers are not zero."""
    if a == (0.0, 0.0):
        return (0.0, 0.0)
    return (1.0, 1.0) if a[0] > 0 or a[1] < 0 else (0.0, 1.0)


def _chosen(node: fx.Node, condition: Any, a: Any, b: Any) -> Any:
    if not (_is_whole(a) and _is_whole(b)):
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


def _cast(node: fx.Node, a: Any, *rest: Any, **kwargs: Any) -> Any:
    if is_bool(node):
        return _truth(a)
    kept = value(node).is_floating_point() or value(node).dtype.itemsize >= 4
    return a if kept and (value(node).is_floating_point() or (float(a[0]).is_integer() and a[0] == a[1])) else None


def _smaller(node: fx.Node, a: Any, b: Any) -> Any:
    return (min(a[0], b[0]), min(a[1], b[1])) if _is_whole(a) and _is_whole(b) else None


def _larger(node: fx.Node, a: Any, b: Any) -> Any:
    return (max(a[0], b[0]), max(a[1], b[1])) if _is_whole(a) and _is_whole(b) else None


def _clamped(node: fx.Node, a: Any, min: Any = None, max: Any = None) -> Any:
    return _larger(node, a, min) if max is None else None


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
    **dict.fromkeys(op_table.SAME_VALUE | {"bool", "long", "int"}, _cast),
    **dict.fromkeys(("clamp", "clip", "clamp_min"), _clamped),
    "where": _chosen,
    "le": _less_or_equal,
    "ge": _swapped(_less_or_equal),
    "eq": _equal,
    "ne": _unequal,
    "minimum": _smaller,
    "maximum": _larger,
}
