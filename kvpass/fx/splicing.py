"""Cut a subgraph out of a graph, and splice one in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from kvpass.fx.alias import AliasSets, ancestors_with_writes, dependents
from kvpass.fx.walk import arguments_text, example_value, function_of, is_size, placeholders
from kvpass.torch_private import fx_nodes, tensors


def release_example_data(graph: fx.Graph) -> None:
    """Replace the real example tensors of inputs by meta tensors.

    A graph outlives the arguments that it was compiled with, and must not keep their memory.
    """
    for node in placeholders(graph):
        example = example_value(node)
        if isinstance(example, torch.Tensor) and not tensors.is_fake(example):
            shape, strides = example.shape, example.stride()
            with_value(node, torch.empty_strided(shape, strides, dtype=example.dtype, device="meta"))


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """A subgraph cut out: `run(*replaced, *bound)` computes the value of the result.

    Attributes:
        module: the operations.
        bound: other nodes of the original graph that the subgraph reads.
        key: equal for subgraphs that compute the same, with any names of nodes.
    """

    module: fx.GraphModule
    bound: tuple[fx.Node, ...]

    def run(self, *arguments: Any) -> Any:
        """Compute the result.  Unlike a call of the module, this prints nothing if it raises an error."""
        return fx_nodes.code_of(self.module)(*arguments)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        index = {node: f"%{i}" for i, node in enumerate(self.module.graph.nodes)}
        steps = [
            (n.op, None if n.op == "placeholder" else n.target, arguments_text(n, index.__getitem__)) for n in index
        ]
        return (*steps, *((n.name, str(example_value(n))) for n in self.bound))


def cut(
    gm: fx.GraphModule,
    results: list[fx.Node],
    replaced: list[fx.Node],
    resolve: Callable[[fx.Node], Any],
    *,
    unpack: bool = False,
    reader: fx.Node | None = None,
    alias_sets: AliasSets | None = None,
) -> Subgraph:
    """Cut out the computation of `results` from `replaced`; nodes independent of `replaced` become bound inputs.

    Args:
        replaced: the nodes that become the first inputs, in order.
        resolve: returns for a size node the number that replaces it, a dynamic size, which becomes a bound input, or
            None, which leaves the node in the subgraph.
        unpack: return the one result itself instead of a tuple.
        reader, alias_sets: see `ancestors_with_writes`.
    """
    needed = ancestors_with_writes(results, replaced, reader, alias_sets=alias_sets)
    moving = dependents(needed, replaced, alias_sets)
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in replaced}
    bound: list[fx.Node] = []

    def copy_in(node: fx.Node) -> None:
        if node in env:
            return
        number = resolve(node) if is_size(node) else None
        if isinstance(number, int):
            env[node] = number
        elif number is not None or node not in moving:
            env[node] = graph.placeholder(node.name)
            bound.append(node)
        else:
            for parent in node.all_input_nodes:
                copy_in(parent)
            env[node] = graph.node_copy(node, lambda parent: env[parent])

    for node in sorted(moving):  # in the order of the graph, as some of the nodes write in place
        copy_in(node)
    for result in results:
        copy_in(result)
    output_nodes = tuple(env[result] for result in results)
    graph.output(output_nodes[0] if unpack else output_nodes)
    put_first(graph, placeholders(graph))
    return Subgraph(fx.GraphModule(gm, graph), tuple(bound))


def extract(gm: fx.GraphModule, wanted: list[fx.Node], reader: fx.Node | None = None) -> fx.GraphModule:
    """Return a graph with the same arguments that returns the wanted nodes and computes nothing else.

    Args:
        reader: see `ancestors_with_writes`.
    """
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = ancestors_with_writes(wanted, reader=reader) if wanted else set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in needed:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in wanted))
    return fx.GraphModule(gm, graph)


def put_first(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Move nodes to the beginning of the graph, in this order."""
    for node in reversed(nodes):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


def splice(
    gm: fx.GraphModule, traced: fx.GraphModule, inputs: list[fx.Node], before: fx.Node, prefix: str
) -> list[Any]:
    """Copy a traced function into a graph before a node; return its outputs."""
    env: dict[fx.Node, Any] = dict(zip(placeholders(traced.graph), inputs, strict=True))
    with gm.graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                name = f"{prefix}_{node.target}"
                setattr(gm, name, getattr(traced, node.target))
                env[node] = gm.graph.create_node("get_attr", name)  # `get_attr` would require a buffer of this name
            elif node.op not in ("placeholder", "output"):
                env[node] = with_value(gm.graph.node_copy(node, lambda parent: env[parent]), node.meta.get("val"))
    returned = traced.graph.output_node().args[0]
    return list(map_arg(returned if isinstance(returned, (list, tuple)) else [returned], lambda node: env[node]))


def with_value(node: fx.Node, value: Any) -> fx.Node:
    """Record the fake tensor or size that stands for a node's result; return the node."""
    node.meta["example_value"] = value
    return node


def emit(graph: fx.Graph, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
    """Add a call of a function, or of a method by its name, and record its value or compute it."""
    node = (graph.call_method if isinstance(target, str) else graph.call_function)(target, args, kwargs)
    if value is None:
        values, named = map_arg((args, kwargs), example_value)
        value = tensors.propagate(functools.partial(function_of(target), **named), *values)
    return with_value(node, value)


def emit_before(
    node: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, value: Any = None, **kwargs: Any
) -> fx.Node:
    """Add a call before a node, with the source line and module of that node, or of another node."""
    with node.graph.inserting_before(node):
        emitted = emit(node.graph, target, *args, value=value, **kwargs)
    emitted.meta = {**(like or node).meta, **emitted.meta}
    return emitted
