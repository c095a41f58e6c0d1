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
FALSE, TRUE, EVERYTHING = Interval(0.0, 0.0), Interval(1.0, 1.0), Interval(-math.inf, math.inf)


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
    """Return the bounds of a node that has a rule, from the bounds of its operands.

    Values that are not a number (NaN) are outside of all bounds.
    """
    rule = _RULES[op_table.operator_name(node)]
    if any(is_tensor(parent) and example_value(parent).is_complex() for parent in node.all_input_nodes):
        return unknown_bounds(node)  # complex numbers have no order
    dtype = None if rule is _cast else _operand_dtype(node)

    def interval(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return _converted(bounds_of(argument), dtype)
        return _converted(_exactly(argument), dtype) if isinstance(argument, (bool, int, float)) else argument

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), interval)
    if rule not in (_cast, _clamp) and not all(isinstance(argument, Interval) for argument in args):
        return unknown_bounds(node)
    try:
        result = rule(node, *args, **kwargs)
    except TypeError:  # the rule does not know an argument
        return unknown_bounds(node)
    return unknown_bounds(node) if result is None else in_dtype(node, result)


def _operand_dtype(node: fx.Node) -> torch.dtype | None:
    """Return the dtype to which an operator converts its operands, None for a truth value."""
    dtype: torch.dtype = example_value(node).dtype
    if dtype == torch.bool and op_table.operator_name(node) in _COMPARISONS and len(node.args) == 2:
        dtype = torch.result_type(*map(_example, node.args))
    return None if dtype == torch.bool or dtype.is_complex else dtype


def _example(argument: Any) -> Any:
    """Return a tensor or number that stands for an argument in type promotion."""
    value = example_value(argument) if isinstance(argument, fx.Node) else argument
    if isinstance(value, (torch.Tensor, bool, int, float)):
        return value
    return 0.0 if isinstance(value, torch.SymFloat) else 0  # a symbolic size


def _converted(bounds: Interval, dtype: torch.dtype | None) -> Interval:
    """Return bounds that also hold after a conversion to a dtype, which an operator may make or leave out."""
    low, high = bounds
    if dtype is None:
        return bounds
    if dtype.is_floating_point:
        return Interval(min(low, _nearest(low, dtype).item()), max(high, _nearest(high, dtype).item()))
    if _holds(dtype, low, high):
        return bounds
    return Interval(min(low, torch.iinfo(dtype).min), max(high, torch.iinfo(dtype).max))


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
    """Return the number if the dtype has it, else the neighbour, in a direction, of the nearest number.

    A number of 64 bits is rounded itself, unless it is an integer.
    """
    nearest = _nearest(number, dtype)
    is_exact = dtype.itemsize < 8 or math.isinf(number) or (number.is_integer() and abs(number) < 2**53)
    if nearest.item() == number and is_exact:
        return number
    if dtype.itemsize == 1:  # torch has no neighbours of numbers with 8 bits
        return towards
    return float(torch.nextafter(nearest, torch.full_like(nearest, towards)))


def _nearest(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of a floating-point dtype that is nearest to a number."""
    return torch.tensor(number, dtype=torch.float64).to(dtype)


def _exactly(number: float) -> Interval:
    """Return the bounds of a number; an integer may be too large to be exact."""
    nearest = float(number)
    if nearest == number:
        return Interval(nearest, nearest)
    return Interval(math.nextafter(nearest, -math.inf), math.nextafter(nearest, math.inf))


def _is_bool(node: fx.Node) -> bool:
    return bool(example_value(node).dtype == torch.bool)


# -- rules -------------------------------------------------------------------------------------------------------------

Rule = Callable[..., Interval | None]


def _apply_to_ends(function: Callable[[float, float], float], a: Interval, b: Interval) -> Interval:
    """Return the interval of a function that grows with both operands."""
    return Interval(function(a.low, b.low), function(a.high, b.high))


def _add(node: fx.Node, a: Interval, b: Interval, *, alpha: Interval = TRUE) -> Interval | None:
    if alpha == TRUE:
        return _apply_to_ends(operator.add, a, b)
    if example_value(node).dtype == torch.float64:  # the product may or may not be rounded before it is added
        return None
    return _apply_to_ends(operator.add, a, in_dtype(node, _multiply(node, b, alpha)))


def _subtract(node: fx.Node, a: Interval, b: Interval, *, alpha: Interval = TRUE) -> Interval | None:
    return _add(node, a, _negate(node, b), alpha=alpha)


def _multiply(node: fx.Node, a: Interval, b: Interval) -> Interval:
    if _is_bool(node):
        return _apply_to_ends(min, a, b)
    products = [x * y for x in a for y in b]
    if any(map(math.isnan, products)):  # zero times infinity
        return EVERYTHING
    return Interval(min(products), max(products))


def _divide(node: fx.Node, a: Interval, b: Interval, *, rounding_mode: str | None = None) -> Interval | None:
    if rounding_mode is not None or b.low <= 0 or math.isinf(b.high):
        return None
    quotients = [x / y for x in a for y in b]
    return Interval(min(quotients), max(quotients))


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


_COMPARISONS: dict[str, Rule] = {
    "eq": _equal, "ne": _unequal, "lt": _less, "le": _less_or_equal,
    "gt": _swap_operands(_less), "ge": _swap_operands(_less_or_equal),
}  # fmt: skip
_RULES: dict[str, Rule] = {
    **_COMPARISONS,
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("logical_and", "bitwise_and"), _and),
    **dict.fromkeys(("logical_or", "bitwise_or"), _or),
    **dict.fromkeys(op_table.tagged("keeps", "keeps_integers") | {"bool"}, _cast),
    **dict.fromkeys(("clamp", "clamp_min"), _clamp),
    "add": _add, "sub": _subtract, "rsub": _swap_operands(_subtract), "mul": _multiply, "div": _divide, "neg": _negate,
    "where": _where, "masked_fill": _fill,
    "minimum": lambda node, a, b: _apply_to_ends(min, a, b),
    "maximum": lambda node, a, b: _apply_to_ends(max, a, b),
}  # fmt: skip
