"""The numbers of tokens at which a graph may begin to do something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.fx import walk
from kvpass.fx.walk import value
from kvpass.torch_private import dynamo, symbolic_shapes

MOST = 4200
"""More tokens than these are not made up."""
EXACT = {torch.int8: 128, torch.uint8: 256, torch.bfloat16: 256, torch.int16: 1 << 15, torch.float16: 2048}
"""The first whole number behind which a narrow dtype no longer has the next one."""
_ARITHMETIC = frozenset(
    {
        "lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "rsub", "iadd", "isub", "floordiv", "floor_divide", "mod",
        "remainder", "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum", "where", "masked_fill",
    }
)  # fmt: skip
_TABLES = frozenset({"embedding", "index_select", "getitem", "gather", "narrow"})


def of_lengths(graph: fx.Graph) -> list[int]:
    """Constants that whole numbers or sizes are compared with, moved or sliced by, and sizes of tables; sorted."""
    found = {abs(number) for node in graph.nodes for number in (*_numbers(node), *_tables(node), *_narrow(node))}
    found |= {abs(number) for number in _guards(graph)}
    return sorted(number for number in found if 2 < number <= MOST)


def smallest_table(graph: fx.Graph) -> int:
    """The entries of the smallest tensor in which something is looked up; `MOST` if there is none."""
    return min((number for node in graph.nodes for number in _tables(node)), default=MOST)


def _numbers(node: fx.Node) -> Iterator[int]:
    if node.op not in ("call_function", "call_method") or not any(map(_counts, node.all_input_nodes)):
        return
    name = walk.name_of(node).strip("_")
    if name in _ARITHMETIC:
        yield from _whole((*node.args, *node.kwargs.values()))
    elif name == "narrow" or (name == "getitem" and not isinstance(node.args[1], int)):
        yield from _whole(node.args[1:])


def _counts(node: fx.Node) -> bool:
    """Whether a node may be a number of tokens or a place among them: a size, whole numbers, or what grows."""
    held = value(node)
    if not isinstance(held, Tensor):
        return walk.is_size(node)
    return not held.is_floating_point() or any(isinstance(size, torch.SymInt) for size in held.shape)


def _whole(arguments: Any) -> Iterator[int]:
    if isinstance(arguments, slice):
        yield from _whole((arguments.start, arguments.stop))
    elif isinstance(arguments, (tuple, list)):
        for each in arguments:
            yield from _whole(each)
    elif isinstance(arguments, float) and arguments.is_integer():
        yield int(arguments)
    elif isinstance(arguments, int) and not isinstance(arguments, bool):
        yield arguments


def _tables(node: fx.Node) -> Iterator[int]:
    """The sizes of a parameter, buffer or constant in which a node looks something up."""
    if walk.name_of(node) not in _TABLES:
        return
    for parent in node.all_input_nodes:
        held = value(parent)
        if isinstance(held, Tensor) and (parent.op == "get_attr" or dynamo.is_of_module(parent)):
            dims = held.shape[:1] if walk.name_of(node) == "embedding" else held.shape
            yield from (size for size in dims if isinstance(size, int))


def _narrow(node: fx.Node) -> Iterator[int]:
    """The limit of a narrow dtype to which whole numbers are brought, or in which tokens are counted."""
    held = value(node)
    if not isinstance(held, Tensor) or held.dtype not in EXACT:
        return
    parents = [value(parent) for parent in node.all_input_nodes]
    whole = [x for x in parents if isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool]
    if whole or walk.name_of(node) in ("arange", "cumsum"):
        yield EXACT[held.dtype]


def _guards(graph: fx.Graph) -> Iterator[int]:
    asked = symbolic_shapes.guarded(*(value(node) for node in walk.placeholders(graph)))
    for each in asked:
        yield from (int(number) for number in each.atoms(sympy.Integer))
