"""Recognise cross-attention, whose keys are stored once and never grow.

In a prompt such a cache looks like any other: no past precedes the new keys, and the graph returns them.  The inputs
tell the difference: its keys are computed from an encoder's output, and from none of the tokens of its queries.  The
number of keys proves nothing, because it may equal the number of queries.  A cache that grows in a later step is
examined there again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.fx import alias
from kvpass.fx.alias import Memory
from kvpass.fx.walk import is_tensor
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
