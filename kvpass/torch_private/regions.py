"""Private names of nested compile regions: calls of a traced body, which this module inlines."""

from __future__ import annotations

import collections
import importlib.util
import operator
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from kvpass.torch_private import dynamo

CALL = torch.ops.higher_order.invoke_subgraph
"""The operator of a region's call: its body, a name, and the inputs of the body."""


class LayersDiffer(Exception):
    """Dynamo reused no trace of a layer, or reused one with another layer's weights."""


def are_reused() -> bool:
    """Check whether this version of torch reuses the trace of a region."""
    return importlib.util.find_spec("torch._dynamo.variables.invoke_subgraph") is not None


def may_cause(error: Exception) -> bool:
    """Check whether an error may come from tracing a layer as a region."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, (LayersDiffer, TorchDynamoException)) and not dynamo.is_limit_of_graphs(error)


def inline(gm: fx.GraphModule) -> None:
    """Replace each call of a region in a graph by the body's nodes, in place."""
    while calls := _calls(gm):
        for call in calls:
            _inline_call(gm, call)
    for node in [node for node in gm.graph.nodes if node.op == "get_attr" and not node.users]:
        if isinstance(getattr(gm, node.target, None), fx.GraphModule):
            gm.graph.erase_node(node)


def check_reuse(gm: fx.GraphModule) -> None:
    """Check that regions are reused, each time with weights of its own.

    Dynamo finds the weights of a layer by the path of the layer in its guards.  torch 2.13 takes those of the first
    layer for all if it has met the layer under another path.

    Raises:
        LayersDiffer: fewer than half of the calls reuse a body, or two calls of a body share a weight.
    """
    calls_of_body = collections.defaultdict(list)
    for call in _calls(gm):
        calls_of_body[call.args[0].target].append(call)
    calls = sum(map(len, calls_of_body.values()))
    if calls and 2 * len(calls_of_body) > calls:
        raise LayersDiffer(f"{calls} calls of layers have {len(calls_of_body)} different traces")
    for body, same in calls_of_body.items():
        weights = [[node for node in call.args[2:] if dynamo.is_of_module(node)] for call in same]
        if not all(weights) or any(len(set(column)) < len(same) for column in zip(*weights, strict=True)):
            raise LayersDiffer(f"calls of {body} share weights")


def _calls(gm: fx.GraphModule) -> list[Any]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target is CALL]


def _inline_call(gm: fx.GraphModule, call: Any) -> None:
    body = getattr(gm, call.args[0].target)
    holders, result = body.graph.find_nodes(op="placeholder"), body.graph.output_node()
    moved = dict(zip(holders, call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copied = gm.graph.node_copy(node, moved.__getitem__)
                copied.meta = {**copied.meta, "nn_module_stack": _stack_of_call(node, call)}
                if node.op == "get_attr":
                    copied.target = _constant(gm, getattr(body, node.target))
                moved[node] = copied
    results = map_arg(result.args[0], moved.__getitem__)
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)


def _constant(gm: fx.GraphModule, held: Any) -> str:
    """Return the name of an attribute of the graph module that holds a constant of a body."""
    name = f"constant_of_region_{len(list(gm.named_children())) + len(list(gm.named_buffers()))}"
    setattr(gm, name, held)
    return name


def _stack_of_call(node: fx.Node, call: fx.Node) -> dict[str, Any]:
    """Return the modules around a node of a body, with the path of the layer that is called."""
    around, own = call.meta.get("nn_module_stack") or {}, node.meta.get("nn_module_stack") or {}
    if not around or len(own) < len(around):
        return own
    traced, called = (str([*stack.values()][len(around) - 1][0]) for stack in (own, around))
    return {
        key: (called + str(path).removeprefix(traced) if str(path).startswith(traced) else path, kind)
        for key, (path, kind) in own.items()
    }
