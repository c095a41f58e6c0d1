"""Add inputs to a step graph besides slots, weights and Dynamo's arguments, and the nodes of dynamic sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import Slots
from kvpass.errors import UnsupportedGraph
from kvpass.fx import shapes, walk
from kvpass.fx.walk import value
from kvpass.rewrite.mask_slice import PerTokenInput
from kvpass.rewrite.step_graph import StepGraph
from kvpass.torch_private import dynamo, symbolic_shapes

Compute = Callable[[Callable[..., list[Tensor]], list[fx.Node], fx.Node, str], list[fx.Node]]
"""See `kvpass.rewrite.context.StepContext.compute`."""


@dataclasses.dataclass(frozen=True)
class GatheredInput:
    """Describe an input with one entry for each slot of a layer, see `PerTokenInput`.

    Attributes:
        layer: the layer whose slots select the entries; None for the whole tensor, from which a reference gathers.
        is_argument: whether the tensor is one of Dynamo's arguments; otherwise it is precomputed on the host.
        arg_index: its index among Dynamo's arguments or among the precomputed tensors.
    """

    layer: int | None
    entry: PerTokenInput
    is_argument: bool
    arg_index: int

    def gather(self, tensor: Tensor, slots: Slots, queries: int) -> Tensor:
        """Return the entries [B, H', C + q, ...]: of the slots, then of the new tokens."""
        new = slots.length[:, None] + torch.arange(queries, device=slots.length.device)
        indices = torch.cat([slots.index, new[:, None].expand(-1, slots.index.shape[1], -1)], -1)
        return self.entry.gather(tensor, indices.to(tensor.device))


class FurtherInputs:
    """Create the further placeholders of a step graph on demand, each once.

    Attributes:
        columns: for Dynamo's placeholders, the inputs with the columns of the new tokens.
        entries: for layers and per-token inputs, the inputs with the entries of the slots.
        host_inputs: for nodes that read all tokens, the inputs with their values, which are precomputed on the host.
    """

    def __init__(self, step: StepGraph, compute: Compute) -> None:
        self._step, self._compute = step, compute
        self.columns: dict[fx.Node, fx.Node] = {}
        self.entries: dict[tuple[int | None, PerTokenInput], fx.Node] = {}
        self.host_inputs: dict[fx.Node, fx.Node] = {}
        self._valid: dict[tuple[fx.Node, ...], fx.Node] = {}

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.columns.values(), *self.entries.values(), *self.host_inputs.values()]

    def column(self, argument: fx.Node) -> fx.Node:
        """Return the input with the new tokens' columns of an argument that has a column for every token."""
        if argument not in self.columns:
            shape = (*map(self._step.sizes.fixed, value(argument).shape[:-1]), self._step.queries)
            self.columns[argument] = self._new(f"{argument.name}_now", shape, value(argument).dtype)
        return self.columns[argument]

    def entry(self, layer: int, entry: PerTokenInput) -> fx.Node:
        """Return the input with the entry of each slot's token in a layer, or if `whole` with all tokens' entries."""
        step, name = self._step, entry.node.name
        if step.whole:
            if (None, entry) not in self.entries:
                self.entries[None, entry] = self._like(f"{name}_whole", value(entry.node))
            return self.entries[None, entry]
        if (layer, entry) not in self.entries:
            count = step.capacities[layer] + step.queries
            shape = (step.batch, step.layouts[layer].groups, count, *entry.entry_shape)
            self.entries[layer, entry] = self._new(f"{name}_at_{layer}", shape, value(entry.node).dtype)
        return self.entries[layer, entry]

    def host_input(self, node: fx.Node) -> fx.Node:
        """Return the input with the value of a node that reads all tokens."""
        if node not in self.host_inputs:
            self.host_inputs[node] = self._new(f"{node.name}_aside", self._step.shape(node), value(node).dtype)
        return self.host_inputs[node]

    def valid(self, layer: int) -> fx.Node:
        """Return the node bool [B, q], false where a new token is padding, for a layer."""
        padding_inputs = self._step.padding_inputs.sites[layer]
        if padding_inputs not in self._valid:
            self._valid[padding_inputs] = self._emit_valid([self.column(argument) for argument in padding_inputs])
        return self._valid[padding_inputs]

    def _emit_valid(self, columns: list[fx.Node]) -> fx.Node:
        step = self._step
        shape, device = (step.batch, step.queries), step.device

        def function(*columns: Tensor) -> list[Tensor]:
            valid = torch.ones(shape, dtype=torch.bool, device=device)
            for column in columns:
                valid = valid & (column != 0)
            return [valid]

        node = self._compute(function, columns, step.length.next, f"kvpass_valid_{len(self._valid)}")[0]
        node.meta["example_value"] = step.of_shape(shape, torch.bool)
        return node

    @property
    def some_valid(self) -> fx.Node:
        """The result of the first call of `valid`."""
        return next(iter(self._valid.values()))

    def gathered(self) -> tuple[list[GatheredInput], list[fx.Node]]:
        """Return the inputs of `entries`, and the nodes whose values they gather from if these are precomputed."""
        found, computed = [], list[fx.Node]()
        for layer, entry in self.entries:
            node = entry.node
            if node.op == "placeholder":
                found.append(GatheredInput(layer, entry, True, self._step.placeholders.index(node)))
                continue
            if node not in computed:
                computed.append(node)
            found.append(GatheredInput(layer, entry, False, computed.index(node)))
        return found, computed

    def _new(self, name: str, shape: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        return self._like(name, self._step.of_shape(shape, dtype))

    def _like(self, name: str, example: Tensor) -> fx.Node:
        with self._step.graph.inserting_after(self._step.placeholders[-1]):
            node = self._step.graph.placeholder(name)
        dynamo.as_new_input(node, example, in_place=False)
        return node


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
