"""Evaluate the operators of masks on intervals: bounds of a result from bounds of its operands.

A rule takes a node and its arguments, with intervals instead of tensors and numbers, and returns None where it knows
no bounds.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from kvpass.fx import op_table
from kvpass.fx.walk import example_value, is_tensor


class Interval(NamedTuple):
    """The bounds of a number, both included."""

    low: float
    high: float


LARGE = 1e30
"""Bound of all numbers that a model computes at run time; constants in its code may be larger."""
FALSE, TRUE = Interval(0.0, 0.0), Interval(1.0, 1.0)


def unknown_bounds(node: fx.Node) -> Interval:
    """Return the bounds of a tensor whose dtype alone is known."""
    tensor = example_value(node)
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bool:
        return Interval(0.0, 1.0)
    return Interval(-LARGE, LARGE)


def has_rule(node: fx.Node) -> bool:
    """Return whether a node computes a tensor by an operator that has a rule."""
    return op_table.operator_name(node) in _RULES and is_tensor(node)


def evaluate(node: fx.Node, bounds_of: Callable[[fx.Node], Interval]) -> Interval:
    """Return the bounds of a node that has a rule, from the bounds of its operands."""
    rule = _RULES[op_table.operator_name(node)]
    if any(is_tensor(parent) and example_value(parent).is_complex() for parent in node.all_input_nodes):
        return unknown_bounds(node)  # complex numbers have no order

    def interval(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return bounds_of(argument)
        return _scalar(node, float(argument)) if isinstance(argument, (bool, int, float)) else argument

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), interval)
    if rule not in (_cast, _clamp) and not all(isinstance(argument, Interval) for argument in args):
        return unknown_bounds(node)
    try:
        result = rule(node, *args, **kwargs)
    except TypeError:  # the rule does not know an argument
        return unknown_bounds(node)
    return unknown_bounds(node) if result is None else in_dtype(node, result)


def in_dtype(node: fx.Node, bounds: Interval) -> Interval:
    """Return the bounds of a result after it is stored in the node's dtype.

    Integers wrap around, so a bound outside of the dtype's range says nothing. A floating-point result may be rounded
    twice, so a bound that is not exact moves outwards by one step.
    """
    dtype, (low, high) = example_value(node).dtype, bounds
    if dtype == torch.bool:
        return _truth(bounds)
    if dtype.is_complex or math.isnan(low) or math.isnan(high):
        return unknown_bounds(node)
    if dtype.is_floating_point:
        return Interval(_round_towards(low, dtype, -math.inf), _round_towards(high, dtype, math.inf))
    if not _holds(dtype, low, high):
        return unknown_bounds(node)
    return Interval(float(math.trunc(low)), float(math.trunc(high)))


def _holds(dtype: torch.dtype, *numbers: float) -> bool:
    """Return whether an integer dtype represents all these numbers; a float is exact only up to 2^53."""
    info = torch.iinfo(dtype)
    return all(max(info.min, -(2**53)) <= number <= min(info.max, 2**53) for number in numbers)


def _round_towards(number: float, dtype: torch.dtype, towards: float) -> float:
    """Return the number if the dtype has it, else the neighbour, in a direction, of the nearest number."""
    nearest = torch.tensor(number, dtype=torch.float64).to(dtype)
    if nearest.item() == number:
        return number
    return float(torch.nextafter(nearest, torch.full_like(nearest, towards)))


def _scalar(node: fx.Node, number: float) -> Interval:
    """Return the bounds of a number in the code, which the operation may convert to its tensors' dtype."""
    dtypes = [example_value(parent).dtype for parent in node.all_input_nodes if is_tensor(parent)]
    low = high = number
    for dtype in dtypes:
        if dtype.is_floating_point:
            nearest = torch.tensor(number, dtype=torch.float64).to(dtype).item()
            low, high = min(low, nearest), max(high, nearest)
        elif dtype != torch.bool and number.is_integer() and not _holds(dtype, number):
            return Interval(-LARGE, LARGE)
    return Interval(low, high)


def _is_bool(node: fx.Node) -> bool:
    return bool(example_value(node).dtype == torch.bool)


