"""Rewrite Dynamo's graph so that heads come before tokens, in caches [B, S, H, D] and in torch.einsum.

A cache [B, S, H, D] enters and leaves the new graph as [B, H, S, D], and nothing after capture knows of another order:

    before    k = cat([past_k, key], 1)              after    grown = cat([past_k, key.transpose(1, 2)], 2)
              out = attend(q, k.transpose(1, 2))              k = grown.transpose(1, 2)
              return out, k                                   out = attend(q, k.transpose(1, 2))
                                                              return out, grown

The new graph is equivalent to Dynamo's, whichever caches are found.  Capture then proves the rest on it, or refuses it.
Strides differ, so code that needs them, such as a view of the grown cache, is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
import torch.fx as fx

from kvpass.capture import decomposed_attention, origins
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.capture.origins import CacheRefused
from kvpass.capture.rotary import find_rotary
from kvpass.fx import op_table, splicing, walk
from kvpass.fx.op_table import has_tag, operator_name
from kvpass.fx.shapes import expr
from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import fx_nodes, tensors


@dataclasses.dataclass(frozen=True)
class HeadsFirst:
    """A graph with heads first.

    Attributes:
        dynamo_gm: the graph.
        inputs, outputs: the indices of the arguments and of the results that are transposed.
    """

    dynamo_gm: fx.GraphModule
    inputs: frozenset[int]
    outputs: frozenset[int]


def find_tokens_first(dynamo_gm: fx.GraphModule) -> set[str]:
    """Return the names of the outputs of a graph with normalized calls that are caches [B, S, H, D]."""
    outputs = {node: index for index, node in enumerate(walk.results(dynamo_gm.graph)) if is_tensor(node)}
    calls, _ = decomposed_attention.find_attention_calls(dynamo_gm)
    results = {node for call in calls for node in call.results}
    tokens_first = {node for node in outputs if origins.cat_parts(node, 1)}
    for call in calls:
        for attended in (call.key, call.value):
            if _is_read(attended, outputs):
                continue
            node = _cache_of(attended, outputs)
            if node is not None:
                tokens_first.add(node)
            else:  # it may be computed from cached tensors
                computed_from = origins.since_projection([attended], results)
                tokens_first |= {each for each in computed_from if each in outputs and _has_tokens_first(each, call)}
    return {node.name for node in tokens_first}


def _is_read(attended: fx.Node, outputs: dict[fx.Node, int]) -> bool:
    """Return whether keys or values come from a cache [B, H, S, D]."""
    try:
        origins.origin_of(attended, outputs)
    except CacheRefused:
        return False
    return True


def _cache_of(attended: fx.Node, outputs: dict[fx.Node, int]) -> fx.Node | None:
    """Return the output [B, S, H, D] that attention reads with heads and tokens exchanged, or None."""
    chain = walk.chain(attended, lambda each: has_tag(each, "moves", "keeps"))
    returned = [index for index, node in enumerate(chain) if node in outputs and example_value(node).ndim == 4]
    if not returned or chain[returned[-1]].op == "placeholder":
        return None
    try:
        origins.check_heads(attended, chain[returned[-1]], chain[: returned[-1]], along=1)
    except CacheRefused:
        return None
    return chain[returned[-1]]


def _has_tokens_first(node: fx.Node, call: AttentionCall) -> bool:
    """Return whether dimension 1 of a node, and not dimension 2, has the size of the new tokens."""
    if example_value(node).ndim != 4 or node.op == "placeholder" or origins.cat_parts(node):
        return False
    first, second = map(expr, example_value(node).shape[1:3])
    return bool(first == expr(example_value(call.query).shape[2]) != second)


def transpose_caches(dynamo_gm: fx.GraphModule, names: Collection[str]) -> HeadsFirst:
    """Return a copy of Dynamo's graph in which outputs, given by name, and their pasts have heads first."""
    copy, _ = fx_nodes.copy_graph_module(dynamo_gm)
    graph, returned = copy.graph, walk.results(copy.graph)
    inputs, outputs, shown = dict[fx.Node, fx.Node](), dict[int, fx.Node](), list[fx.Node]()
    for node in [each for each in graph.nodes if each.name in names]:
        past, new = origins.cat_parts(node, 1) or (None, node)
        if past is not None and example_value(past).ndim == 4 and past not in inputs:
            inputs[past] = _transpose_input(past)
        before = node.next if past is None else node
        transposed = splicing.emit_before(before, torch.transpose, new, 1, 2, like=node)
        grown = (
            transposed if past is None else splicing.emit_before(before, torch.cat, [past, transposed], 2, like=node)
        )
        shown.append(splicing.emit_before(before, torch.transpose, grown, 1, 2, like=node))
        _replace_uses(node, shown[-1], transposed)
        outputs.update({index: grown for index, each in enumerate(returned) if each is node})
        if past is not None:
            graph.erase_node(node)
    graph.output_node().args = (tuple(outputs.get(index, x) for index, x in enumerate(walk.results(graph))),)
    for node in [*inputs.values(), *shown]:
        if not node.users:
            graph.erase_node(node)
    placeholders = walk.placeholders(graph)
    return HeadsFirst(copy, frozenset(map(placeholders.index, inputs)), frozenset(outputs))


