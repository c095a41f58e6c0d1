"""Read the sizes of a graph as expressions of its symbols."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch.fx.node import map_arg

from kvpass.errors import UnsupportedGraph
from kvpass.fx.walk import example_value, is_size, is_tensor, placeholders
from kvpass.torch_private import symbolic_shapes


def expr(size: Any) -> sympy.Expr:
    """Return a size, symbolic or not, as a sympy expression."""
    if isinstance(size, fx.Node):
        size = example_value(size)
    return symbolic_shapes.expression(size) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def same_shape(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return whether two shapes are equal as expressions."""
    return [*map(expr, one)] == [*map(expr, other)]


def number(size: Any, known: Mapping[Any, int]) -> int:
    """Return a size, for the values of its symbols."""
    return int(expr(size).subs(known))


def text(size: Any, renamed: Mapping[Any, Any]) -> str:
    """Return a size as text, with other symbols instead of some."""
    return str(expr(size).xreplace(renamed))


def token_dim(shape: Sequence[Any], query_len: Any) -> int:
    """Return the dimension of positions that counts new tokens: the last dimension of size q, else the last dimension.

    The first of several dimensions counts rows, whose number may equal the number of new tokens.
    """
    found = [d for d, size in enumerate(shape) if expr(size) == expr(query_len) and (d or len(shape) == 1)]
    return found[-1] if found else len(shape) - 1


def guards(graph: fx.Graph) -> list[sympy.Expr]:
    """Return Dynamo's guards on the sizes of a graph's arguments."""
    return symbolic_shapes.guard_expressions(*map(example_value, placeholders(graph)))


def sizes_with_values(node: fx.Node, argument: Any) -> list[tuple[Any, int]]:
    """Return the sizes in a placeholder's value, each with its number in an argument of a call."""
    if is_tensor(node):
        return [*zip(example_value(node).shape, argument.shape, strict=True)]
    return [(example_value(node), argument)] if is_size(node) else []


def measure_symbols(graph: fx.Graph, arguments: Sequence[Any]) -> dict[Any, int]:
    """Return the values of a graph's symbols that are arguments or sizes of arguments."""
    each = zip(placeholders(graph), arguments, strict=True)
    found = {expr(size): int(count) for node, argument in each for size, count in sizes_with_values(node, argument)}
    return {symbol: count for symbol, count in found.items() if symbol.is_Symbol}


def fix_floats(graph: fx.Graph) -> None:
    """Replace symbolic floats by their values; Dynamo recompiles for other values.

    Dynamo makes an attribute such as an attention scale symbolic after it has seen two models with different values.
    """
    for node in graph.nodes:
        if isinstance(example_value(node), torch.SymFloat):
            replace_by(node, float(example_value(node)))


def replace_by(node: fx.Node, argument: Any) -> None:
    """Replace a size or number in all its readers by a number or by another node."""
    for user in [user for user in node.users if argument is not node]:
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda each: argument if each is node else each)


