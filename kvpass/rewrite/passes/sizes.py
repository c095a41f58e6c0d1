"""Replace the remaining sizes, refuse sizes that grow, and sort the inputs.

before   rows = ids.size(0)                           after    h = view(x, (2, 1, 64))
         h = view(x, (rows, q, 64))
"""

from __future__ import annotations

import torch.fx as fx

from kvpass.fx import alias, shapes, splicing, walk
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
            shapes.replace_by(node, step.size_nodes.of(step.sizes.fixed(node)))
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


def order_inputs(step: StepContext) -> Record:
    """Put the placeholders in the order in which `StepRewrite.flat` returns their values."""
    new_inputs = [*(node for nodes in step.slot_inputs for node in nodes), *step.weight_inputs, *step.inputs.nodes]
    remaining = set(walk.placeholders(step.graph))
    splicing.put_first(step.graph, [*new_inputs, *(node for node in step.placeholders if node in remaining)])
    return Record([node.name for node in walk.placeholders(step.graph)])