def _transpose_input(past: fx.Node) -> fx.Node:
    """Exchange dimensions 1 and 2 of a placeholder; return the node that its users then read."""
    splicing.with_value(past, tensors.propagate(torch.transpose, example_value(past), 1, 2))
    first = next(node for node in past.graph.nodes if node.op != "placeholder")
    shown = splicing.emit_before(first, torch.transpose, past, 1, 2, like=next(iter(past.users)))
    _replace_uses(past, shown, shown)
    return shown


def separate_rotary(site: AttentionSite) -> None:
    """Add the unrotated key with heads first to the graph of a model that rotates it with tokens first."""
    rotary = find_rotary(site, token_dim=1)
    if rotary is not None:
        raw, before = rotary.raw, rotary.raw.next
        transposed = splicing.emit_before(before, torch.transpose, raw, 1, 2, like=raw)
        _replace_uses(raw, splicing.emit_before(before, torch.transpose, transposed, 1, 2, like=raw), transposed)


def order_equations(dynamo_gm: fx.GraphModule) -> fx.GraphModule:
    """Return Dynamo's graph with "bqhd,bshd->bhqs" as "bhqd,bhsd->bhqs" of transposed operands, and all such equations.

    Attention is read from equations in which rows and heads come first.
    """
    if not any(operator_name(node) == "einsum" for node in dynamo_gm.graph.nodes):
        return dynamo_gm
    copy, _ = fx_nodes.copy_graph_module(dynamo_gm)
    for node in list(copy.graph.nodes):
        _order_equation(node)
    return copy


def _order_equation(node: fx.Node) -> None:
    """Rewrite an equation of two operands that sums over one dimension, so that shared dimensions come first."""
    operands, letters, result = op_table.equation(node)
    if len(operands) != 2:
        return
    first, second = letters
    batch = [x for x in result if x in first and x in second]
    row, column = [x for x in result if x not in second], [x for x in result if x not in first]
    inner = [x for x in first if x in second and x not in result]
    orders = [[*batch, *row, *inner], [*batch, *sorted(inner + column, key=second.index)], [*batch, *row, *column]]
    letters.append(result)
    complete = all(sorted(x) == sorted(order) for x, order in zip(letters, orders, strict=True))
    if not complete or [len(row), len(column), len(inner)] != [1, 1, 1] or letters == list(map("".join, orders)):
        return
    moved = [
        _permute(node, operand, [x.index(letter) for letter in order])
        for operand, x, order in zip(operands, letters, orders, strict=False)
    ]
    ordered = ",".join(map("".join, orders[:2])) + "->" + "".join(orders[2])
    product = splicing.emit_before(node, torch.functional.einsum, ordered, *moved)
    node.replace_all_uses_with(_permute(node, product, [orders[2].index(x) for x in result]))
    node.graph.erase_node(node)


def _permute(before: fx.Node, tensor: fx.Node, dims: list[int]) -> fx.Node:
    """Add a permutation of a tensor before a node, if it changes the order."""
    return tensor if dims == sorted(dims) else splicing.emit_before(before, torch.permute, tensor, dims)


def _replace_uses(node: fx.Node, replacement: fx.Node, reader: fx.Node) -> None:
    """Replace a node for all its users but one."""
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user is not reader)
