"""Where a graph is cut, and which of its segments are the same function.

    before     embed  norm q k v cos sin write attend mlp  norm q k v write attend mlp  ...  norm head
    anchors                              ^                            ^
    cuts                                                 |                            |
    after      embed cos sin | norm q k v write attend mlp | norm q k v write attend mlp | ... | norm head
    kinds            0                     1                             1                          2

An anchor is any node that each layer has one of.  Between two anchors the graph is cut where the fewest values are
alive, which in a transformer is where only the residual stream is.  What one layer makes and all later ones read, such
as a table of angles, is made before the first layer instead.  The cut decides what is shared and never what is
computed: segments run in the order of the graph and hand on every value that crosses, so a cut in a strange place is
slow, not wrong.

What could make it wrong is memory that two segments share and one of them writes to, and modes that are entered in one
segment and left in another.  A graph in which a cut would part such a thing is not cut at all.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from kvpass.fx import alias, walk
from kvpass.fx.constants import tensor_bytes
from kvpass.torch_private import fx_nodes, symbolic_shapes

ALIKE = 3
"""Layers of one kind from which on cutting a graph is worth its calls."""

ALIKE_SIZE = sympy.Symbol("alike")
"""Stands in keys for a size of which there may be another for each layer."""

_NEVER = 1 << 20  # what a value weighs that no cut may separate from its readers


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a graph.

    Attributes:
        operands: nodes of other segments that it reads, in the order of their first use.
        body: equal for segments that compute the same, if their operands are alike.
        results: which of its nodes others read, by their places.
    """

    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    body: tuple[Any, ...]
    results: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Segment:
        """The segment of some nodes of one graph."""
        place_of = {node: index for index, node in enumerate(nodes)}
        operands: dict[fx.Node, int] = {}

        def told(parent: fx.Node) -> tuple[str, int]:
            return (
                ("own", place_of[parent])
                if parent in place_of
                else ("operand", operands.setdefault(parent, len(operands)))
            )

        body = tuple((node.op, _target(node), _told(node, told)) for node in nodes)
        results = tuple(place_of[node] for node in nodes if any(user not in place_of for user in node.users))
        return cls(tuple(nodes), tuple(operands), body, results)

    @property
    def returned(self) -> list[fx.Node]:
        """The nodes at `results`."""
        return [self.nodes[index] for index in self.results]

    def reading(self, more: Iterable[fx.Node]) -> Segment:
        """The same with further operands, such as sizes that those it has are made of."""
        return dataclasses.replace(self, operands=tuple(dict.fromkeys((*self.operands, *more))))

    def key(self, values: Sequence[Any], alike: Collection[Any] = ()) -> tuple[Any, ...]:
        """Equal for segments that the same compiled code serves.

        Args:
            values: a fake tensor or a number for each operand.
            alike: symbols of sizes of which one may stand for another, in a segment that has one of them: of how two
                compare, nothing is known.
        """
        found = met(values, alike)
        renamed = dict.fromkeys(found, ALIKE_SIZE) if len(found) == 1 else {}
        return (self.body, self.results, tuple(_about(value, renamed) for value in values))


def met(values: Sequence[Any], alike: Collection[Any]) -> set[Any]:
    """Those of some symbols that operands have."""
    return {symbol for value in values for symbol in symbolic_shapes.symbols(value)}.intersection(alike)


def _target(node: fx.Node) -> Any:
    """What a node calls; of a constant its contents, and of any other attribute the object."""
    if node.op != "get_attr":
        return node.target
    held = operator.attrgetter(str(node.target))(node.graph.owning_module)
    if type(held) is not torch.Tensor:
        return ("held", id(held))
    return ("constant", held.dtype, held.device, tuple(held.shape), held.stride(), tensor_bytes(held))


def _told(node: fx.Node, told: Callable[[fx.Node], tuple[str, int]]) -> str:
    """The arguments of a node, with places instead of nodes and all else as it is: 1, 1.0 and True are three."""

    def tell(argument: Any) -> Any:
        return told(argument) if isinstance(argument, fx.Node) else (type(argument).__name__, repr(argument))

    return repr(map_aggregate((node.args, node.kwargs), tell))


