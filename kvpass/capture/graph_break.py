"""Detect attention whose cache is updated outside of the graph: behind a graph break, or in an uncompiled function."""

from __future__ import annotations

import torch.fx as fx

from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.fx import walk
from kvpass.fx.op_table import is_a, tagged
from kvpass.fx.shapes import expr
from kvpass.fx.walk import value


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
