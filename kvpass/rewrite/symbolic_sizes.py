"""What stands in a step graph for sizes that stay open: numbers among Dynamo's arguments, a question to a slot tensor,
and arithmetic on these at the beginning of the graph."""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch.fx as fx

from kvpass.errors import UnsupportedGraph
from kvpass.fx import shapes, walk
from kvpass.rewrite.step_graph import StepGraph
from kvpass.torch_private import symbolic_shapes

_FUNCTIONS = {"Add": operator.add, "Mul": operator.mul}


class SizeNodes:
    """The nodes of open sizes in a step graph, each made once."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._made: dict[sympy.Expr, fx.Node] = {}
        self._emitted: list[fx.Node] = []  # in the order of the graph

    @functools.cached_property
    def all(self) -> list[fx.Node]:
        """The nodes of all symbols that something in the graph says."""
        return [self._node(symbol) for symbol in self._spoken]

    def for_layer(self, layer: int) -> list[fx.Node]:
        """Those of them that are not another layer's own; they come in the same order for all layers."""
        layer_of = self.layer_of
        return [self._node(symbol) for symbol in self._spoken if layer_of.get(symbol, layer) == layer]

    @functools.cached_property
    def layer_of(self) -> dict[sympy.Symbol, int]:
        """The layer of each symbol that is the capacity of one layer alone."""
        alike = self._step.sizes.open.alike if self._step.sizes.open else frozenset()
        capacities = enumerate(map(shapes.expr, self._step.capacities))
        return {capacity: layer for layer, capacity in capacities if capacity in alike}

    @functools.cached_property
    def _spoken(self) -> list[sympy.Symbol]:
        """The symbols that something in the graph says: no tensor has a budget for a size."""
        step = self._step
        if step.sizes.open is None:
            return []
        silent = {shapes.expr(layout.budget) for layout in step.layouts} - set(map(shapes.expr, step.capacities))
        return [symbol for symbol in step.sizes.open.symbols if symbol not in silent]

    def of(self, size: Any) -> Any:
        """What stands for a size that does not grow: a number, or a node.

        Raises:
            UnsupportedGraph: it is computed in another way than by sums and products, or nothing says it.
        """
        return size if isinstance(size, int) else self._number(shapes.expr(size))

    def has(self, node: fx.Node) -> bool:
        """Whether a node is one of these."""
        return node in self._made.values()

    def _number(self, expression: sympy.Expr) -> Any:
        return int(expression) if expression.is_Integer else self._node(expression)

    def _node(self, expression: sympy.Expr) -> fx.Node:
        if expression not in self._made:
            made = self._said(expression) if expression.is_Symbol else self._computed(expression)
            self._made[expression] = made
        return self._made[expression]

    def _said(self, symbol: sympy.Symbol) -> fx.Node:
        """The placeholder of a number, or what asks the slots for their capacity."""
        step = self._step
        for layer, capacity in enumerate(step.capacities):
            if symbol == shapes.expr(capacity):
                return self._call(symbolic_shapes.SIZE, step.slot(layer, "position"), 2, size=capacity)
        for holder in filter(walk.is_size, step.holders):
            if not step.sizes.grows(holder) and shapes.expr(step.sizes.fixed(holder)) == symbol:
                return holder
        raise UnsupportedGraph(f"no argument is the size {symbol}")

    def _computed(self, expression: sympy.Expr) -> fx.Node:
        function = _FUNCTIONS.get(expression.func.__name__)
        if function is None:
            raise UnsupportedGraph(f"the size {expression} is no sum or product")
        terms = [self._number(term) for term in expression.args]
        made, part = terms[0], expression.args[0]
        for term, more in zip(terms[1:], expression.args[1:], strict=True):
            part = expression.func(part, more)
            made = self._call(function, made, term, size=self._step.sizes.fixed_part(part))
        node: fx.Node = made
        return node

    def _call(self, function: Any, *args: Any, size: Any) -> fx.Node:
        with self._first():
            node = self._step.graph.call_function(function, args)
        node.meta["example_value"] = size
        self._emitted.append(node)
        return node

    def _first(self) -> contextlib.AbstractContextManager[Any]:
        """Insert before the first operation that is none of these."""
        graph = self._step.graph
        if self._emitted:
            return graph.inserting_after(self._emitted[-1])
        return graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder"))
