"""Describe the call that a step graph is rewritten for, and copy the graph for its rewrite."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.layout import Layout
from kvpass.cache.slots import AnySlots
from kvpass.capture.canonical import AttentionSite
from kvpass.errors import UnsupportedGraph
from kvpass.fx import shapes, splicing, walk
from kvpass.fx.shapes import SizeResolver
from kvpass.fx.walk import example_value
from kvpass.torch_private import fx_nodes, symbolic_shapes, tensors


@dataclasses.dataclass(frozen=True)
class PaddingInputs:
    """The inputs that mark padding, see `kvpass.capture.padding_analysis`.

    Attributes:
        by_layer: for each layer, the inputs that mark padding in all masks on its cache.
        ones_for_cached: the inputs whose entries are 1 for every cached token in this call.
    """

    by_layer: tuple[tuple[fx.Node, ...], ...]
    ones_for_cached: frozenset[fx.Node]

    def in_copy(self, copy_of: dict[fx.Node, fx.Node]) -> PaddingInputs:
        """Return the inputs in a copy of the graph; `copy_of` maps each node to its copy."""
        by_layer = tuple(tuple(copy_of[node] for node in nodes) for nodes in self.by_layer)
        return PaddingInputs(by_layer, frozenset(copy_of[node] for node in self.ones_for_cached))


@dataclasses.dataclass(frozen=True)
class StepRewriteInput:
    """A canonical step graph and the call that it is rewritten for.

    Attributes:
        canonical_gm, sites: the graph, which is not modified, and its attention on caches.
        layouts, slots: the layout and the slots of each layer.
        arguments: Dynamo's arguments.
        sizes: what each symbolic size is in this call: a number, growing, or dynamic.
        length: the number of tokens before this call, padding included.
        windows: for each layer, how many tokens the model stores, None for all.
        compact: whether the policy compacts the slots in this step.
        dynamic_layouts: the layouts with symbols for the sizes that differ between calls; empty if there are none.
    """

    canonical_gm: fx.GraphModule
    sites: list[AttentionSite]
    layouts: list[Layout]
    slots: list[AnySlots]
    arguments: tuple[Any, ...]
    sizes: SizeResolver
    length: int
    windows: tuple[int | None, ...]
    padding_inputs: PaddingInputs
    compact: bool = False
    dynamic_layouts: list[Layout] = dataclasses.field(default_factory=list)

    def with_layouts(self, change: Callable[[Layout], Layout]) -> StepRewriteInput:
        """Return this input with changed layouts, and with slots on the meta device."""
        layouts, dynamic_layouts = ([*map(change, each)] for each in (self.layouts, self.dynamic_layouts))
        slots = [each.on_meta(layout) for each, layout in zip(self.slots, layouts, strict=True)]
        return dataclasses.replace(self, layouts=layouts, dynamic_layouts=dynamic_layouts, slots=slots)


class StepGraph:
    """A copy of a step graph during its rewrite.

    Attributes:
        given: the graph and the call that it is rewritten for.
        step_gm, graph: the copy.
        sites, placeholders, padding_inputs: the copies of the canonical graph's.
        argument_of: Dynamo's argument for each placeholder.
        batch, query_len: B and q, which may be dynamic sizes.
        layouts, capacities: for each layer, its layout and its number of slots; capacities and budgets may be dynamic.
        decodes: whether one token is written to a free slot; a chunk is not written by the graph.
        stores_unrotated_keys: whether keys are stored before their rotary embedding and numbered by rank.
        slot_inputs: for each layer, the placeholders of its slots' tensors, in the order of `Slots.names`.
        new_inputs: all these placeholders, and the placeholders of the policy's own tensors.
        length: int64 without dimensions, the number of tokens seen, padding included.
        size_nodes: the nodes of sizes that stay dynamic.
    """

    def __init__(self, given: StepRewriteInput) -> None:
        self.given = given
        self.step_gm, copy_of = fx_nodes.copy_graph_module(given.canonical_gm)
        self.graph = self.step_gm.graph
        self.sites = [site.in_copy(copy_of) for site in given.sites]
        self.slots, self.sizes, self.windows = given.slots, given.sizes, given.windows
        self.layouts = given.dynamic_layouts or given.layouts
        self.placeholders = walk.placeholders(self.graph)
        self.argument_of = dict(zip(self.placeholders, given.arguments, strict=True))
        self.padding_inputs = given.padding_inputs.in_copy(copy_of)
        rows = example_value(given.sites[0].key).shape[0]
        self.batch = given.sizes.resolved_size(rows) if given.sizes.dynamic else given.layouts[0].batch
        self.query_len = given.sizes.query_len
        self.capacities = [
            slots.capacity if isinstance(layout.capacity, int) else layout.capacity
            for layout, slots in zip(self.layouts, given.slots, strict=True)
        ]
        self.decodes = bool(self.query_len == 1)
        self.stores_unrotated_keys = given.layouts[0].stores_unrotated_keys
        self.slot_inputs: list[list[fx.Node]] = []
        self.new_inputs: set[fx.Node] = set()
        self.length: fx.Node
        self.size_nodes = SizeNodes(self)

    @property
    def decodes_on_gpu(self) -> bool:
        return self.decodes and self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """The device of the slots."""
        return self.layouts[0].device

    def slot(self, layer: int, name: str) -> fx.Node:
        """Return the placeholder of one tensor of a layer, by its name in `Slots.names`."""
        return self.slot_inputs[layer][self.slots[layer].names.index(name)]

    def refuse_growth(self, node: fx.Node) -> None:
        """Raise UnsupportedGraph: a node depends on the cache's length in a way that kvpass cannot express."""
        found = example_value(node) if walk.is_size(node) else "a tensor that grows with it"
        depends = f"{walk.target_name(node)!r} still depends on the length of the cache ({found})"
        supported = "kvpass supports this only in attention masks, rotary embeddings and position arithmetic"
        walk.refuse(node, f"{depends}; {supported}")

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the shape of a node's tensor in this call; it must not grow."""
        if self.sizes.growing_dims(example_value(node)):
            self.refuse_growth(node)
        return tuple(
            size if isinstance(size, int) else self.sizes.resolved_size(size) for size in example_value(node).shape
        )

    def example(self, node: fx.Node) -> Any:
        """Return an empty tensor like a node's value, or the value of a size."""
        if walk.is_size(node):
            return self.sizes.resolved_size(node)
        value, empty = example_value(node), self._empty
        if self.sizes.dynamic and tensors.is_wrapper(value):  # a quantised weight, whose sizes are numbers
            return tensors.map_inner_tensors(
                lambda part: empty(part.shape, part.stride(), dtype=part.dtype, device=part.device), value
            )
        made_dense = node.op == "placeholder" and strides_may_change(value)  # see `StepSignature.flat_arguments`
        dense = made_dense or any(self.sizes.grows(stride) for stride in value.stride())
        fixed = None if dense else [self.sizes.resolved_size(stride) for stride in value.stride()]
        return empty(self.shape(node), fixed, dtype=value.dtype, device=self.device_of(node))

    def empty_of_shape(self, shape: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor without data that stands for a dense tensor which kvpass adds."""
        return self._empty(shape, None, dtype=dtype, device="meta")

    @property
    def _empty(self) -> Callable[..., Tensor]:
        """The function that makes example tensors: fake ones if sizes are dynamic."""
        return self.sizes.dynamic.like if self.sizes.dynamic else symbolic_shapes.empty

    def device_of(self, node: fx.Node) -> torch.device:
        """Return the device of a node's tensor; inputs that kvpass adds are where the slots are."""
        is_new = example_value(node).device.type == "meta" or node in self.new_inputs
        return self.device if is_new else example_value(node).device

    def compute(
        self, function: Callable[..., list[Tensor]], nodes: list[fx.Node], before: fx.Node, name: str
    ) -> list[fx.Node]:
        """Splice a function of the values of nodes in before another node; return its result nodes."""
        return self.splice(self.trace(function, nodes), nodes, before, name)

    def trace(self, function: Callable[..., Any], nodes: list[fx.Node], layer: int | None = None) -> fx.GraphModule:
        """Trace a function of the values of nodes, for `splice`.

        Dynamic sizes also become inputs, because the function may read them elsewhere: the sizes of `layer` if it is
        given.
        """
        count, inputs = len(nodes), [*nodes, *self.size_nodes.for_layer(layer)]
        with tensors.fake_mode(self.sizes.dynamic) as fake:
            examples = [fake(self.example(node)) for node in inputs]
            return tensors.trace(lambda *values: function(*values[:count]), examples)

    def splice(
        self, traced: fx.GraphModule, nodes: list[fx.Node], before: fx.Node, name: str, layer: int | None = None
    ) -> list[fx.Node]:
        """Splice a traced function in before a node; return its result nodes.  Equal layers may share a trace."""
        return splicing.splice(self.step_gm, traced, [*nodes, *self.size_nodes.for_layer(layer)], before, name)


_FUNCTIONS = {"Add": operator.add, "Mul": operator.mul}


class SizeNodes:
    """The nodes of dynamic sizes in a step graph, each created once."""

    def __init__(self, context: StepGraph) -> None:
        self._step = context
        self._made: dict[sympy.Expr, fx.Node] = {}
        self._emitted: list[fx.Node] = []  # in the order of the graph

    def for_layer(self, layer: int | None) -> list[fx.Node]:
        """Return the nodes of all symbols that an argument or a tensor of the graph has.

        If a layer is given, other layers' own capacities are left out; the order is the same for all layers.
        """
        owner = self.layer_of
        return [self._node(x) for x in self._symbols if layer is None or owner.get(x, layer) == layer]

    @functools.cached_property
    def layer_of(self) -> dict[sympy.Symbol, int]:
        """The layer of each symbol that is the capacity of one layer alone."""
        own = self._step.sizes.dynamic.exchangeable if self._step.sizes.dynamic else frozenset()
        capacities = enumerate(map(shapes.expr, self._step.capacities))
        return {capacity: layer for layer, capacity in capacities if capacity in own}

    @functools.cached_property
    def _symbols(self) -> list[sympy.Symbol]:
        """The symbols of `for_layer`: budgets are left out, because no tensor has a budget for a size."""
        context = self._step
        if context.sizes.dynamic is None:
            return []
        budgets = {shapes.expr(layout.budget) for layout in context.layouts} - set(map(shapes.expr, context.capacities))
        return [symbol for symbol in context.sizes.dynamic.symbols if symbol not in budgets]

    def number_or_node(self, size: Any) -> Any:
        """Return the number or the node of a size that does not grow; refuse one that arguments do not determine."""
        return size if isinstance(size, int) else self._number(shapes.expr(size))

    def has(self, node: fx.Node) -> bool:
        """Return whether a node is the node of a dynamic size."""
        return node in self._made.values()

    def _number(self, expression: sympy.Expr) -> Any:
        return int(expression) if expression.is_Integer else self._node(expression)

    def _node(self, expression: sympy.Expr) -> fx.Node:
        if expression not in self._made:
            result = self._source(expression) if expression.is_Symbol else self._compute(expression)
            self._made[expression] = result
        return self._made[expression]

    def _source(self, symbol: sympy.Symbol) -> fx.Node:
        """Return the placeholder of a number, or a node that reads the capacity from the slots."""
        context = self._step
        for layer, capacity in enumerate(context.capacities):
            if symbol == shapes.expr(capacity):
                return self._call(symbolic_shapes.SIZE, context.slot(layer, "position"), 2, size=capacity)
        for argument in filter(walk.is_size, context.placeholders):
            if not context.sizes.grows(argument) and shapes.expr(context.sizes.resolved_size(argument)) == symbol:
                return argument
        raise UnsupportedGraph(f"no argument has the size {symbol}; please report this graph (kvpass.explain)")

    def _compute(self, expression: sympy.Expr) -> fx.Node:
        function = _FUNCTIONS.get(expression.func.__name__)
        if function is None:
            raise UnsupportedGraph(f"the size {expression} is no sum or product; please report it (kvpass.explain)")
        part, *others = expression.args
        node, *terms = map(self._number, expression.args)
        for term, addend in zip(terms, others, strict=True):
            part = expression.func(part, addend)
            node = self._call(function, node, term, size=self._step.sizes.resolved_part(part))
        result: fx.Node = node
        return result

    def _call(self, function: Any, *args: Any, size: Any) -> fx.Node:
        graph = self._step.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_after(self._emitted[-1]) if self._emitted else graph.inserting_before(first):
            node = splicing.emit(graph, function, *args, value=size)
        self._emitted.append(node)
        return node


def strides_may_change(tensor: Any) -> bool:
    """Return whether a tensor's strides may change from call to call."""
    return isinstance(tensor, Tensor) and any(isinstance(stride, torch.SymInt) for stride in tensor.stride())
