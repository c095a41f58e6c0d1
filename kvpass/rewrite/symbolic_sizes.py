"""Create the nodes of dynamic sizes in a step graph: arguments, sizes of slot tensors, and arithmetic on these."""

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
    """The nodes of dynamic sizes in a step graph, each created once."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._made: dict[sympy.Expr, fx.Node] = {}
        self._emitted: list[fx.Node] = []  # in the order of the graph

    @functools.cached_property
    def all(self) -> list[fx.Node]:
        """The nodes of all symbols that an argument or a tensor of the graph has."""
        return [self._node(symbol) for symbol in self._symbols]

    def for_layer(self, layer: int) -> list[fx.Node]:
        """Return these nodes without other layers' own capacities; their order is the same for all layers."""
        layer_of = self.layer_of
        return [self._node(symbol) for symbol in self._symbols if layer_of.get(symbol, layer) == layer]

    @functools.cached_property
    def layer_of(self) -> dict[sympy.Symbol, int]:
        """The layer of each symbol that is the capacity of one layer alone."""
        own = self._step.sizes.open.alike if self._step.sizes.open else frozenset()
        capacities = enumerate(map(shapes.expr, self._step.capacities))
        return {capacity: layer for layer, capacity in capacities if capacity in own}

    @functools.cached_property
    def _symbols(self) -> list[sympy.Symbol]:
        """The symbols of `all`: budgets are left out, because no tensor has a budget for a size."""
        step = self._step
        if step.sizes.open is None:
            return []
        budgets = {shapes.expr(layout.budget) for layout in step.layouts} - set(map(shapes.expr, step.capacities))
        return [symbol for symbol in step.sizes.open.symbols if symbol not in budgets]

    def of(self, size: Any) -> Any:
        """Return the number or the node of a size that does not grow.

        Raises:
            UnsupportedGraph: it is neither a sum nor a product of sizes, or no argument has it.
        """
        return size if isinstance(size, int) else self._number(shapes.expr(size))

    def has(self, node: fx.Node) -> bool:
        """Return whether a node is the node of a dynamic size."""
        return node in self._made.values()

    def _number(self, expression: sympy.Expr) -> Any:
        return int(expression) if expression.is_Integer else self._node(expression)

    def _node(self, expression: sympy.Expr) -> fx.Node:
        if expression not in self._made:
            made = self._source(expression) if expression.is_Symbol else self._computed(expression)
            self._made[expression] = made
        return self._made[expression]

    def _source(self, symbol: sympy.Symbol) -> fx.Node:
        """Return the placeholder of a number, or a node that reads the capacity from the slots."""
        step = self._step
        for layer, capacity in enumerate(step.capacities):
            if symbol == shapes.expr(capacity):
                return self._call(symbolic_shapes.SIZE, step.slot(layer, "position"), 2, size=capacity)
        for argument in filter(walk.is_size, step.placeholders):
            if not step.sizes.grows(argument) and shapes.expr(step.sizes.fixed(argument)) == symbol:
                return argument
        raise UnsupportedGraph(f"no argument is the size {symbol}")

    def _computed(self, expression: sympy.Expr) -> fx.Node:
        function = _FUNCTIONS.get(expression.func.__name__)
        if function is None:
            raise UnsupportedGraph(f"the size {expression} is neither a sum nor a product")
        terms = [self._number(term) for term in expression.args]
        node, part = terms[0], expression.args[0]
        for term, addend in zip(terms[1:], expression.args[1:], strict=True):
            part = expression.func(part, addend)
            node = self._call(function, node, term, size=self._step.sizes.fixed_part(part))
        result: fx.Node = node
        return result

    def _call(self, function: Any, *args: Any, size: Any) -> fx.Node:
        with self._at_beginning():
            node = self._step.graph.call_function(function, args)
        node.meta["example_value"] = size
        self._emitted.append(node)
        return node

    def _at_beginning(self) -> contextlib.AbstractContextManager[Any]:
        """Insert before the first operation that is no node of a size."""
        graph = self._step.graph
        if self._emitted:
            return graph.inserting_after(self._emitted[-1])
        return graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder"))