@dataclasses.dataclass
class SizeResolver:
    """The rules for reading the symbolic sizes of a step graph.

    Attributes:
        cache_lengths: each layer's cache length, as an expression.
        known: the values in this call of the symbols that do not grow.
        query_len: q, the number of new tokens.
        least: a lower bound of the lengths.
        totals: the lengths plus the new tokens, as Dynamo's sizes.
        dynamic: dynamic sizes that do not grow; `known` has their symbols.
    """

    cache_lengths: tuple[sympy.Expr, ...]
    known: dict[sympy.Symbol, Any]
    query_len: Any
    least: int = 0
    totals: tuple[Any, ...] = ()
    dynamic: symbolic_shapes.SymbolicSizes | None = None

    def __post_init__(self) -> None:
        symbols = [length for length in self.cache_lengths if length.is_Symbol]
        above = {s: sympy.Symbol(f"{s}_above", integer=True, nonnegative=True) for s in symbols}
        self._bounds = {s: self.least + t for s, t in above.items()}
        self._back = {t: s - self.least for s, t in above.items()}
        self._dynamic = frozenset(self.dynamic.symbols if self.dynamic else ())
        self._simplified: dict[sympy.Expr, sympy.Expr] = {}

    def _simplified_size(self, size: Any) -> sympy.Expr:
        """Simplify a size, once for all equal sizes: a graph has thousands of them, and sympy is slow."""
        size = example_value(size) if isinstance(size, fx.Node) else size
        written = expr(size)
        if written not in self._simplified:
            self._simplified[written] = self._simplify(size)
        return self._simplified[written]

    def _simplify(self, size: Any) -> sympy.Expr:
        """Drop maxima and minima that bounds decide, and insert the known values."""
        whole = symbolic_shapes.drop_decided_bounds(size) if isinstance(size, torch.SymInt) else expr(size)
        for name, function in (("Max", sympy.Max), ("Min", sympy.Min)):  # torch has its own
            theirs = {part.func for part in sympy.preorder_traversal(whole) if part.func.__name__ == name}
            for kind in theirs:
                whole = whole.replace(kind, lambda *args, f=function: f(*(a.subs(self._bounds) for a in args)))
        return whole.subs(self._back).subs(self.known)

    def grows(self, size: Any) -> bool:
        """Return whether a size changes from step to step."""
        return self.grows_in(self._simplified_size(size))

    def grows_in(self, expression: sympy.Expr) -> bool:
        """Return whether an expression has symbols that grow."""
        return bool(expression.free_symbols - self._dynamic)

    def growing_dims(self, tensor: Any) -> list[int]:
        """Return the dimensions of a fake tensor whose sizes change from step to step; [] for any other value."""
        shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
        return [dim for dim, size in enumerate(shape) if self.grows(size)]

    def is_dynamic(self, size: Any) -> bool:
        """Return whether a size depends on symbols that stay dynamic, and on no others."""
        symbols = expr(size).free_symbols
        return bool(symbols) and not self.grows_in(expr(size))

    def resolved_size(self, size: Any) -> Any:
        """Return a size that does not grow, as a number or a dynamic size."""
        simple = self._simplified_size(size)
        return self.dynamic.size(sympy.expand(simple)) if self.dynamic else int(simple)

    def is_total(self, size: Any) -> bool:
        """Return whether a size is the cache's length plus the new tokens."""
        return self.grows(size) and (self._adds_up(size) or self._must_be_total(size))

    def _adds_up(self, size: Any) -> bool:
        return any(
            sympy.expand(self._simplified_size(size) - length).subs(self.known) == expr(self.query_len)
            and length.free_symbols
            for length in self.cache_lengths
        )

    def _must_be_total(self, size: Any) -> bool:
        """Return whether Dynamo's guards make a size equal to a total.

        The model's code then uses it where only the number of keys is valid, for example in an addition.
        """
        size = example_value(size) if isinstance(size, fx.Node) else size
        return any(symbolic_shapes.known_equal(size, total) for total in self.totals)

    def in_length(self, size: Any) -> sympy.Expr:
        """Return a size as an expression of one symbol, the cache's length.

        Raises:
            UnsupportedGraph: the size depends on more than the cache's length.
        """
        expression = self._simplified_size(size)
        for length in self.cache_lengths:
            for symbol in length.free_symbols:
                expression = expression.subs(symbol, LENGTH - (length - symbol))
        if self.grows_in(expression.subs(LENGTH, 0)):
            raise UnsupportedGraph(f"the size {size} depends on more than the cache's length")
        return sympy.expand(expression)

    def beyond_length(self, size: Any) -> Any:
        """Return the difference between a size and the cache's length, as a number or a dynamic size.

        Raises:
            UnsupportedGraph: the size is not the length plus a number.
        """
        beyond = self.in_length(size) - LENGTH
        if self.grows_in(beyond):
            raise UnsupportedGraph(f"the graph returns {size}, which is not the cache's length plus a number")
        return self.resolved_part(beyond)

    def resolved_part(self, expression: sympy.Expr) -> Any:
        """Return an expression in which lengths have cancelled out, as a number or a dynamic size."""
        return self.dynamic.size(expression) if self.dynamic else int(expression)


LENGTH = sympy.Symbol("length", integer=True, nonnegative=True)
