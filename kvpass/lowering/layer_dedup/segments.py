"""Cut a graph into segments, and find the segments that are the same function.

    before     embed  norm q k v cos sin write attend mlp  norm q k v write attend mlp  ...  norm head
    anchors                              ^                            ^
    cuts                                                 |                            |
    after      embed cos sin | norm q k v write attend mlp | norm q k v write attend mlp | ... | norm head
    kinds            0                     1                             1                          2

An anchor is any node that each layer has once.  Between two anchors the graph is cut where the fewest values are alive;
in a transformer only the residual stream is alive there.  Values that one layer computes and all later layers read,
such as a table of angles, are computed before the first layer instead.  A cut decides which code is shared, and never
changes results.  Segments run in the order of the graph and pass on every value that crosses a cut, so an unusual cut
is slow, not wrong.

Two things could make it wrong: memory that two segments share and one of them writes to, and a mode that is entered in
one segment and left in another.  A graph in which a cut would separate either is not cut at all.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import optree
import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.fx import alias, shapes, walk
from kvpass.torch_private import fx_nodes, symbolic_shapes, tensors
from kvpass.torch_private.tensors import tensor_bytes

MIN_EQUAL_LAYERS = 3
"""The fewest equal layers for which cuts pay; at least 3, as `_shared_by_layers` needs two cuts."""

EXCHANGEABLE_SIZE = sympy.Symbol("alike")
"""Stands in keys for a size that may differ between layers."""

_UNCUTTABLE = 1 << 20  # the weight of a value that no cut may separate from its readers


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a graph.

    Attributes:
        operands: nodes of other segments that the segment reads, in the order of their first use.
        body: equal for segments that compute the same from equal operands.
        results: the indices of the nodes that other segments read.
    """

    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    body: tuple[Any, ...]
    results: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Segment:
        """Return the segment of consecutive nodes of one graph."""
        index_of = {node: index for index, node in enumerate(nodes)}
        operands: dict[fx.Node, int] = {}

        def reference(parent: fx.Node) -> tuple[str, int]:
            own_index = index_of.get(parent)
            return ("operand", operands.setdefault(parent, len(operands))) if own_index is None else ("own", own_index)

        body = tuple((node.op, _target(node), walk.arguments_text(node, reference)) for node in nodes)
        results = tuple(index_of[node] for node in nodes if any(user not in index_of for user in node.users))
        return cls(tuple(nodes), tuple(operands), body, results)

    @property
    def returned(self) -> list[fx.Node]:
        """The nodes at `results`."""
        return [self.nodes[index] for index in self.results]

    def key(self, values: Sequence[Any], exchangeable: Collection[Any] = ()) -> tuple[Any, ...]:
        """Return a key that is equal for segments that the same compiled code serves.

        Args:
            values: a fake tensor or a number for each operand.
            exchangeable: symbols of sizes that may replace each other in a segment with only one of them.  For several,
                their order is unknown.
        """
        used = symbols_among(values, exchangeable)
        renamed = dict.fromkeys(used, EXCHANGEABLE_SIZE) if len(used) == 1 else {}
        return (self.body, self.results, tuple(_value_key(value, renamed) for value in values))


def symbols_among(values: Sequence[Any], symbols: Collection[Any]) -> set[Any]:
    """Return the members of `symbols` that occur in the sizes of operands."""
    return {occurring for value in values for occurring in symbolic_shapes.symbols(value)}.intersection(symbols)


def _target(node: fx.Node) -> Any:
    """Return the target of a node; for a constant its contents, for any other attribute the object's identity."""
    if node.op != "get_attr":
        return node.target
    attr = operator.attrgetter(str(node.target))(node.graph.owning_module)
    # Parameters, which derive from Tensor, and modules can change later; plain tensors are constants of the graph.
    if type(attr) is not torch.Tensor:
        return ("object", id(attr))
    return ("constant", attr.dtype, attr.device, tuple(attr.shape), attr.stride(), tensor_bytes(attr))


