"""Find the numbers of tokens at which a graph may change its behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.fx import op_table, shapes, walk
from kvpass.fx.walk import value
from kvpass.torch_private import dynamo

MAX_TOKENS = 4200
"""The largest number of tokens that a validation makes up."""
EXACT_LIMITS = {torch.int8: 128, torch.uint8: 256, torch.bfloat16: 256, torch.int16: 1 << 15, torch.float16: 2048}
"""The first integers beyond which narrow dtypes cannot represent the next one."""
_ARITHMETIC = op_table.tagged("compares", "adds") | {
    "floordiv", "floor_divide", "mod", "remainder", "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum",
    "where", "masked_fill",
}  # fmt: skip


def length_constants(graph: fx.Graph) -> list[int]:
    """Return sorted numbers at which a graph may change: constants in integer arithmetic, table sizes and dtype limits.

    Only numbers from 3 to `MAX_TOKENS` are returned.
    """
    found = {abs(number) for node in graph.nodes for number in (*_numbers(node), *_tables(node), *_narrow(node))}
    found |= {abs(number) for number in _guards(graph)}
    return sorted(number for number in found if 2 < number <= MAX_TOKENS)


def smallest_table(graph: fx.Graph) -> int:
    """Return the number of entries of the smallest table in which the graph looks something up, or `MAX_TOKENS`."""
    return min((number for node in graph.nodes for number in _tables(node)), default=MAX_TOKENS)


def _numbers(node: fx.Node) -> Iterator[int]:
    if node.op not in ("call_function", "call_method") or not any(map(_counts, node.all_input_nodes)):
        return
    name = walk.name_of(node).strip("_")
    if name in _ARITHMETIC:
        yield from _integers((*node.args, *node.kwargs.values()))
    elif name == "narrow" or (name == "getitem" and not isinstance(node.args[1], int)):
        yield from _integers(node.args[1:])


def _counts(node: fx.Node) -> bool:
    """Return whether a node may count tokens or index them: a size, integers, or a tensor that grows."""
    example = value(node)
    if not isinstance(example, Tensor):
        return walk.is_size(node)
    return not example.is_floating_point() or any(isinstance(size, torch.SymInt) for size in example.shape)


def _integers(arguments: Any) -> list[int]:
    numbers = [x for x in op_table.leaves(arguments) if isinstance(x, (int, float)) and not isinstance(x, bool)]
    return [int(number) for number in numbers if float(number).is_integer()]


def _tables(node: fx.Node) -> Iterator[int]:
    """Yield the sizes of a parameter, buffer or constant in which a node looks something up."""
    if walk.name_of(node) not in op_table.tagged("looks_up") | {"narrow"}:
        return
    for parent in node.all_input_nodes:
        example = value(parent)
        if isinstance(example, Tensor) and (parent.op == "get_attr" or dynamo.is_of_module(parent)):
            dims = example.shape[:1] if walk.name_of(node) == "embedding" else example.shape
            yield from (size for size in dims if isinstance(size, int))


def _narrow(node: fx.Node) -> Iterator[int]:
    """Yield the limit of a narrow dtype to which a node converts integers, or in which it counts tokens."""
    example = value(node)
    if not isinstance(example, Tensor) or example.dtype not in EXACT_LIMITS:
        return
    parents = [value(parent) for parent in node.all_input_nodes]
    integers = [x for x in parents if isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool]
    if integers or walk.name_of(node) in op_table.tagged("counts"):
        yield EXACT_LIMITS[example.dtype]


def _guards(graph: fx.Graph) -> Iterator[int]:
    for guard in shapes.guards(graph):
        yield from (int(number) for number in guard.atoms(sympy.Integer))
