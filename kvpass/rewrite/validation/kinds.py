"""Which attention calls of a graph are computed like an earlier one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor

from kvpass.capture.sites import AttentionSite
from kvpass.fx.shapes import LENGTH, expr
from kvpass.fx.walk import is_size, value
from kvpass.torch_private import dynamo


def last_new_kind(graph: fx.Graph, sites: Sequence[AttentionSite]) -> fx.Node:
    """The last of the calls before which the graph does something that it has not done before another call.

    Two calls are of one kind if the operations since the call before each are the same, on nodes at the same distance,
    on the same nodes before the first call, or on weights and caches of the same shape.
    """
    calls = {each.call for site in sites for each in site.all}
    nodes: list[fx.Node] = [node for node in graph.nodes if node.op != "output"]
    ends = [number for number, node in enumerate(nodes) if node in calls]
    describe = _KindDescription(nodes, ends[0], sites)
    known: set[Any] = set()
    last = nodes[ends[0]]
    for before, end in itertools.pairwise([-1, *ends]):
        kind = tuple(describe(node, end) for node in nodes[before + 1 : end + 1] if not _is_input(node))
        if kind not in known:
            known.add(kind)
            last = nodes[end]
    return last


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


class _KindDescription:
    """Describes an operation so that one that does the same before another call has the same description."""

    def __init__(self, nodes: Sequence[fx.Node], first: int, sites: Sequence[AttentionSite]) -> None:
        self._place = {node: number for number, node in enumerate(nodes)}
        self._first = first
        pasts = [past for site in sites for past in (site.past_key, site.past_value) if past is not None]
        self._pasts = set(pasts)
        self._lengths = {symbol for past in pasts for symbol in expr(value(past).shape[2]).free_symbols}

    def __call__(self, node: fx.Node, end: int) -> Any:
        """Describe an operation before the call of a number."""
        shown = fx.node.map_arg((node.args, node.kwargs), lambda parent: self._operand(parent, end))
        return (node.op, node.target, str(shown))

    def _operand(self, node: fx.Node, end: int) -> str:
        if not _is_input(node):
            early = self._place[node] < self._first
            return f"node {node.name}" if early else f"{end - self._place[node]} before"
        if is_size(node):
            return f"size {self._size(value(node))}"
        if node.op == "get_attr" or node in self._pasts or dynamo.is_of_module(node):
            held = value(node)
            return str([*map(self._size, held.shape), held.dtype]) if isinstance(held, Tensor) else node.name
        return f"input {node.name}"

    def _size(self, size: Any) -> str:
        """A size; all layers call the length of their own past the same."""
        return str(expr(size).xreplace(dict.fromkeys(self._lengths, LENGTH)))