def _value_key(value: Any, renamed: dict[Any, Any]) -> tuple[Any, ...]:
    """Return all properties of an operand that compiled code depends on, with some symbols renamed."""

    def text(size: Any) -> str:
        return shapes.text(size, renamed) if isinstance(size, torch.SymInt) else str(size)

    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, text(value))
    sizes = (*map(text, value.shape), "by", *map(text, value.stride()), "from", text(value.storage_offset()))
    key = (isinstance(value, torch.nn.Parameter), value.requires_grad, value.dtype, value.device, *sizes)
    if not tensors.is_wrapper(value):
        return key
    inner, context = tensors.inner_tensors(value)
    inner_keys = tuple((name, _value_key(tensor, renamed)) for name, tensor in inner.items())
    leaves, structure = optree.tree_flatten(context, none_is_leaf=True)
    return (*key, type(value), inner_keys, structure, *map(_ContextValue, leaves))


class _ContextValue:
    """A value of a wrapper tensor's context in a key, of any class.

    Values are equal if their classes and texts are and `==` says so; torch's guards trust `==` too.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ContextValue) or type(self.value) is not type(other.value):
            return False
        if self.value is other.value:
            return True
        return (self.value == other.value) is True and repr(self.value) == repr(other.value)


def split(gm: fx.GraphModule, anchors: Sequence[fx.Node]) -> list[Segment]:
    """Return the segments of a graph in order; empty if the graph must stay whole.

    Args:
        anchors: one node of each layer.
    """
    order = [
        node
        for node in gm.graph.nodes
        if not (node.op in ("placeholder", "output") or fx_nodes.is_without_effect(node))
    ]
    if len(set(anchors).intersection(order)) < MIN_EQUAL_LAYERS or any(node.op == "call_module" for node in order):
        return []
    order, bounds = _bounds(order, anchors)
    segments = [Segment.of(order[start:end]) for start, end in itertools.pairwise(bounds)]
    common = max(collections.Counter(segment.body for segment in segments).values())
    return _with_equal_results(segments) if common >= MIN_EQUAL_LAYERS and _is_sound(gm, segments) else []


def _with_equal_results(segments: list[Segment]) -> list[Segment]:
    """Give segments of one body the same results, even if no node reads some of them.

    An example is a padding mask that only the first layer returns.
    """
    results: dict[Any, set[int]] = {}
    for segment in segments:
        results.setdefault(segment.body, set()).update(segment.results)
    return [dataclasses.replace(segment, results=tuple(sorted(results[segment.body]))) for segment in segments]


def _bounds(order: list[fx.Node], anchors: Sequence[fx.Node]) -> tuple[list[fx.Node], list[int]]:
    """Return the nodes in the order in which they run, and the cuts, both ends included."""
    cuts = _cuts(order, anchors)
    layers = [Segment.of(order[start:stop]) for start, stop in itertools.pairwise(cuts)]
    lengths = {layer.body: len(layer.nodes) for layer in layers}
    end = next(
        (count for count in lengths.values() if Segment.of(order[cuts[-1] : cuts[-1] + count]).body in lengths), 0
    )
    order, begin = _separate_first_layer(order, cuts, lengths)
    return order, sorted({0, begin, *cuts, cuts[-1] + end, len(order)})


def _separate_first_layer(order: list[fx.Node], cuts: list[int], lengths: dict[Any, int]) -> tuple[list[fx.Node], int]:
    """Move values that the first layer computes for all layers before it; return the order and the layer's start.

    The start is 0, with everything before the layer, if the layer equals no other layer or cannot be separated.

    Args:
        lengths: the number of nodes of each body of the other layers.
    """
    shared = _shared_by_layers(order, cuts)
    first_layer = [node for node in order[: cuts[0]] if node not in shared]
    length = next((count for count in lengths.values() if Segment.of(first_layer[-count:]).body in lengths), 0)
    first = order.index(first_layer[-length]) if length else 0
    moved = [node for node in order[first : cuts[0]] if node in shared]
    if not length or not _may_move(order, moved, first):
        return order, 0
    return [*order[:first], *moved, *first_layer[-length:], *order[cuts[0] :]], first + len(moved)


def _cuts(order: list[fx.Node], anchors: Sequence[fx.Node]) -> list[int]:
    """Return, between each anchor and the next, the last index at which the fewest values are alive."""
    index = {node: i for i, node in enumerate(order)}
    anchor_indices = sorted({index[node] for node in anchors if node in index})
    alive = _alive(order, index, anchor_indices)
    return [min(range(end, start, -1), key=alive.__getitem__) for start, end in itertools.pairwise(anchor_indices)]


def _alive(order: list[fx.Node], index: dict[fx.Node, int], anchors: list[int]) -> list[int]:
    """Return, for each index, how many values are computed before it and read at it or later.

    The graph's output does not count as a reader.  Layers share a value that is alive at two anchors; it counts as
    alive to the end, so that the last layer is cut like the others.
    """
    change = [0] * (len(order) + 2)
    for i, node in enumerate(order):
        last = max((index.get(user, i) for user in node.users), default=i)
        shared = bisect.bisect(anchors, last) - bisect.bisect(anchors, i) > 1
        weight = 1 if walk.is_tensor(node) else _UNCUTTABLE
        change[i + 1] += weight
        change[len(order) if shared else last + 1] -= weight
    return list(itertools.accumulate(change))


def _shared_by_layers(order: list[fx.Node], cuts: list[int]) -> set[fx.Node]:
    """Return the nodes before the first cut that are read after the second one, and their ancestors."""
    index = {node: i for i, node in enumerate(order)}
    read_later = [
        candidate for candidate in order[: cuts[0]] if any(index.get(user, -1) >= cuts[1] for user in candidate.users)
    ]
    return {node for shared in read_later for node in walk.ancestors(shared) if node in index}


def _may_move(order: list[fx.Node], moved: list[fx.Node], first: int) -> bool:
    """Return whether nodes may run before `order[first]`.

    They must write nothing, and no node that they pass may write to memory that they read.
    """
    if not moved:
        return True
    passed = order[first : order.index(moved[-1]) + 1]
    if any(map(alias.writes, moved)) or any(map(fx_nodes.sets_a_mode, passed)):
        return False
    alias_sets = _memory(order[0].graph)
    return _written_memory(passed, alias_sets).isdisjoint(
        alias_sets.root(parent) for node in moved for parent in node.all_input_nodes
    )


def _written_memory(nodes: Iterable[fx.Node], alias_sets: alias.AliasSets) -> set[fx.Node]:
    """Return the nodes that stand for the memory that nodes write to."""
    return {alias_sets.root(operand) for node in nodes for operand in alias.written_operands(node)}


def _memory(graph: fx.Graph) -> alias.AliasSets:
    """Return the sets of nodes that may share memory, by schemas and recorded storage."""

    def aliased(node: fx.Node) -> list[fx.Node]:
        parents = node.all_input_nodes if node.op.startswith("call_") else []
        return [*alias.written_operands(node), *(parent for parent in parents if alias.may_alias(node, parent))]

    return alias.AliasSets(graph, aliased)


def _is_sound(gm: fx.GraphModule, segments: list[Segment]) -> bool:
    """Return whether running the segments in order computes the same as the graph."""
    later = [node for segment in segments[1:] for node in segment.nodes]
    return (
        not any(map(_splits_mode, segments))
        and not any(map(fx_nodes.is_batching, later))
        and _keeps_writes(gm, segments)
    )


def _splits_mode(segment: Segment) -> bool:
    """Return whether a mode is entered in one segment and left in another."""
    modes = [node for node in segment.nodes if fx_nodes.sets_a_mode(node)]
    return len(modes) % 2 == 1 or any(parent in segment.operands for node in modes for parent in node.all_input_nodes)


def _keeps_writes(gm: fx.GraphModule, segments: list[Segment]) -> bool:
    """Return whether no written memory crosses a cut, apart from graph inputs under their own name."""
    alias_sets = _memory(gm.graph)
    segment_of = {node: number for number, segment in enumerate(segments) for node in segment.nodes}
    nodes_by_memory: dict[fx.Node, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        nodes_by_memory.setdefault(alias_sets.root(node), []).append(node)
    written = _written_memory(segment_of, alias_sets)
    return all(_is_in_one_segment(nodes_by_memory[root], segment_of) for root in written)


def _is_in_one_segment(group: list[fx.Node], segment_of: dict[fx.Node, int]) -> bool:
    """Return whether nodes that share written memory are in one segment, or are one graph input and its views."""
    inner = [node for node in group if node in segment_of]
    outer = [node for node in group if node not in segment_of]
    last = max(index for index, node in enumerate(inner) if alias.writes(node))
    if not outer:
        return len({segment_of[node] for node in inner[: last + 1]}) == 1  # reads after the last write are safe
    crosses = any(segment_of.get(user) != segment_of[node] for node in inner for user in node.users)
    only_mutations = all(fx_nodes.mutates(node) for node in inner if alias.writes(node))
    return [node.op for node in outer] == ["placeholder"] and only_mutations and not crosses
