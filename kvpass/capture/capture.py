"""From what Dynamo traced to the canonical form.

    before    k = cat([past_k, key], -2)              after    k = kvpass::append(past_k, key)
              v = cat([past_v, val], -2)                       v = kvpass::append(past_v, val)
              K = k[:, :, None].expand(...).reshape(...)       out = kvpass::attention(q, k, v, mask, None, 0.25, ...)
              V = v[:, :, None].expand(...).reshape(...)
              w = q @ K.transpose(2, 3) * 0.25 + mask
              out = softmax(w, -1) @ V

This is the only stage that knows how models spell attention and caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from kvpass.capture import batched, caches
from kvpass.capture.caches import CallReading, Origin, Reading
from kvpass.capture.canonical import APPEND, ATTENTION, LOG_SUM_EXP
from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.capture.sites import AttentionSite, sites
from kvpass.fx import alias, op_table, walk
from kvpass.fx.walk import value
from kvpass.torch_private import fx_nodes


@dataclasses.dataclass(frozen=True)
class Capture:
    """A graph in its canonical form.

    Attributes:
        gm: gives what the model's own graph gives.
        sites: its attention calls on caches; none if any was refused, as then the graph is the model's own.
        found: what became of each attention call and cache update.
    """

    gm: fx.GraphModule
    sites: list[AttentionSite]
    found: list[CallReading]

    @property
    def refused(self) -> list[CallReading]:
        return [found for found in self.found if found.refusal]


def capture(gm: fx.GraphModule, carried: Sequence[bool]) -> Capture:
    """Bring a graph into its canonical form, in a copy.

    Args:
        carried: for each placeholder whether its value is a cache handle of ours.
    """
    copy, _ = fx_nodes.copy_graph_module(gm)
    _name_attributes(copy.graph)
    op_table.bind(copy.graph)
    batched.write_out(copy.graph)
    handles = {node for node, ours in zip(walk.placeholders(copy.graph), carried, strict=True) if ours}
    found = caches.find(copy, handles)
    readings = [f.reading for f in found if f.reading]
    if any(f.refusal for f in found) or not readings:
        return Capture(gm, [], found)
    _put_operators(copy.graph, readings)
    copy.recompile()
    return Capture(copy, sites(copy.graph), found)


_ATTRIBUTES = {"mT": (-1, -2), "mH": (-1, -2), "T": (0, 1), "H": (0, 1)}
_OPERATORS: dict[Any, str] = {
    torch.ops.aten.mT: "mT",
    torch.ops.aten.mH: "mH",
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.matrix_H: "H",
}
"""What Dynamo records for these attributes since torch 2.14."""


def _name_attributes(graph: fx.Graph) -> None:
    """Write x.mT as x.transpose(-1, -2), and the like, where x holds real numbers."""
    for node in list(graph.nodes):
        name = _attribute(node)
        given = value(node.args[0]) if name else None
        if not isinstance(given, torch.Tensor) or given.is_complex() or (name in ("T", "H") and given.ndim != 2):
            continue
        with graph.inserting_before(node):
            transposed = graph.call_method("transpose", (node.args[0], *_ATTRIBUTES[str(name)]))
        _replace(node, transposed)
        graph.erase_node(node)


def _attribute(node: fx.Node) -> str | None:
    """Return the attribute of `_ATTRIBUTES` that a node reads, or None."""
    if node.op != "call_function":
        return None
    if node.target is getattr:
        return str(node.args[1]) if node.args[1] in _ATTRIBUTES else None
    target: Any = node.target
    return _OPERATORS.get(getattr(target, "overloadpacket", target))


def _put_operators(graph: fx.Graph, readings: list[Reading]) -> None:
    """Let an operator stand for every cache update and every attention call on a cache."""
    ends = {
        node for each in readings for node in (each.call.node, each.call.lse, each.key.grown, each.value.grown) if node
    }
    behind = alias.behind(list(ends))  # and what writes in place to the logits, which nobody may use
    appended: dict[fx.Node, fx.Node] = {}
    for reading in readings:
        for origin in (reading.key, reading.value):
            if origin.grown not in appended:
                appended[origin.grown] = _append(graph, origin)
    replaced: dict[fx.Node, fx.Node] = {}
    for reading in readings:
        call = reading.call.moved(replaced)
        cached = (appended[reading.key.grown], appended[reading.value.grown])
        computed = (appended.get(call.key, call.key), appended.get(call.value, call.value))
        attended = computed if reading.computed else cached
        if call.lse is not None:
            _sum_up(graph, call, attended[0])
        replaced[reading.call.node] = _attend(graph, call, attended)
    alias.eliminate_dead(graph, among=behind)


def _append(graph: fx.Graph, origin: Origin) -> fx.Node:
    """The operator that gives what is stored; without a past and a concatenation that is the new tokens themselves."""
    new = _as_cached(graph, origin)
    with graph.inserting_after(origin.grown):
        node = graph.call_function(APPEND, (origin.past, new))
    _replace(origin.grown, node)
    return node


def _as_cached(graph: fx.Graph, origin: Origin) -> fx.Node:
    """Return the new tokens in the dtype of the cache, to which the model's concatenation promotes them."""
    new, dtype = origin.new, value(origin.grown).dtype
    if value(new).dtype == dtype:
        return new
    with graph.inserting_before(origin.grown):
        promoted = graph.call_method("to", (new, dtype))
    promoted.meta = {**origin.grown.meta, "example_value": value(new).to(dtype)}
    return promoted


def _attend(graph: fx.Graph, call: AttentionCall, attended: tuple[fx.Node, fx.Node]) -> fx.Node:
    beside: dict[str, Any] = {}
    if call.dtypes is not None:
        beside = dict(zip(("scores", "weights", "output"), call.dtypes, strict=True)) | {"hidden": call.hidden}
    given = (call.query, *attended, call.mask, call.sink_logit, call.scale, call.cap)
    with graph.inserting_before(call.node):
        node = graph.call_function(ATTENTION, given, {"causal": call.causal, **beside})
    _replace(call.node, node)
    return node


def _sum_up(graph: fx.Graph, call: AttentionCall, key: fx.Node) -> None:
    """The log-sum-exp of the same logits, in the shape and the dtype in which the model has it."""
    assert call.lse is not None
    assert call.dtypes is not None
    theirs = value(call.lse)
    given = (call.query, key, call.mask, call.scale, call.cap, call.hidden, call.dtypes[0], theirs.dtype)
    with graph.inserting_before(call.lse):
        node = graph.call_function(LOG_SUM_EXP, given)
        shown = node if theirs.ndim == 3 else graph.call_method("unsqueeze", (node, -1))
    _replace(call.lse, shown)
    if shown is not node:
        node.meta.update(shown.meta, example_value=theirs.squeeze(-1))


def _replace(theirs: fx.Node, ours: fx.Node) -> None:
    """Let a new node stand for one of the model's, with what Dynamo recorded of that."""
    ours.meta.update(theirs.meta, kvpass_stands_for=theirs.name)
    theirs.replace_all_uses_with(ours, delete_user_cb=lambda user: user is not ours)
