"""Use private functions and operators of torch that graphs call, and copy graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.fx as fx

NEURAL = torch._C._nn
"""The module with some functions of torch.nn.functional, under whose names Dynamo records them."""


def is_sdpa(node: fx.Node) -> bool:
    """Return whether a node calls torch.nn.functional.scaled_dot_product_attention."""
    return node.op == "call_function" and node.target is torch.nn.functional.scaled_dot_product_attention


def mutates(node: fx.Node) -> bool:
    """Return whether a node calls an operator that writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def has_side_effect(node: fx.Node) -> bool:
    """Return whether a call matters although nothing reads its result: it checks a condition, or enters a mode.

    Writes to tensors are not among them, see `kvpass.fx.alias`.
    """
    from torch.fx.node import _side_effectful_functions as calls

    return node.target in calls and node.target is not operator.setitem and not is_without_effect(node)


def is_operator(node: fx.Node) -> bool:
    """Return whether a node calls an operator overload, of aten or of kvpass."""
    return isinstance(node.target, torch._ops.OpOverload)


def schema(node: fx.Node) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operator's arguments, and the default value of each."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    return tuple(each.name for each in arguments), {each.name: each.default_value for each in arguments}


def aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operator writes to or returns an alias of, by its schema."""
    return _arguments_where(node, lambda alias_info: True)


def _arguments_where(node: fx.Node, fits: Callable[[Any], bool]) -> list[fx.Node]:
    """Return the arguments of an operator whose schema has an alias annotation that fits."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    indices = [(p, each.name) for p, each in enumerate(arguments) if each.alias_info and fits(each.alias_info)]
    given = [node.args[p] if p < len(node.args) else node.kwargs.get(name) for p, name in indices]
    flat = [part for each in given for part in (each if isinstance(each, (list, tuple)) else (each,))]
    return [part for part in flat if isinstance(part, fx.Node)]


def written_arguments(node: fx.Node) -> list[fx.Node] | None:
    """Return the arguments that a library's operator or a Triton kernel writes to; None for any other call.

    Nothing states which arguments a kernel, or an operator that is called without its overload, writes to: assume all.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _arguments_where(node, lambda alias_info: bool(alias_info.is_write))
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
        return node.all_input_nodes if any(each._schema.is_mutable for each in overloads) else []
    is_kernel = isinstance(target, torch._ops.HigherOrderOperator) and target.__name__.startswith("triton_kernel")
    return node.all_input_nodes if is_kernel else None


def is_without_effect(node: fx.Node) -> bool:
    """Return whether a node only logs usage or switches gradients, which inference does not need."""
    return is_log_only(node) or (node.op == "call_function" and node.target is torch._C._set_grad_enabled)


def is_collective(node: fx.Node) -> bool:
    """Return whether a call exchanges tensors between processes, in Dynamo's graphs or in aten graphs."""
    family, _, name = str(node.target).partition(".")
    return node.op == "call_function" and family.strip("_").startswith("c10d") and not name.startswith("wait_tensor")


def sets_a_mode(node: fx.Node) -> bool:
    """Return whether a node enters or exits autocast."""
    pair = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
    return node.op == "call_function" and node.target in pair


def is_batching(node: fx.Node) -> bool:
    """Return whether a node calls into the machinery of vmap, which Dynamo leaves in graphs."""
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and module.startswith(("torch._C._functorch", "torch._functorch"))


def batching_kind(node: fx.Node) -> Literal["begins", "ends", "prepares", "maps"] | None:
    """Return the role of a call in a vmap region: it begins, ends or prepares regions, or maps tensors."""
    if not is_batching(node):
        return None
    name = node.target.__name__  # type: ignore[union-attr]
    if name.endswith("_increment_nesting"):
        return "begins"
    if name.endswith("_decrement_nesting"):
        return "ends"
    return "prepares" if name == "lazy_load_decompositions" else "maps"


def is_log_only(node: fx.Node) -> bool:
    """Return whether a node is torch's own usage logging, which Dynamo leaves in graphs."""
    return node.target is torch._C._log_api_usage_once


def copy_graph_module(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Copy a graph module for rewriting; return the copy and a map from original to copied nodes.

    Dynamo still reads the original after a backend returns, so the original must not change.  Most copies are rewritten
    before they run, and generating code takes as long as copying, so the copy generates its code on demand.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    graph = fx.Graph()
    copy_of: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, copy_of)
    graph.output(result)
    for node, copied in copy_of.items():
        if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    copy = _LazyGraphModule(gm, graph)
    copy.meta.update(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    return copy, copy_of


def code_of(gm: fx.GraphModule) -> Callable[..., Any]:
    """Return the function that runs a graph; the code of a copy is generated first."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    _LazyGraphModule.force_recompile(gm)
    return gm.forward
