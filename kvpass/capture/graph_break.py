"""Attention whose cache is updated elsewhere: behind a graph break, or in a function that runs uncompiled."""

from __future__ import annotations

import torch.fx as fx

from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.fx import walk
from kvpass.fx.op_table import MOVES, SAME_VALUE, known_name
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, value

_MAKING = frozenset({"linear", "matmul", "bmm", "addmm", "conv1d", "einsum", "embedding"})


def why(call: AttentionCall, ends: set[fx.Node]) -> str | None:
    """Why a call that updates no cache cannot be left alone, or None if it can.

    Queries, keys and values that all come from outside were made, and the cache was grown, before a graph break.  Where
    there are as many keys as queries, as in a prompt or in an encoder, that harms nothing yet.  Queries that the graph
    makes itself may attend to what an encoder gave.
    """
    if not (_is_given(call.key) and _is_given(call.value)):
        return None
    made_here = any(walk.name_of(node) in _MAKING for node in walk.ancestors(call.query, ends))
    if made_here or expr(value(call.query).shape[-2]) == expr(value(call.key).shape[-2]):
        return None
    return (
        "its queries, keys and values all come from outside of the graph: a graph break, or a function that runs "
        "uncompiled, stands between the update of the cache and attention. Find it with TORCH_LOGS=graph_breaks"
    )


def _is_given(node: fx.Node) -> bool:
    """Whether a tensor is an input, or another shape of one."""
    while known_name(node) in MOVES | SAME_VALUE and node.op != "placeholder" and is_tensor(node.args[0]):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"
