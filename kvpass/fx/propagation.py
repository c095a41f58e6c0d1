"""Follow axes through operators: which slices of a result are computed from which slices of an operand.

Capture often needs to know whether a tensor is computed slice by slice along one axis.  Examples are whether the mask
of a key depends on that key alone, or the keys of a head on that head alone.  `propagate_dim` answers for one
operation: given an axis of an operand, it returns the axis of the result whose slice k is computed from slice k of the
operand and from no other slice.  For any other operator the answer is None; callers refuse the graph or use
another method, and never assume an axis.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.fx.op_table import (
    argument_names,
    equation,
    has_tag,
    is_pointwise,
    leaves,
    named_arguments,
    operator_name,
    subscript,
    tagged,
)
from kvpass.fx.shapes import expr, number
from kvpass.fx.walk import example_value, function_of, is_size, is_tensor, operand_of
from kvpass.torch_private import tensors


def propagate_dim(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Return the result's dimension whose slice k is computed from slice k of the operand's `dim`, or None.

    The answer is for this operand alone: a caller asks about each operand that has the axis.
    """
    if not isinstance(example_value(operand), (torch.Tensor, tuple, list)) or example_value(node) is None:
        return None
    name = operator_name(node)
    if is_pointwise(node):
        return _align_dim(node, operand, dim)
    if name in tagged("moves") and not _depends_on_content(node):
        return _propagate_by_running(node, operand, dim)
    if name in tagged("reduces", "along"):
        return _without_dims(node, dim, goes=name in tagged("reduces"))
    if name in tagged("features") and node.args[0] is operand:
        return _without_features(node, operand, dim)
    if name in ("matmul", "bmm") and not node.kwargs:
        return _outside_product(node, operand, dim)
    if name in tagged("joins"):
        return _without_joined(node, dim)
    if name in ("outer", "ger") and node.args[0] is not node.args[1]:
        return 0 if operand is node.args[0] else 1
    if name == "einsum":
        return _in_equation(node, operand, dim)
    return None


def common_dim(dims: Iterable[int | None]) -> int | None:
    """Return the one dimension that all operands give for a result, or None."""
    distinct = set(dims)
    return distinct.pop() if len(distinct) == 1 else None


