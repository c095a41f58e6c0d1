"""Nothing grows any more: what is dead goes, and the sizes that are left become numbers, or arithmetic on the few
numbers among the arguments that stay open.

before   rows = ids.size(0)                           after    h = view(x, (2, 1, 64))
         h = view(x, (rows, q, 64))
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from kvpass.fx import alias, walk
from kvpass.fx.walk import value
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record
from kvpass.torch_private import fx_nodes


def settle_sizes(step: StepContext) -> Record:
    """Leave no size that follows the cache.

    Raises:
        UnsupportedGraph: something still depends on the length of the cache.
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
    for holder in step.placeholders:
        if not holder.users and not step.size_nodes.has(holder):
            step.graph.erase_node(holder)
        elif step.sizes.grown(value(holder)):
            step.refuse_growth(next(iter(holder.users)))
    return Record([node.name for node in settled])


def _reader(size: fx.Node) -> fx.Node:
    """The first operation on tensors that a size, or what is computed from it, goes into."""
    sizes: set[fx.Node] = {size}
    readers: list[fx.Node] = []
    for node in size.graph.nodes:
        if sizes.intersection(node.all_input_nodes):
            (sizes.add if walk.is_size(node) else readers.append)(node)
    return readers[0] if readers else size


def _settle(size: fx.Node, number: Any) -> None:
    """Put a number, or the node of an open size, in place of a size, wherever it is read."""
    for user in [user for user in size.users if number is not size]:
        user.args, user.kwargs = _with_number(user.args, size, number), _with_number(user.kwargs, size, number)


def _with_number(arguments: Any, size: fx.Node, number: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: number if node is size else node)
