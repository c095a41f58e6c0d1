"""Simplify how models compute the angles of rotary embeddings, which passes compute in other places.

Models multiply frequencies and positions by a product of matrices over a dimension of size 1.  torch 2.11 cannot map
such a product over a symbolic number of positions.  transformers before 5.23 computes it in a region without autocast;
elsewhere autocast may be enabled.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from kvpass.fx import op_table
from kvpass.fx.walk import value
from kvpass.torch_private import fx_nodes


def multiply_outer_products(graph: fx.Graph) -> None:
    """Replace products of float32 matrices [..., m, 1] and [..., 1, n] by multiplications, with equal results."""
    for node in filter(_is_outer_product, graph.nodes):
        node.target, node.op = operator.mul, "call_function"


def leave_disabled_regions(graph: fx.Graph) -> None:
    """Remove the nodes that enter and exit a region with autocast disabled, where that changes no result.

    Autocast changes the dtype of products, and of operands that differ in theirs.
    """
    for enter in [node for node in graph.nodes if fx_nodes.sets_a_mode(node) and node.args[2:3] == (False,)]:
        leaving = [user for user in enter.users if fx_nodes.sets_a_mode(user)]
        if len(leaving) != 1:
            continue
        inside = _between(enter, leaving[0])
        if all(map(_is_independent, inside)):
            graph.erase_node(leaving[0])
            graph.erase_node(enter)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    found, node = [], first.next
    while node is not last:
        found.append(node)
        node = node.next
    return found


def _is_outer_product(node: fx.Node) -> bool:
    if op_table.known_name(node) != "matmul" or len(node.args) != 2 or node.kwargs:
        return False
    one, other = (value(argument) if isinstance(argument, fx.Node) else None for argument in node.args)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or min(one.ndim, other.ndim) < 2:
        return False
    return bool(one.dtype == other.dtype == torch.float32 and one.shape[-1] == 1 and other.shape[-2] == 1)


def _is_independent(node: fx.Node) -> bool:
    """Check whether a node gives the same result with and without autocast."""
    involved = [value(each) for each in (node, *node.all_input_nodes)]
    dtypes = {x.dtype for x in involved if isinstance(x, torch.Tensor) and x.is_floating_point()}
    known = op_table.is_a(node, "pointwise", "view", "keeps") or op_table.known_name(node) in ("cat", "getitem")
    return not dtypes or (dtypes == {torch.float32} and known)
