"""Find the attention calls of a graph that are computed like an earlier one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor

from kvpass.capture.sites import AttentionSite
from kvpass.fx.shapes import LENGTH, text
from kvpass.fx.walk import is_size, value
from kvpass.torch_private import dynamo


def last_new_kind(graph: fx.Graph, sites: Sequence[AttentionSite]) -> fx.Node:
    """Return the last attention call whose preceding operations differ from those of every earlier call.

    Two calls are of one kind if the operations since the previous call are the same.  They must read nodes at the same
    distance, the same nodes before the first call, or weights and caches of the same shape.
    """
    calls = {each.call for site in sites for each in site.all}
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
        self._lengths = dict.fromkeys((symbol for site in sites for symbol in site.growing), LENGTH)

    def __call__(self, node: fx.Node, end: int) -> Any:
        """Describe an operation before the call of index `end`."""
        operands = fx.node.map_arg((node.args, node.kwargs), lambda parent: self._operand(parent, end))
        return (node.op, node.target, str(operands))

    def _operand(self, node: fx.Node, end: int) -> str:
        if not _is_input(node):
            before_first_call = self._index[node] < self._first
            return f"node {node.name}" if before_first_call else f"{end - self._index[node]} before"
        if is_size(node):
            return f"size {self._size(value(node))}"
        if node.op == "get_attr" or node in self._pasts or dynamo.is_of_module(node):
            example = value(node)
            return str([*map(self._size, example.shape), example.dtype]) if isinstance(example, Tensor) else node.name
        return f"input {node.name}"

    def _size(self, size: Any) -> str:
        """Return a size as text; the past of every layer has the same name for its length."""
        return text(size, self._lengths)
