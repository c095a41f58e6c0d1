"""Which attention calls of a graph are computed like an earlier one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from kvpass import compat
from kvpass.capture.canonical import APPEND
from kvpass.capture.sites import AttentionSite
from kvpass.graphs import value


def last_new_kind(graph: fx.Graph, sites: Sequence[AttentionSite]) -> fx.Node:
    """The last of the calls before which the graph does something that it has not done before another call.

    Two calls are of one kind if the operations since the call before each are the same, on nodes at the same distance,
    on the same nodes before the first call, or on weights and caches of the same shape.
    """
    calls = {each.call for site in sites for each in site.all}
    nodes = [node for node in graph.nodes if node.op != "output"]
    place = {node: number for number, node in enumerate(nodes)}
    ends = [number for number, node in enumerate(nodes) if node in calls]
    known: set[Any] = set()
    last: fx.Node = nodes[ends[0]]
    for before, end in itertools.pairwise([-1, *ends]):
        kind = tuple(_described(node, place, end, ends[0]) for node in nodes[before + 1 : end + 1] if not _input(node))
        if kind not in known:
            known.add(kind)
            last = nodes[end]
    return last


def _input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _described(node: fx.Node, place: dict[fx.Node, int], end: int, first: int) -> Any:
    """An operation, so that it is equal to one that does the same before another call."""

    def where(parent: fx.Node) -> str:
        if not _input(parent):
            return f"node {parent.name}" if place[parent] < first else f"{end - place[parent]} before"
        shown, of_layer = value(parent), parent.op == "get_attr" or compat.is_of_module(parent) or parent in pasts
        return str(("input", shown.shape, shown.dtype)) if of_layer and shown is not None else f"input {parent.name}"

    pasts = _pasts(node)
    return (node.op, node.target, str(fx.node.map_arg((node.args, node.kwargs), where)))


def _pasts(node: fx.Node) -> set[Any]:
    """The past of a cache, where a node makes it grow."""
    return {node.args[0]} if node.target is APPEND else set()