# -- rules -------------------------------------------------------------------------------------------------------------

Rule = Callable[..., Interval | None]


def _apply_to_ends(function: Callable[[float, float], float], a: Interval, b: Interval) -> Interval:
    """Return the interval of a function that grows with both operands."""
    return Interval(function(a.low, b.low), function(a.high, b.high))


def _add(node: fx.Node, a: Interval, b: Interval, *, alpha: Interval = TRUE) -> Interval:
    return _apply_to_ends(operator.add, a, _multiply(node, b, alpha) if alpha != TRUE else b)


def _subtract(node: fx.Node, a: Interval, b: Interval, *, alpha: Interval = TRUE) -> Interval:
    return _add(node, a, _negate(node, b), alpha=alpha)


def _multiply(node: fx.Node, a: Interval, b: Interval) -> Interval:
    if _is_bool(node):
        return _apply_to_ends(min, a, b)
    products = [0.0 if 0.0 in (x, y) else x * y for x in a for y in b]
    return Interval(min(products), max(products))


def _divide(node: fx.Node, a: Interval, b: Interval, *, rounding_mode: str | None = None) -> Interval | None:
    by_number = rounding_mode is None and b.low == b.high and b.low > 0
    return Interval(a.low / b.low, a.high / b.low) if by_number else None


def _negate(node: fx.Node, a: Interval) -> Interval:
    return Interval(-a.high, -a.low)


def _not(node: fx.Node, a: Interval) -> Interval | None:
    return _negation_of(a) if _is_bool(node) else None


def _and(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    a, b = _truth(a), _truth(b)
    if not _is_bool(node):
        return FALSE if FALSE in (a, b) else None
    return _apply_to_ends(min, a, b)


def _or(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    return _apply_to_ends(max, _truth(a), _truth(b)) if _is_bool(node) else None


def _truth(a: Interval) -> Interval:
    """Return the bounds of `a != 0`."""
    if a == FALSE:
        return FALSE
    return TRUE if a.low > 0 or a.high < 0 else Interval(0.0, 1.0)


def _where(node: fx.Node, condition: Interval, a: Interval, b: Interval) -> Interval:
    if condition in (TRUE, FALSE):
        return a if condition == TRUE else b
    return Interval(min(a.low, b.low), max(a.high, b.high))


def _fill(node: fx.Node, x: Interval, mask: Interval, value: Interval) -> Interval:
    return _where(node, mask, value, x)


def _less(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    return TRUE if a.high < b.low else FALSE if a.low >= b.high else None


def _less_or_equal(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    return TRUE if a.high <= b.low else FALSE if a.low > b.high else None


def _equal(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    if a.low == a.high == b.low == b.high:
        return TRUE
    return FALSE if a.high < b.low or b.high < a.low else None


def _unequal(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    same = _equal(node, a, b)
    return None if same is None else _negation_of(same)


def _negation_of(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def _cast(node: fx.Node, a: Interval, *args: object, **kwargs: object) -> Interval:
    return a


def _clamp(node: fx.Node, a: Interval, min: object = None, max: object = None) -> Interval | None:
    return _apply_to_ends(builtins.max, a, min) if isinstance(min, Interval) and max is None else None


def _swap_operands(rule: Rule) -> Rule:
    return lambda node, a, b, **kwargs: rule(node, b, a, **kwargs)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("logical_and", "bitwise_and"), _and),
    **dict.fromkeys(("logical_or", "bitwise_or"), _or),
    **dict.fromkeys(op_table.tagged("keeps", "keeps_integers") | {"bool"}, _cast),
    **dict.fromkeys(("clamp", "clamp_min"), _clamp),
    "add": _add, "sub": _subtract, "rsub": _swap_operands(_subtract), "mul": _multiply, "div": _divide, "neg": _negate,
    "where": _where, "masked_fill": _fill, "eq": _equal, "ne": _unequal, "lt": _less, "le": _less_or_equal,
    "gt": _swap_operands(_less), "ge": _swap_operands(_less_or_equal),
    "minimum": lambda node, a, b: _apply_to_ends(min, a, b),
    "maximum": lambda node, a, b: _apply_to_ends(max, a, b),
}  # fmt: skip
