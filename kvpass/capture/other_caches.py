"""Recognise caches that kvpass does not bound: fixed ones stay as they are, and growing ones are refused.

Keys of cross-attention are stored once.  In a prompt such a cache looks like any other: no past precedes the new keys,
and the graph returns them.  The inputs tell the difference: its keys are computed from an encoder's output, and from
none of the tokens of its queries.  The number of keys proves nothing, because it may equal the number of queries.  A
cache that grows in a later step is examined there again.

A cache may be updated outside of the graph: behind a graph break, or in an uncompiled function.

A cache may grow in a way that capture does not read.  Whatever the code and layout, a model takes a tensor and returns
a longer one.  So an output is refused if it is computed from an input without a projection in between and is longer
along exactly one dimension.  A tensor of constant length, such as the last states of a convolution, is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.fx import alias, shapes, walk
from kvpass.fx.alias import Memory
from kvpass.fx.op_table import is_a, tagged
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, name_of, value
from kvpass.torch_private import dynamo

DOES_NOT_GROW = "its keys and values do not grow: they are computed from other inputs than its queries"


def queries_of(calls: list[AttentionCall], memory: Memory) -> dict[fx.Node, fx.Node]:
    """Map the results of each attention call to its query, if the query depends on inputs.

    A query of parameters alone, as in attention over layers, is left out: there the tokens arrive as keys and values.
    """
    return {
        result: call.query
        for call in calls
        if _inputs(alias.behind([call.query], reader=call.node, memory=memory))
        for result in (call.node, call.lse)
        if result is not None
    }


def is_fixed(call: AttentionCall, queries: Mapping[fx.Node, fx.Node], memory: Memory) -> bool:
    """Return whether no input of the query's tokens takes part in any key or value.

    In later layers a query also depends on earlier attention outputs.  Its tokens are found along the queries of these.

    Args:
        queries: see `queries_of`.
    """
    query_inputs = _inputs(alias.behind([call.query], reader=call.node, through=queries, memory=memory))
    kv_inputs = [_inputs(alias.behind([node], reader=call.node, memory=memory)) for node in (call.key, call.value)]
    return bool(query_inputs) and all(inputs and query_inputs.isdisjoint(inputs) for inputs in kv_inputs)


def _inputs(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the tensor inputs of the call, which may differ from step to step; parameters are left out."""
    return {node for node in nodes if node.op == "placeholder" and is_tensor(node) and not dynamo.is_of_module(node)}


def refusal_of(call: AttentionCall, ends: set[fx.Node]) -> str | None:
    """Return the reason why an attention call that updates no cache cannot stay unchanged, or None if it can.

    If queries, keys and values are all inputs, the cache grew before a graph break.  With as many keys as queries, as
    in a prompt or an encoder, that is harmless.  Queries that the graph itself computes may attend to an encoder's
    output.

    Args:
        ends: the results of all attention calls, at which the search stops.
    """
    if not (_is_input(call.key) and _is_input(call.value)):
        return None
    computes_states = tagged("projects", "contracts")
    made_here = any(walk.name_of(node) in computes_states for node in walk.ancestors(call.query, ends))
    if made_here or expr(value(call.query).shape[-2]) == expr(value(call.key).shape[-2]):
        return None
    return (
        "its queries, keys and values all come from outside of the graph: a graph break, or a function that runs "
        "uncompiled, stands between the update of the cache and attention. Find it with TORCH_LOGS=graph_breaks"
    )


def _is_input(node: fx.Node) -> bool:
    """Return whether a tensor is an input or a view of one."""
    return walk.chain(node, lambda each: is_a(each, "moves", "keeps"))[-1].op == "placeholder"


_MIXING = tagged("projects", "contracts", "normalizes") | {
    "softmax", "scaled_dot_product_attention", "topk", "scatter"
}  # fmt: skip
"""Operators that compute new features or a selection, so that the result is not their operand rearranged."""


def unread(graph: fx.Graph, read: set[int]) -> list[tuple[fx.Node, str]]:
    """Return the outputs that extend an input, each with the reason of the refusal.

    Args:
        read: the output indices of known caches.
    """
    outputs = [
        node
        for index, node in enumerate(walk.results(graph))
        if index not in read and _is_state(node) and node.op != "placeholder"
    ]
    found = []
    for node in dict.fromkeys(outputs):
        sources = _inputs_of(node)
        if any(shapes.same(value(node).shape, value(source).shape) for source in sources):
            continue
        past = next((source for source in sources if _is_longer(node, source)), None)
        if past is not None:
            found.append((node, f"{past.name!r} grows here, and it is not read as a cache: {_LAYOUT}"))
    return found


_LAYOUT = (
    "caches that are attended to grow by torch.cat([past, new], -2) of [B, H, S, D]; let the model keep them so, or "
    "run it uncompiled"
)


def is_fixed_size_update(node: fx.Node) -> bool:
    """Return whether a tensor is an input of the same shape with some elements replaced: a cache of fixed size."""
    parents = node.all_input_nodes if _is_state(node) and node.op != "placeholder" else []
    return any(
        shapes.same(value(node).shape, value(source).shape) for parent in parents for source in _inputs_of(parent)
    )


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of at least three dimensions that a tensor rearranges or selects from."""
    sources = walk.reach([node], lambda each: () if name_of(each) in _MIXING else each.all_input_nodes)
    return [source for source in sources if source.op == "placeholder" and _is_state(source)]


def _is_state(node: object) -> bool:
    """Return whether a node is a floating-point tensor of at least three dimensions, and no parameter."""
    if not is_tensor(node) or isinstance(value(node), torch.nn.Parameter):
        return False
    return bool(value(node).ndim >= 3 and value(node).is_floating_point())


def _is_longer(node: fx.Node, past: fx.Node) -> bool:
    """Return whether a tensor has the shape of another except for one dimension, which is longer."""
    shape, past_shape = value(node).shape, value(past).shape
    if len(shape) != len(past_shape):
        return False
    diffs = [sympy.simplify(expr(a) - expr(b)) for a, b in zip(shape, past_shape, strict=True) if expr(a) != expr(b)]
    return len(diffs) == 1 and not bool(diffs[0].is_negative)
