"""Replace the remaining sizes, refuse sizes that grow, and sort the inputs.

before   rows = ids.size(0)                           after    h = view(x, (2, 1, 64))
         h = view(x, (rows, q, 64))
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from kvpass.fx import alias, splicing, walk
from kvpass.fx.walk import value
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.logs import Record
from kvpass.torch_private import fx_nodes


def settle_sizes(step: StepContext) -> Record:
    """Remove dead code, and leave no size that follows the cache.

    Raises:
        UnsupportedGraph: a node still depends on the length of the cache.
    """
    for node in [node for node in step.graph.nodes if fx_nodes.is_log_only(node)]:
        step.graph.erase_node(node)
    alias.eliminate_dead(step.graph)
    settled = [node for node in step.graph.nodes if walk.is_size(node) and node.users]
    for node in settled:
        if step.sizes.grows(node):
            step.refuse_growth(_reader(node))
        if not step.sizes.settled(node):
            _settle(node, step.size_nodes.of(step.sizes.fixed(node)))
    alias.eliminate_dead(step.graph)
    for argument in step.placeholders:
        if not argument.users and not step.size_nodes.has(argument):
            step.graph.erase_node(argument)
        elif step.sizes.grown(value(argument)):
            step.refuse_growth(next(iter(argument.users)))
    return Record([node.name for node in settled])


def _reader(size: fx.Node) -> fx.Node:
    """Return the first operation on tensors that reads a size, or a size computed from it."""
    sizes = walk.reach([size], lambda node: filter(walk.is_size, node.users))
    return min((user for node in sizes for user in node.users if not walk.is_size(user)), default=size)


def _settle(size: fx.Node, number: Any) -> None:
    """Replace a size, wherever it is read, by a number or by the node of a dynamic size."""
    for user in [user for user in size.users if number is not size]:
        user.args, user.kwargs = _with_number(user.args, size, number), _with_number(user.kwargs, size, number)


def _with_number(arguments: Any, size: fx.Node, number: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: number if node is size else node)


def order_inputs(step: StepContext) -> Record:
    """Put the placeholders in the order in which `StepRewrite.flat` returns their values."""
    new_inputs = [*(node for nodes in step.slot_inputs for node in nodes), *step.weight_inputs, *step.inputs.nodes]
    remaining = set(walk.placeholders(step.graph))
    splicing.put_first(step.graph, [*new_inputs, *(node for node in step.placeholders if node in remaining)])
    return Record([node.name for node in walk.placeholders(step.graph)])