def _about(value: Any, renamed: dict[Any, Any]) -> tuple[Any, ...]:
    """All of an operand that compiled code depends on, with other names for some symbols."""

    def said(size: Any) -> str:
        return str(symbolic_shapes.expression(size).xreplace(renamed)) if isinstance(size, torch.SymInt) else str(size)

    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, said(value))
    sizes = (*map(said, value.shape), "by", *map(said, value.stride()), "from", said(value.storage_offset()))
    return (isinstance(value, torch.nn.Parameter), value.requires_grad, value.dtype, value.device, *sizes)


def readers_of_slots(gm: fx.GraphModule) -> list[fx.Node]:
    """Anchors of a rewritten step: the first reader of each layer's keys, which in decoding is what writes to them."""
    keys = [node for node in walk.placeholders(gm.graph) if re.fullmatch(r"slots_\d+_key", node.name)]
    index = {node: i for i, node in enumerate(gm.graph.nodes)}
    return [min(node.users, key=index.__getitem__) for node in keys if node.users]


def split(gm: fx.GraphModule, anchors: Sequence[fx.Node]) -> list[Segment]:
    """The segments of a graph in the order in which they run; empty if it is to stay whole.

    Args:
        anchors: one node of each layer.
    """
    order = [node for node in gm.graph.nodes if not _is_outside(node)]
    if len(set(anchors).intersection(order)) < ALIKE or any(node.op == "call_module" for node in order):
        return []
    order, bounds = _bounds(order, anchors)
    segments = [Segment.of(order[a:b]) for a, b in itertools.pairwise(bounds)]
    common = max(collections.Counter(segment.body for segment in segments).values())
    return _returning_alike(segments) if common >= ALIKE and _is_sound(gm, segments) else []