def _align_dim(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    shape, source = example_value(node).shape, example_value(operand).shape
    index = dim + len(shape) - len(source)
    return index if 0 <= index < len(shape) and expr(shape[index]) == expr(source[dim]) else None


def _depends_on_content(node: fx.Node) -> bool:
    """Return whether the positions of elements in the result depend on a tensor's content."""
    if has_tag(node, "like"):
        return False
    return any(is_tensor(leaf) for leaf in leaves((node.args[1:], *node.kwargs.values())))


def _propagate_by_running(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Run the operation on coordinates along `dim`, and return the dimension of the result along which they change."""
    if isinstance(example_value(operand), (tuple, list)):  # an item of a split tensor
        return dim if operator_name(node) == "getitem" and isinstance(node.args[1], int) else None
    small = SmallSizes([node])
    size, shape = example_value(operand).shape[dim], list(small.shape(operand))
    alone = isinstance(size, int) and size == 1
    if alone and operator_name(node) == "expand":
        return _align_dim(node, operand, dim)
    if alone:  # one element does not reveal its new axis; an operation that names the size fails on two
        shape[dim] = 2
    result = small.try_run(node, {operand: coordinates(tuple(shape), dim)})
    if result is None:
        return None
    several = isinstance(result, (tuple, list))
    parts = [*zip(result, example_value(node), strict=True)] if several else [(result, example_value(node))]
    return common_dim(_dim_of_coordinates(part, known, shape[dim], size) for part, known in parts)


def _dim_of_coordinates(made: Any, known: Any, count: int, size: Any) -> int | None:
    """Return the dimension along which coordinates change, if its size is `size` for all values of the symbols."""
    index = counted_dim(made, count)
    return None if index is None or expr(known.shape[index]) != expr(size) else index


def swaps_last_two(node: fx.Node) -> bool:
    """Return whether a node transposes its operand's last two dimensions, by any operator."""
    if not has_tag(node, "moves") or _depends_on_content(node):
        return False
    small, source = SmallSizes([node]), operand_of(node)
    operand = torch.empty(small.shape(source), device="meta")
    result = small.try_run(node, {source: operand})
    if not isinstance(result, torch.Tensor) or operand.ndim < 2:
        return False
    one, other = ((x.shape, x.stride(), x.storage_offset()) for x in (result, operand.transpose(-1, -2)))
    return one == other


def coordinates(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Return an int64 tensor of the given shape whose elements are their index along `dim`."""
    line = torch.arange(shape[dim]).view([-1 if d == dim else 1 for d in range(len(shape))])
    return line.expand(shape)


def counted_dim(made: Any, count: int) -> int | None:
    """Return the one dimension along which a tensor counts 0 .. count - 1 and is constant elsewhere, or None."""
    if not isinstance(made, torch.Tensor) or count < 2 or not made.numel():
        return None
    along = [d for d, size in enumerate(made.shape) if size == count]
    along = [d for d in along if torch.equal(made, coordinates(tuple(made.shape), d))]
    return along[0] if len(along) == 1 else None


def _dims(node: fx.Node, ndim: int) -> set[int] | None:
    """Return the dimensions that an operation works along, or None if they are unknown or all."""
    if len(node.args) > len(argument_names(operator_name(node))):  # as in x.count_nonzero(0, 1)
        return None
    dim = named_arguments(node).get("dim", 1 if operator_name(node) == "normalize" else None)
    dims: list[Any] = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    known = bool(dims) and all(isinstance(d, int) and not isinstance(d, bool) for d in dims)
    return {d % ndim for d in dims} if known else None


def _without_dims(node: fx.Node, dim: int, goes: bool) -> int | None:
    source = named_arguments(node).get("input")
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return None
    dims = _dims(node, example_value(source).ndim)
    if dims is None or dim in dims:
        return None
    keeps = not goes or bool(named_arguments(node).get("keepdim", False))
    return dim if keeps else dim - sum(d < dim for d in dims)


def _without_features(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    shape = named_arguments(node).get("normalized_shape", 1)
    mixed = len(shape) if isinstance(shape, (tuple, list)) else int(operator_name(node) != "view_as_real")
    return dim if dim < example_value(operand).ndim - mixed else None


def _outside_product(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Return the result's dimension for the rows of the first factor or the columns of the second.

    The summed dimension has none.
    """
    first, second = node.args[:2]
    ndim, width = example_value(node).ndim, example_value(operand).ndim
    if first is second or width < 2 or example_value(first).ndim < 2 or example_value(second).ndim < 2:  # type: ignore[arg-type]
        return None
    if dim >= width - 2:
        summed = width - 1 if operand is first else width - 2
        return None if dim == summed else ndim - width + dim
    return _align_dim(node, operand, dim)


def _without_joined(node: fx.Node, dim: int) -> int | None:
    along = named_arguments(node).get("dim", 0) % example_value(node).ndim
    if operator_name(node) == "stack":
        return int(dim + (along <= dim))
    return None if along == dim else dim


def _in_equation(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Return the dimension of einsum's result that has the letter of an operand's dimension, or None."""
    operands, letters_of_each, result = equation(node)
    if operands.count(operand) != 1:
        return None
    letters = letters_of_each[operands.index(operand)]
    return result.index(letters[dim]) if letters[dim] in result and letters.count(letters[dim]) == 1 else None


# -- running an operation on small tensors ----------------------------------------------------------------------------


class SmallSizes:
    """The sizes of some nodes with small numbers instead of symbols, on which their operations run.

    Different sizes have different numbers: where two dimensions had one number, an operation that takes one of them for
    the other would go unnoticed.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        """Draw numbers for the sizes of nodes and of their operands."""
        met = {each for node in nodes for each in (node, *node.all_input_nodes)}
        values = (leaf for node in met for leaf in leaves(example_value(node)))
        shapes = (leaf.shape if isinstance(leaf, torch.Tensor) else [leaf] for leaf in values)
        sizes = (size for shape in shapes for size in shape if isinstance(size, (int, torch.SymInt)))
        self._known = _draw_numbers(frozenset(map(expr, sizes)))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a tensor in numbers."""
        return tuple(number(size, self._known) for size in example_value(node).shape)

    def run(self, node: fx.Node, operands: dict[fx.Node, Any]) -> Any:
        """Run a node's operation on tensors of these sizes."""

        def replace(argument: fx.Node) -> Any:
            if argument in operands:
                return operands[argument]
            if is_size(argument):
                return number(argument, self._known)
            if has_tag(node, "like"):
                return torch.empty(()).expand(self.shape(argument))
            raise TypeError(f"{argument} is not a size")

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), replace)
        with tensors.real_tensors():
            return function_of(node.target)(*args, **kwargs)

    def try_run(self, node: fx.Node, operands: dict[fx.Node, Any]) -> Any:
        """Return the result of `run`, or None if the operation does not run on these tensors."""
        try:
            return self.run(node, operands)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None


@functools.lru_cache(maxsize=1024)
def _draw_numbers(sizes: frozenset[sympy.Expr]) -> dict[sympy.Symbol, int]:
    """Return a number for each symbol, such that all sizes differ and are positive if possible."""
    symbols, known = sorted(set().union(*(size.free_symbols for size in sizes)), key=str), dict[sympy.Symbol, int]()
    for symbol in symbols:
        decided = [size for size in sizes.union(symbols) if size.free_symbols <= {*known, symbol}]
        atoms = [size for size in decided if size.is_Atom]  # other sizes may be equal for any numbers
        candidates = [{**known, symbol: count} for count in range(3, 2 * len(decided) + 9)]
        known = next(each for some in (decided, atoms) for each in candidates if _differ(some, each))
    return known


def _differ(sizes: list[sympy.Expr], known: dict[sympy.Symbol, int]) -> bool:
    numbers = {size: int(size.subs(known)) for size in sizes}
    return len({*numbers.values()}) == len(sizes) and all(n > 0 for size, n in numbers.items() if not size.is_Integer)


# -- lookups ----------------------------------------------------------------------------------------------------------


def lookup(node: fx.Node) -> tuple[fx.Node, dict[int, Any]] | None:
    """Return the table of a lookup by tensors and the index for each dimension, or None.

    An index may be a node, or for `getitem` any part of the subscript.
    """
    name, arguments = operator_name(node), named_arguments(node)
    if name == "getitem" and is_tensor(node.args[0]) and _depends_on_content(node):
        return node.args[0], dict(_subscripts(subscript(node), example_value(node.args[0]).ndim))
    if has_tag(node, "looks_up") and isinstance(arguments.get("dim"), int):
        index = arguments["indices" if name == "take_along_dim" else "index"]
        return arguments["input"], {arguments["dim"] % example_value(arguments["input"]).ndim: index}
    if name == "embedding" and is_tensor(arguments.get("weight")):
        return arguments["weight"], {0: arguments["input"]}
    return None


def _subscripts(parts: tuple[Any, ...], ndim: int) -> Any:
    """Yield each part of a subscript with the dimension that it applies to."""
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    dim = 0
    for part in parts:
        if part is Ellipsis:
            dim += ndim - taken
        elif part is not None:
            yield dim, part
            dim += 1


def index_axis(node: fx.Node, index: fx.Node, dim: int) -> int | None:
    """Return the dimension of a lookup's result that follows `dim` of its index, or None."""
    name = operator_name(node)
    if name == "embedding":
        return dim
    if name == "index_select":
        return int(named_arguments(node)["dim"] % example_value(node).ndim)
    if name in ("gather", "take_along_dim"):
        along = named_arguments(node)["dim"] % example_value(node).ndim
        return dim if along == dim else None
    return _among_subscripts(node, index, dim)


def _among_subscripts(node: fx.Node, index: fx.Node, dim: int) -> int | None:
    """Return `index_axis` for x[..., index, ...].

    Index tensors are broadcast together.  Their dimensions replace the first one if the indices are adjacent, and come
    first otherwise.
    """
    parts = subscript(node)
    tensors = [i for i, part in enumerate(parts) if is_tensor(part)]
    if any(example_value(parts[i]).dtype == torch.bool for i in tensors):
        return None
    ndim = int(max(example_value(parts[i]).ndim for i in tensors))
    together = tensors == list(range(tensors[0], tensors[-1] + 1))
    base = example_value(node.args[0]).ndim  # type: ignore[arg-type]
    named = sum(part is not None and part is not Ellipsis for part in parts)
    before = 0
    for part in itertools.takewhile(lambda p: not is_tensor(p), parts):
        before += base - named if part is Ellipsis else 0 if isinstance(part, int) else 1
    return int((before if together else 0) + ndim - example_value(index).ndim + dim)
