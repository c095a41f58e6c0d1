"""Replace regions with their own autocast by casts.

    before   region = enter_autocast('cpu', torch.bfloat16, True)       after   y = linear(x.to(bf16), w.to(bf16))
             y = linear(x, w)                                                   z = y * 2
             z = y * 2
             exit_autocast(region)

Nodes inserted in a region later would be cast too.  transformers before 5.23 computes rotary embeddings in a region
with autocast disabled.  A region stays if some result in it cannot be computed without it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from kvpass.fx import alias, op_table, splicing, walk
from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import fx_nodes, tensors


def inline_autocast_regions(graph: fx.Graph) -> None:
    """Remove the regions that change nothing, and regions whose casts can be written out."""
    enters = [node for node in graph.nodes if fx_nodes.sets_a_mode(node) and node.users]
    for enter in reversed(enters):  # of nested regions the inner one first
        leaving, order = next(iter(enter.users)), list(graph.nodes)
        inside = order[order.index(enter) + 1 : order.index(leaving)]
        casts = None if any(map(fx_nodes.sets_a_mode, inside)) else _casts(inside, *enter.args[:3])
        if casts is not None:
            for node, dtype in casts.items():
                _cast_operands(node, dtype)
            graph.erase_node(leaving)
            graph.erase_node(enter)


def _casts(inside: list[fx.Node], device: Any, dtype: Any, enabled: Any) -> dict[fx.Node, torch.dtype] | None:
    """Return the nodes of a region whose operands autocast casts, with the dtype, or None if that is not known."""
    if not enabled:
        return {} if all(map(_is_independent, inside)) else None
    dtype = dtype or torch.get_autocast_dtype(device)
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype:
        return None  # around the region, the caller's autocast would cast to its own dtype
    casts: dict[fx.Node, torch.dtype] = {}
    for node in (each for each in inside if each.op in ("call_function", "call_method")):
        recorded = _dtypes(example_value(node))
        if not recorded or _dtypes_without(node, device, None) == recorded:
            continue
        found = next((x for x in (dtype, torch.float32) if _dtypes_without(node, device, x) == recorded), None)
        if found is None or alias.writes(node):  # a cast operand would be written to instead of the model's
            return None
        casts[node] = found
    return casts


def _dtypes_without(node: fx.Node, device: str, cast: torch.dtype | None) -> list[torch.dtype] | None:
    """Return the dtypes of a node's results without autocast, with its operands cast; None if it does not run."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: _cast(example_value(each), cast))
    try:
        with torch.autocast(device, enabled=False), torch.no_grad():
            return _dtypes(tensors.propagate(functools.partial(walk.function_of(node.target), **kwargs), *args))
    except (RuntimeError, TypeError):
        return None


def _dtypes(result: Any) -> list[torch.dtype]:
    """Return the floating-point dtypes of the tensors in a result."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part.dtype for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]


def _cast(operand: Any, dtype: torch.dtype | None) -> Any:
    """Return an operand as autocast casts it; float64 stays."""
    is_cast = dtype is not None and isinstance(operand, torch.Tensor) and operand.is_floating_point()
    return operand.to(dtype) if is_cast and operand.dtype != torch.float64 else operand


def _cast_operands(node: fx.Node, dtype: torch.dtype) -> None:
    """Insert the casts of a node's operands."""
    for operand in node.all_input_nodes:
        if is_tensor(operand) and _cast(example_value(operand), dtype).dtype != example_value(operand).dtype:
            node.replace_input_with(operand, splicing.emit_before(node, "to", operand, dtype))


def _is_independent(node: fx.Node) -> bool:
    """Return whether a node gives the same result with and without autocast.

    Autocast changes the dtype of products, and of operands with different dtypes.
    """
    involved = [example_value(each) for each in (node, *node.all_input_nodes)]
    dtypes = {x.dtype for x in involved if isinstance(x, torch.Tensor) and x.is_floating_point()}
    known = op_table.has_tag(node, "pointwise", "view", "keeps") or op_table.operator_name(node) in ("cat", "getitem")
    return not dtypes or (dtypes == {torch.float32} and known)
