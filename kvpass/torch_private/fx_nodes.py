"""Private names that nodes of FX graphs call, and copying graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.fx as fx
from torch import Tensor

NEURAL = torch._C._nn
"""Where torch.nn.functional has some of its functions from, under which names Dynamo records them."""


def is_sdpa(node: fx.Node) -> bool:
    """A call of torch.nn.functional.scaled_dot_product_attention."""
    return node.op == "call_function" and node.target is torch.nn.functional.scaled_dot_product_attention


def mutates(node: fx.Node) -> bool:
    """A call of an aten operator that writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_operator(node: fx.Node) -> bool:
    """A call of one of aten's operators, or of one of our own."""
    return isinstance(node.target, torch._ops.OpOverload)


def passes_on(node: fx.Node) -> list[fx.Node]:
    """The arguments of an operator whose memory it writes to or gives, as its schema says."""
    schema = node.target._schema  # type: ignore[union-attr]
    indices = [(index, argument.name) for index, argument in enumerate(schema.arguments) if argument.alias_info]
    given = [node.args[p] if p < len(node.args) else node.kwargs.get(name) for p, name in indices]
    flat = [part for each in given for part in (each if isinstance(each, (list, tuple)) else (each,))]
    return [part for part in flat if isinstance(part, fx.Node)]


def changes_nothing(node: fx.Node) -> bool:
    """torch's usage logging, and gradients that are turned on and off, in a graph that nobody needs gradients of."""
    return is_log_only(node) or (node.op == "call_function" and node.target is torch._C._set_grad_enabled)


def is_collective(node: fx.Node) -> bool:
    """Whether processes exchange tensors in a call, as Dynamo and the tracer of operators record it."""
    family, _, name = str(node.target).partition(".")
    return node.op == "call_function" and family.strip("_").startswith("c10d") and not name.startswith("wait_tensor")


def all_reduced(x: Tensor, how: str, group: str) -> Tensor:
    """The "sum" or "max" of what the processes of a group, by its name, have; can be traced, and run as it is."""
    operators = torch.ops._c10d_functional
    return cast(Tensor, operators.wait_tensor(operators.all_reduce(x, how, group)))


def sets_a_mode(node: fx.Node) -> bool:
    """One of the pair of calls between which autocasting is on or off."""
    pair = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
    return node.op == "call_function" and node.target in pair


def is_batching(node: fx.Node) -> bool:
    """A call into the machinery of vmap, which Dynamo leaves in graphs, and which other calls go through."""
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and module.startswith(("torch._C._functorch", "torch._functorch"))


def batching_kind(node: fx.Node) -> Literal["begins", "ends", "prepares", "maps"] | None:
    """Return what a call does for a region of vmap: begin it, end it, prepare for any, or map tensors in or out."""
    if not is_batching(node):
        return None
    name = node.target.__name__  # type: ignore[union-attr]
    if name.endswith("_increment_nesting"):
        return "begins"
    if name.endswith("_decrement_nesting"):
        return "ends"
    return "prepares" if name == "lazy_load_decompositions" else "maps"


def is_log_only(node: fx.Node) -> bool:
    """torch's own usage logging, which Dynamo leaves in graphs."""
    return node.target is torch._C._log_api_usage_once


def copy_graph_module(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy that may be rewritten, and where each node of the original went.

    Dynamo goes on reading the original after a backend returns, so it must stay as it is.  Most copies never run as
    they are: the copy's code is made when it is asked for, as that takes as long as copying.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    graph = fx.Graph()
    moved: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, moved)
    graph.output(result)
    for node, copied in moved.items():
        if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    copy = _LazyGraphModule(gm, graph)
    copy.meta.update(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    return copy, moved


def code_of(gm: fx.GraphModule) -> Callable[..., Any]:
    """What runs a graph; that of a copy is made by now."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    _LazyGraphModule.force_recompile(gm)
    return gm.forward
