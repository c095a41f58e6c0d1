"""Use private names of symbolic shapes: read symbols and guards, and create dynamic sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

SIZE = torch.ops.aten.sym_size.int
"""The operator that returns one dimension of a tensor as a size node."""


def expression(value: torch.SymInt) -> Any:
    """Return the sympy expression of a symbolic size."""
    return value.node.expr


def size_hint(size: Any) -> int:
    """Return a size as a number: for a dynamic size, its value in the call that it was made for."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def known_equal(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal wherever Dynamo's guards are true."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one == other)


def known_at_most(one: Any, other: Any) -> bool:
    """Return whether a size is at most another wherever Dynamo's guards are true."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one <= other)


def drop_decided_bounds(size: torch.SymInt) -> sympy.Expr:
    """Return a size without the maxima and minima that Dynamo's guarded ranges decide."""
    env = size.node.shape_env

    def never_above(one: sympy.Expr, other: sympy.Expr) -> bool:
        return bool(env.bound_sympy(one - other).upper <= 0)

    def without(parts: tuple[sympy.Expr, ...], drops: Callable[[sympy.Expr, sympy.Expr], bool]) -> list[sympy.Expr]:
        left = list(parts)
        for part in parts:
            if any(drops(part, other) for other in left if other is not part):
                left.remove(part)
        return left

    whole = expression(size)
    for part in list(sympy.preorder_traversal(whole)):
        if part.func.__name__ == "Max":
            left = without(part.args, never_above)
        elif part.func.__name__ == "Min":
            left = without(part.args, lambda one, other: never_above(other, one))
        else:
            continue
        whole = whole.xreplace({part: part.func(*left)})
    return whole


def may_equal(size: Any, number: int) -> bool:
    """Return whether Dynamo's guarded ranges allow a size to equal a number."""
    if not isinstance(size, torch.SymInt):
        return bool(size == number)
    allowed = size.node.shape_env.bound_sympy(expression(size))
    return bool(allowed.lower <= number <= allowed.upper)


def guard_expressions(*values: Any) -> list[sympy.Expr]:
    """Return Dynamo's guards of the graph to which symbolic sizes among the values belong.

    The values are sizes and tensors.
    """
    env = _shape_env(values)
    guards = [] if env is None else env.guards
    return [env.replace(guard.expr) for guard in guards]  # in the symbols that sizes have now


def _shape_env(values: Iterable[Any]) -> Any:
    """Return the environment of the symbolic sizes among sizes and tensors; None if there are none."""
    sizes = (size for x in values for size in (x.shape if isinstance(x, Tensor) else (x,)))
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def are_true(guards: Iterable[sympy.Expr], numbers: Mapping[Any, int]) -> bool:
    """Return whether guards are true for the given numbers of their symbols."""
    known = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
    return all(guard.xreplace(known) == sympy.true for guard in guards)


class AddedGuards:
    """The guards that are set on the sizes of a graph after `begin`.

    Dynamo checks only the guards that were set before its backend returned.
    """

    def __init__(self) -> None:
        self._env: Any = None
        self._before = 0

    def begin(self, values: Iterable[Any]) -> None:
        """Begin to note guards, unless that has begun; `values` are the sizes and fake tensors that are inputs."""
        if self._env is None and (env := _shape_env(values)) is not None:
            self._before, self._env = len(env.guards), env  # in this order, as other threads read them

    @property
    def expressions(self) -> list[sympy.Expr]:
        """The guards that do not follow from Dynamo's, in the symbols of the graph's inputs."""
        guards = [] if self._env is None else [guard.expr for guard in self._env.guards]
        known = {guard.lts - guard.gts for guard in guards[: self._before] if isinstance(guard, (sympy.Le, sympy.Ge))}
        added = guards[self._before :]
        # An equation follows from two inequalities; `known` has the expressions that are at most 0.
        return [g for g in added if not (isinstance(g, sympy.Eq) and {g.lhs - g.rhs, g.rhs - g.lhs} <= known)]


def empty(shape: Sequence[Any], strides: Sequence[Any] | None, **factory_kwargs: Any) -> Tensor:
    """Return a tensor of any values, dense if no strides are given."""
    if strides is None:
        return torch.empty(shape, **factory_kwargs)
    return torch.empty_strided(shape, strides, **factory_kwargs)


class SymbolicSizes:
    """Sizes that stay symbols in a graph, whatever their values in the current call.

    Code that is traced with them serves all numbers that fulfil the guards set while tracing: `hold`.

    Attributes:
        mode: the fake tensor mode of tensors with such sizes.
        symbols: the sympy symbol of each size.
        exchangeable: symbols that share code: a guard on one of them applies to all of them.
    """

    def __init__(self, hints: Sequence[int], taken: set[str], exchangeable: Collection[int] = ()) -> None:
        """Create one symbol for each size.

        Args:
            hints: the values in the current call, each at least 2.
            taken: names of another graph's symbols, which must not be used again.
            exchangeable: indices of the sizes that share code.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env)
        self.mode.cache_enabled = False  # expressions of sizes hardly repeat: lookups take a third of a trace
        self._names, self._taken = itertools.count(), taken
        self._served: dict[Any, bool] = {}
        self.symbols = [self._symbol(hint) for hint in hints]
        self.exchangeable = frozenset(self.symbols[index] for index in exchangeable)
        self._hints = dict(zip(self.symbols, hints, strict=True))

    def _symbol(self, hint: int) -> Any:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        while True:
            source = ConstantSource(f"kvpass_{next(self._names)}")
            symbol = self._env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            if str(symbol) not in self._taken:
                return symbol

    def size(self, expression: Any) -> Any:
        """Return an expression of the symbols as a symbolic size, or as a number."""
        if expression.is_Integer:
            return int(expression)
        return self._env.create_symintnode(expression, hint=int(expression.xreplace(self._hints)))

    def like(self, shape: Sequence[Any], strides: Sequence[Any] | None, **factory_kwargs: Any) -> Tensor:
        """Return a fake tensor, dense if no strides are given."""
        with torch.inference_mode(False), self.mode:
            return empty(shape, strides, **factory_kwargs)

    def hold(self, numbers: Sequence[int]) -> bool:
        """Return whether the traced and compiled code serves these numbers."""
        kind = (tuple(numbers), len(self._env.guards))  # compiling adds guards
        if kind not in self._served:
            known = dict(zip(self.symbols, map(sympy.Integer, numbers), strict=True))
            answers = (answer for guard in self._env.guards for answer in self._answers(guard.expr, known))
            self._served[kind] = min(numbers) >= 2 and all(answer == sympy.true for answer in answers)
        return self._served[kind]

    def _answers(self, guard: Any, known: dict[Any, Any]) -> Iterator[Any]:
        """Yield a guard's values: a guard on one of the exchangeable sizes is evaluated for all of them."""
        yield guard.xreplace(known)
        free = guard.free_symbols & self.exchangeable
        if len(free) == 1:
            (one,) = free
            for number in {known[symbol] for symbol in self.exchangeable}:
                yield guard.xreplace({**known, one: number})


def symbols(value: Any) -> set[Any]:
    """Return the symbols in a size, or in a fake tensor's sizes and strides."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in expression(size).free_symbols}
