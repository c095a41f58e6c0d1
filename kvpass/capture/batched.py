"""torch.vmap in a graph, written out: what it maps over becomes dimensions of ordinary operators.

    increment_nesting(n, 'error')                     r = rows[:, None]
    r = add_batch_dim(rows, 0, 1)                     k = keys[None, :]
    increment_nesting(m, 'error')                     y = r >= k
    k = add_batch_dim(keys, 0, 2)                     w = y.expand(n, m)
    y = r >= k
    z = remove_batch_dim(y, 2, m, 0)
    decrement_nesting()
    w = remove_batch_dim(z, 1, n, 0)
    decrement_nesting()

transformers computes masks with functions of its users' in this way, for one query and one key at a time.  That is
followed if what is computed has no dimensions but those: each of them then has a place of its own, and operators that
work place by place, and lookups by a full set of indices, give the same on tensors that are broadcast.  Anything else
stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import alias, op_table, walk
from kvpass.fx.walk import is_tensor, value
from kvpass.torch_private import fx_nodes


def write_out(graph: fx.Graph) -> None:
    """Write out every torch.vmap of a graph, or none if one cannot be."""
    calls = [node for node in graph.nodes if fx_nodes.is_batching(node)]
    if not calls:
        return
    before = set(graph.nodes)
    levels: list[Any] = [node.args[2] for node in calls if _is(node, "_add_batch_dim")]
    writer = _Writer(graph, max(levels, default=0))
    try:
        for node in list(graph.nodes):
            writer.take(node)
    except _NotFollowed:
        _erase(graph, set(graph.nodes) - before)
        return
    for theirs, ours in writer.results.items():
        theirs.replace_all_uses_with(ours)
    _erase(graph, {*calls, *writer.mapped})


class _NotFollowed(Exception):
    """Something is not known to give the same on tensors that are broadcast."""


class _Writer:
    """Writes nodes that are mapped over on tensors with a dimension for each of `levels`.

    Attributes:
        mapped: for each node inside, what stands for it; it has a dimension for every level, or none.
        leaving: for each node that has some levels put in front, what stands for it without, and their sizes.
        results: for each node that has all, what gives the same.
    """

    def __init__(self, graph: fx.Graph, levels: int) -> None:
        self.graph, self.levels = graph, levels
        self.mapped: dict[fx.Node, fx.Node] = {}
        self.leaving: dict[fx.Node, tuple[fx.Node, list[Any]]] = {}
        self.results: dict[fx.Node, fx.Node] = {}

    def take(self, node: fx.Node) -> None:
        """Write a node, if it is inside.

        Raises:
            _NotFollowed: it cannot be.
        """
        if _is(node, "_add_batch_dim"):
            self._enter(node)
        elif _is(node, "_remove_batch_dim"):
            self._leave(node)
        elif self.leaving.keys() & node.all_input_nodes:
            raise _NotFollowed
        elif self.mapped.keys() & node.all_input_nodes:
            self._inside(node)

    def _enter(self, node: fx.Node) -> None:
        given, dim, level = _arguments(node)
        if dim != 0 or not is_tensor(given) or given in self.mapped or value(given).ndim != 1:
            raise _NotFollowed
        subscript = tuple(slice(None) if each == level else None for each in range(1, self.levels + 1))
        self.mapped[node] = self._emit(node, operator.getitem, given, subscript)

    def _leave(self, node: fx.Node) -> None:
        """The levels are left from the innermost on, and each comes in front of those that were left before."""
        given, level, size, dim = _arguments(node)
        first = level == self.levels and given in self.mapped
        inside, sizes = (self.mapped[given], []) if first else self.leaving.get(given, (None, []))
        if inside is None or dim != 0 or len(sizes) != self.levels - level:
            raise _NotFollowed
        self.leaving[node] = inside, [size, *sizes]
        if level == 1:
            self.results[node] = self._spread(node, *self.leaving.pop(node))

    def _spread(self, node: fx.Node, inside: fx.Node, sizes: list[Any]) -> fx.Node:
        """With a row for every index, also along levels that nothing was taken from."""
        with self.graph.inserting_before(node):
            made = self.graph.call_method("expand", (inside, *sizes))
        made.meta.update(node.meta)
        return made

    def _inside(self, node: fx.Node) -> None:
        """Something that is computed for one of each at a time."""
        scalars = all(value(each).ndim == 0 for each in node.all_input_nodes if each in self.mapped and is_tensor(each))
        if not is_tensor(node) or value(node).ndim != 0 or not scalars or alias.writes(node):
            raise _NotFollowed
        made = self._looked_up(node) if node.target in _LOOKUPS else self._place_by_place(node)
        if value(made).dtype != value(node).dtype:  # a number's dtype gives way to that of a tensor with dimensions
            raise _NotFollowed
        self.mapped[node] = made

    def _looked_up(self, node: fx.Node) -> fx.Node:
        base, indices = _arguments(node)
        indices = indices if isinstance(indices, (tuple, list)) else (indices,)
        if base in self.mapped or len(indices) != value(base).ndim or not all(map(_is_scalar, indices)):
            raise _NotFollowed
        return self._emit(node, operator.getitem, base, tuple(self.mapped.get(each, each) for each in indices))

    def _place_by_place(self, node: fx.Node) -> fx.Node:
        outside = [each for each in node.all_input_nodes if each not in self.mapped and is_tensor(each)]
        made_alike = op_table.known_name(node) in _MADE and _arguments(node)[1] in ((), [])
        if not (op_table.is_pointwise(node) or made_alike) or not all(map(_is_scalar, outside)):
            raise _NotFollowed
        with self.graph.inserting_before(node):
            made = self.graph.node_copy(node, lambda each: self.mapped.get(each, each))
        made.meta["example_value"] = op_table.run_on(made, {each: value(each) for each in made.all_input_nodes})
        return made

    def _emit(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(node):
            made = self.graph.call_function(target, args)
        known = fx.map_arg(args, value)
        made.meta.update(example_value=target(*known), stack_trace=node.meta.get("stack_trace"))
        return made


_LOOKUPS = (operator.getitem, torch.ops.aten.index, torch.ops.aten.index.Tensor)
_MADE = frozenset({"new_zeros", "new_ones"})


def _is(node: fx.Node, name: str) -> bool:
    return fx_nodes.is_batching(node) and walk.name_of(node) == name


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.args)


def _is_scalar(node: Any) -> bool:
    return is_tensor(node) and value(node).ndim == 0


def _erase(graph: fx.Graph, nodes: set[fx.Node]) -> None:
    for node in reversed([each for each in graph.nodes if each in nodes]):
        graph.erase_node(node)