def _is_outside(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or fx_nodes.changes_nothing(node)


def _returning_alike(segments: list[Segment]) -> list[Segment]:
    """Segments that compute the same give the same, even if nobody reads it: the first layer's padding, say."""
    results: dict[Any, set[int]] = {}
    for segment in segments:
        results.setdefault(segment.body, set()).update(segment.results)
    return [dataclasses.replace(segment, results=tuple(sorted(results[segment.body]))) for segment in segments]


def _bounds(order: list[fx.Node], anchors: Sequence[fx.Node]) -> tuple[list[fx.Node], list[int]]:
    """The nodes in the order in which they are to run, and where they are cut, both ends included."""
    cuts = _cuts(order, anchors)
    layers = [Segment.of(order[a:b]) for a, b in itertools.pairwise(cuts)]
    known = {layer.body: len(layer.nodes) for layer in layers}
    end = next((n for n in known.values() if Segment.of(order[cuts[-1] : cuts[-1] + n]).body in known), 0)
    order, begin = _begin(order, cuts, known)
    return order, sorted({0, begin, *cuts, cuts[-1] + end, len(order)})


def _begin(order: list[fx.Node], cuts: list[int], known: dict[Any, int]) -> tuple[list[fx.Node], int]:
    """Put what the first layer makes for all of them before it; gives the order and where that layer begins.

    It begins at 0, together with what is before it, if it is not like another or cannot be told apart.

    Args:
        known: the bodies of other layers, with their lengths.
    """
    shared = _shared(order, cuts)
    first_layer = [node for node in order[: cuts[0]] if node not in shared]
    length = next((n for n in known.values() if Segment.of(first_layer[-n:]).body in known), 0)
    first = order.index(first_layer[-length]) if length else 0
    late = [node for node in order[first : cuts[0]] if node in shared]
    if not length or not _may_move(order, late, first):
        return order, 0
    return [*order[:first], *late, *first_layer[-length:], *order[cuts[0] :]], first + len(late)


def _cuts(order: list[fx.Node], anchors: Sequence[fx.Node]) -> list[int]:
    """Between each anchor and the next, the last place at which the fewest values are alive."""
    index = {node: i for i, node in enumerate(order)}
    at = sorted({index[node] for node in anchors if node in index})
    alive = _alive(order, index, at)
    return [min(range(b, a, -1), key=alive.__getitem__) for a, b in itertools.pairwise(at)]


def _alive(order: list[fx.Node], index: dict[fx.Node, int], anchors: list[int]) -> list[int]:
    """For each place how many values are made before it and read at it or after it; being returned does not count.

    What is alive at two anchors is shared by layers, and is taken to live on, so that the last layer is cut as others.
    """
    change = [0] * (len(order) + 2)
    for i, node in enumerate(order):
        last = max((index.get(user, i) for user in node.users), default=i)
        shared = bisect.bisect(anchors, last) - bisect.bisect(anchors, i) > 1
        weight = 1 if walk.is_tensor(node) else _NEVER
        change[i + 1] += weight
        change[len(order) if shared else last + 1] -= weight
    return list(itertools.accumulate(change))


def _shared(order: list[fx.Node], cuts: list[int]) -> set[fx.Node]:
    """What is made before the first cut and read behind the second one, and what that is made from."""
    index = {node: i for i, node in enumerate(order)}
    beyond = cuts[1] if len(cuts) > 1 else len(order)
    wanted = [n for n in order[: cuts[0]] if any(index.get(user, -1) >= beyond for user in n.users)]
    return {node for each in wanted for node in walk.ancestors(each) if node in index}


def _may_move(order: list[fx.Node], late: list[fx.Node], first: int) -> bool:
    """Whether nodes may run before `order[first]`: they write nothing, and nothing is written on their way."""
    if not late:
        return True
    passed = order[first : order.index(late[-1]) + 1]
    if any(map(_writes, late)) or any(map(fx_nodes.sets_a_mode, passed)):
        return False
    memory = _MemoryOwners(order[0].graph)
    written = {memory.of(node.all_input_nodes[0]) for node in passed if _writes(node)}
    return written.isdisjoint(memory.of(parent) for node in late for parent in node.all_input_nodes)


def _writes(node: fx.Node) -> bool:
    return fx_nodes.mutates(node) or alias.writes(node)


class _MemoryOwners:
    """Which nodes may share their memory.

    Aten's operators say so themselves; for what Dynamo traced, the fake tensors that it recorded do.  Where neither
    is known, a node may share the memory of all that it is made from.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._above: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for parent in node.all_input_nodes if node.op.startswith("call_") else ():
                if alias.may_alias(node, parent):
                    self._above[self.of(node)] = self.of(parent)

    def of(self, node: fx.Node) -> fx.Node:
        """One node for all that may share memory."""
        while node in self._above and self._above[node] is not node:
            node = self._above[node]
        return node


def _is_sound(gm: fx.GraphModule, segments: list[Segment]) -> bool:
    """Whether running the segments one after the other is running the graph."""
    later = [node for segment in segments[1:] for node in segment.nodes]
    return (
        not any(map(_parts_a_mode, segments))
        and not any(map(fx_nodes.is_batching, later))
        and _keeps_writes(gm, segments)
    )


def _parts_a_mode(segment: Segment) -> bool:
    """Whether a mode is entered in one segment and left in another."""
    modes = [node for node in segment.nodes if fx_nodes.sets_a_mode(node)]
    return len(modes) % 2 == 1 or any(parent in segment.operands for node in modes for parent in node.all_input_nodes)


def _keeps_writes(gm: fx.GraphModule, segments: list[Segment]) -> bool:
    """Whether no memory that is written to crosses a cut, inputs under their own name excepted."""
    memory = _MemoryOwners(gm.graph)
    home = {node: number for number, segment in enumerate(segments) for node in segment.nodes}
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        groups.setdefault(memory.of(node), []).append(node)
    written = {memory.of(node.all_input_nodes[0]) for node in home if _writes(node)}
    return all(_stays(groups[root], home) for root in written)


def _stays(group: list[fx.Node], home: dict[fx.Node, int]) -> bool:
    """Whether nodes that share memory that is written to are in one segment, or are one input and views of it.

    Args:
        group: in the order of the graph.
        home: the segment of each node that is in one.
    """
    inner = [node for node in group if node in home]
    outer = [node for node in group if node not in home]
    last = max(index for index, node in enumerate(inner) if _writes(node))
    if not outer:
        return len({home[node] for node in inner[: last + 1]}) == 1  # what is read afterwards does not change any more
    crosses = any(home.get(user) != home[node] for node in inner for user in node.users)
    ours = all(fx_nodes.mutates(node) for node in inner if _writes(node))
    return [node.op for node in outer] == ["placeholder"] and ours and not crosses
