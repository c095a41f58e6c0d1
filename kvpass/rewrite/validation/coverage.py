"""Find the lengths at which a graph may change its behaviour, and equal layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.canonical import AttentionSite, attention_calls
from kvpass.fx import op_table, shapes, walk
from kvpass.fx.shapes import LENGTH, text
from kvpass.fx.walk import example_value, is_size
from kvpass.torch_private import dynamo

MAX_COVERED = 4200
"""The largest number of tokens in the synthetic conversation of a validation."""
EXACT_LIMITS = {torch.int8: 128, torch.uint8: 256, torch.bfloat16: 256, torch.int16: 1 << 15, torch.float16: 2048}
"""The first integers beyond which narrow dtypes cannot represent the next one."""


def length_constants(graph: fx.Graph) -> list[int]:
    """Return sorted numbers at which a graph may change: constants in integer arithmetic, table sizes and dtype limits.

    Only numbers from 3 to `MAX_COVERED` are returned.
    """
    found = {abs(number) for node in graph.nodes for number in (*_numbers(node), *_tables(node), *_narrow(node))}
    found |= {abs(int(number)) for guard in shapes.guards(graph) for number in guard.atoms(sympy.Integer)}
    return sorted(number for number in found if 2 < number <= MAX_COVERED)


def smallest_table(graph: fx.Graph) -> int:
    """Return the number of entries of the smallest table in which the graph looks something up, or `MAX_COVERED`."""
    return min((number for node in graph.nodes for number in _tables(node)), default=MAX_COVERED)


def _numbers(node: fx.Node) -> Iterator[int]:
    if node.op not in ("call_function", "call_method") or not any(map(_counts, node.all_input_nodes)):
        return
    name = op_table.operator_name(node)
    if name in op_table.tagged("compares", "adds", "divides", "bounds", "selects"):
        yield from _integers((*node.args, *node.kwargs.values()))
    elif name == "narrow" or (name == "getitem" and not isinstance(node.args[1], int)):
        yield from _integers(node.args[1:])


def _counts(node: fx.Node) -> bool:
    """Return whether a node may count tokens or index them: a size, integers, or a tensor that grows."""
    example = example_value(node)
    if not isinstance(example, Tensor):
        return walk.is_size(node)
    return not example.is_floating_point() or any(isinstance(size, torch.SymInt) for size in example.shape)


def _integers(arguments: Any) -> list[int]:
    numbers = [x for x in op_table.leaves(arguments) if isinstance(x, (int, float)) and not isinstance(x, bool)]
    return [int(number) for number in numbers if float(number).is_integer()]


def _tables(node: fx.Node) -> Iterator[int]:
    """Yield the sizes of a parameter, buffer or constant in which a node looks something up."""
    if not op_table.has_tag(node, "looks_up") and op_table.operator_name(node) != "narrow":
        return
    for parent in node.all_input_nodes:
        example = example_value(parent)
        if isinstance(example, Tensor) and (parent.op == "get_attr" or dynamo.is_of_module(parent)):
            dims = example.shape[:1] if op_table.operator_name(node) == "embedding" else example.shape
            yield from (size for size in dims if isinstance(size, int))


def _narrow(node: fx.Node) -> Iterator[int]:
    """Yield the limit of a narrow dtype to which a node converts integers, or in which it counts tokens."""
    example = example_value(node)
    if not isinstance(example, Tensor) or example.dtype not in EXACT_LIMITS:
        return
    integers = any(walk.has_integers(example_value(parent)) for parent in node.all_input_nodes)
    if integers or op_table.has_tag(node, "counts"):
        yield EXACT_LIMITS[example.dtype]


def last_new_kind(graph: fx.Graph, sites: Sequence[AttentionSite]) -> fx.Node:
    """Return the last attention call whose preceding operations differ from the operations before every earlier call.

    Two calls are of one kind if the operations since the previous call are the same.  They must read nodes at the same
    distance, the same nodes before the first call, or weights and caches of the same shape.
    """
    calls = {each.call for each in attention_calls(sites)}
    nodes: list[fx.Node] = [node for node in graph.nodes if node.op != "output"]
    ends = [index for index, node in enumerate(nodes) if node in calls]
    describe = _KindDescription(nodes, ends[0], sites)
    known: set[Any] = set()
    last = nodes[ends[0]]
    for previous, end in itertools.pairwise([-1, *ends]):
        kind = tuple(describe(node, end) for node in nodes[previous + 1 : end + 1] if not _is_input(node))
        if kind not in known:
            known.add(kind)
            last = nodes[end]
    return last


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


class _KindDescription:
    """Describe operations so that equal operations before different calls have equal descriptions."""

    def __init__(self, nodes: Sequence[fx.Node], first: int, sites: Sequence[AttentionSite]) -> None:
        self._index = {node: index for index, node in enumerate(nodes)}
        self._first = first
        self._pasts = {past for site in sites for past in site.pasts}
        self._lengths = dict.fromkeys((symbol for site in sites for symbol in site.length_symbols), LENGTH)

    def __call__(self, node: fx.Node, end: int) -> Any:
        """Describe an operation before the call of index `end`."""
        operands = fx.node.map_arg((node.args, node.kwargs), lambda parent: self._operand(parent, end))
        return (node.op, node.target, str(operands))

    def _operand(self, node: fx.Node, end: int) -> str:
        if not _is_input(node):
            before_first_call = self._index[node] < self._first
            return f"node {node.name}" if before_first_call else f"{end - self._index[node]} before"
        if is_size(node):
            return f"size {self._size(example_value(node))}"
        if node.op == "get_attr" or node in self._pasts or dynamo.is_of_module(node):
            example = example_value(node)
            return str([*map(self._size, example.shape), example.dtype]) if isinstance(example, Tensor) else node.name
        return f"input {node.name}"

    def _size(self, size: Any) -> str:
        """Return a size as text; the past of every layer has the same name for its length."""
        return text(size, self._lengths)
