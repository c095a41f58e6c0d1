"""Find attention calls whose keys and values do not grow, as in cross-attention.

Keys of cross-attention are stored once.  In a prompt such a cache looks like any other: no past precedes the new keys,
and the graph returns them.  The inputs tell the difference: its keys are computed from an encoder's output, and from
none of the tokens of its queries.  The number of keys proves nothing, because it may equal the number of queries.  A
cache that grows in a later step is examined there again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.fx as fx

from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.capture.untracked_growth import source_inputs
from kvpass.fx import alias, walk
from kvpass.fx.alias import AliasSets
from kvpass.fx.op_table import has_tag
from kvpass.fx.shapes import expr
from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import dynamo


@dataclasses.dataclass(frozen=True)
class OutsideKeys:
    """An input with the keys or values that an attention call reads, which no node of the graph updates.

    Attributes:
        index, dim: the input's index among the arguments, and the keys' dimension in its shape.
        query_len: q, as a size of the graph.
        line: the source line of the attention call, if it is known.
    """

    index: int
    dim: int
    query_len: Any
    line: str | None


DOES_NOT_GROW = "its keys and values do not grow: they are computed from other inputs than its queries"


def queries_of(calls: list[AttentionCall], alias_sets: AliasSets) -> dict[fx.Node, fx.Node]:
    """Map the results of each attention call to its query, if the query depends on inputs.

    A query of parameters alone, as in attention over layers, is left out: there the tokens arrive as keys and values.
    """
    return {
        result: call.query
        for call in calls
        if _call_inputs(alias.ancestors_with_writes([call.query], reader=call.node, alias_sets=alias_sets))
        for result in call.results
    }


def is_cross_attention(call: AttentionCall, queries: Mapping[fx.Node, fx.Node], alias_sets: AliasSets) -> bool:
    """Return whether no key or value depends on an input of the query's tokens: these never grow.

    In later layers a query also depends on earlier attention outputs.  Its tokens are found along their `queries`.
    """
    query_inputs = _call_inputs(
        alias.ancestors_with_writes([call.query], reader=call.node, through=queries, alias_sets=alias_sets)
    )
    kv_inputs = (  # keys that share an input with the query end the search, which goes through all layers before
        _call_inputs(alias.ancestors_with_writes([node], reader=call.node, alias_sets=alias_sets))
        for node in (call.key, call.value)
    )
    return bool(query_inputs) and all(inputs and query_inputs.isdisjoint(inputs) for inputs in kv_inputs)


def _call_inputs(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the tensor inputs of the call, which may differ from step to step; parameters are left out."""
    return {node for node in nodes if node.op == "placeholder" and is_tensor(node) and not dynamo.is_of_module(node)}


def refusal_of(call: AttentionCall, ends: set[fx.Node]) -> str | None:
    """Return the reason why an attention call that updates no cache cannot stay unchanged, or None if it can.

    If queries, keys and values are all inputs, the cache grew before a graph break.  With as many keys as queries,
    as in a prompt or an encoder, that is harmless.  Queries that the graph itself computes may attend to an encoder's
    output.  The search stops at `ends`, the results of all attention calls.
    """
    if not (_is_input(call.key) and _is_input(call.value)):
        return None
    made_here = any(has_tag(node, "projects", "contracts") for node in walk.ancestors(call.query, ends))
    if made_here or expr(example_value(call.query).shape[-2]) == expr(example_value(call.key).shape[-2]):
        return None
    return (
        "its queries, keys and values all come from outside of the graph: a graph break, or a function that runs "
        "uncompiled, stands between the update of the cache and attention. Find it with TORCH_LOGS=graph_breaks"
    )


def outside_keys(call: AttentionCall) -> list[OutsideKeys]:
    """Return the inputs from which a call that updates no cache takes its keys and values.

    There are none if keys and queries are equally many, as in an encoder.
    """
    count, queries = expr(example_value(call.key).shape[-2]), example_value(call.query).shape[-2]
    sources = dict.fromkeys(source for node in (call.key, call.value) for source in source_inputs(node))
    indices, line = {node: i for i, node in enumerate(walk.placeholders(call.node.graph))}, walk.known_line(call.node)
    dims = {node: [d for d, size in enumerate(example_value(node).shape) if expr(size) == count] for node in sources}
    found = [OutsideKeys(indices[node], of_node[-1], queries, line) for node, of_node in dims.items() if of_node]
    return [] if count == expr(queries) else found


def _is_input(node: fx.Node) -> bool:
    """Return whether a tensor is an input or a view of one."""
    return walk.chain(node, lambda each: has_tag(each, "moves", "keeps"))[-1].op == "placeholder"
