"""Along which dimension the tensors behind a mask follow the keys, as far as that can be proven.

A mask is asked about one slot at a time.  That is right for what is made *slice by slice*: the part that belongs to a
key from the parts of its operands that belong to the same key.  `KeyAxis` follows the keys' dimension from where it
enters (a key index, an input with an entry for every token, what is made of a token's stored rows) through the
operators of the table.  What is made in another way is computed *beside* the graph, by the model's own code and from
the arguments of the call; if it has an entry for every token, that of each slot's token is looked up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import sympy  # type: ignore[import-untyped]
import torch.fx as fx

from kvpass.errors import UnsupportedGraph
from kvpass.fx import op_table, walk
from kvpass.fx.shapes import Sizes, expr
from kvpass.fx.walk import is_tensor, value

Way = Literal["free", "plain", "sliced", "own place", "lengthened", "beside"]


@dataclasses.dataclass(frozen=True)
class Followed:
    """How a tensor is made.

    Attributes:
        way: "free" of the keys; "plain": free of them, and made of something lengthened; "sliced" slice by slice; "own
            place": by looking up each key's own entry; "lengthened": a tensor without keys, padded to as many entries
            as there are keys; "beside": in a way that is not proven.
        axis: the dimension that follows the keys, None if there is none.
    """

    way: Way
    axis: int | None


FREE, PLAIN = Followed("free", None), Followed("plain", None)


class KeyAxis:
    """What is known of the tensors behind a mask.

    Args:
        among: the nodes behind it.
        counts: the key indices among them, each of one dimension.
        entries: the inputs with an entry for every token, and their dimension.
        padding: those that tell padding.
        facts: what is made of stored rows, and its dimension.
        lengths: nodes that stand for arithmetic on the cache's length, and the expression of each.
        first: the place of the first key that the model stores, 0 or an expression of the cache's length.
    """

    def __init__(
        self,
        graph: fx.Graph,
        among: set[fx.Node],
        sizes: Sizes,
        counts: Iterable[fx.Node],
        entries: dict[fx.Node, int],
        padding: list[fx.Node],
        facts: dict[fx.Node, int],
        lengths: dict[fx.Node, sympy.Expr],
        first: sympy.Expr,
    ) -> None:
        self.sizes, self.lengths, self.first = sizes, lengths, first
        self.padding = set(padding)
        entries = entries | {node: value(node).ndim - 1 for node in padding if sizes.grown(value(node))}
        counts = list(counts)
        exact = [node for node in counts if op_table.holds_indices(value(node).dtype)]
        self.offsets: dict[fx.Node, sympy.Expr] = dict.fromkeys(exact, sympy.Integer(0))
        roots = {**dict.fromkeys(counts, 0), **entries, **facts}
        self.known = {node: Followed("sliced", axis) for node, axis in roots.items()}
        for node in graph.nodes:
            if node in among and node not in self.known and not walk.is_size(node):
                self.known[node] = self._follow(node)
                self._count(node)

    def of(self, node: fx.Node) -> Followed:
        return self.known.get(node, FREE)

    def _follow(self, node: fx.Node) -> Followed:
        grows = self.sizes.grown(value(node))
        ways = {p: self.of(p).way for p in node.all_input_nodes}
        followers = [p for p, way in ways.items() if way not in ("free", "plain")]
        if not followers and not grows:
            return PLAIN if "plain" in ways.values() else FREE
        axis = self._growing_axis(node)
        if is_lengthened(node, self.sizes):
            return Followed("lengthened", axis)
        looked_up = op_table.lookup(node)
        if looked_up is not None:
            return self._look_up(node, *looked_up) or Followed("beside", axis)
        carried = self._carried(node, followers) if followers else self._spread(node)
        if carried is None or (grows and self._growing(node) != [carried]):
            return Followed("beside", axis)
        return Followed("sliced", carried)

    def _growing_axis(self, node: fx.Node) -> int | None:
        """The one dimension that grows, if it has an entry for every key."""
        growing = self._growing(node)
        return growing[0] if len(growing) == 1 and self.sizes.is_total(value(node).shape[growing[0]]) else None

    def _growing(self, node: fx.Node) -> list[int]:
        return [d for d, size in enumerate(value(node).shape) if self.sizes.grows(size)] if is_tensor(node) else []

    def _carried(self, node: fx.Node, followers: list[fx.Node]) -> int | None:
        """Where the axes of all operands meet."""
        axes = [self.of(p).axis for p in followers]
        if any(axis is None for axis in axes) or any(self.of(p).way == "lengthened" for p in followers):
            return None
        indices = {op_table.propagate_dim(node, p, axis) for p, axis in zip(followers, axes, strict=True)}  # type: ignore[arg-type]
        return indices.pop() if len(indices) == 1 else None

    def _spread(self, node: fx.Node) -> int | None:
        """A tensor that is the same for every key, made as large as there are keys."""
        if op_table.known_name(node) not in op_table.SPREADS:
            return None
        axis = self._growing_axis(node)
        sources = [p for p in node.all_input_nodes if is_tensor(p) and p is node.args[0]]
        if axis is None:
            return None
        for source in sources if op_table.known_name(node).startswith(("expand", "broadcast")) else []:
            index = axis - value(node).ndim + value(source).ndim
            if index >= 0 and expr(value(source).shape[index]) != 1:
                return None
        return axis

    # -- lookups -------------------------------------------------------------------------------------------------------

    def _look_up(self, node: fx.Node, base: fx.Node, by: dict[int, object]) -> Followed | None:
        """A lookup: in a tensor without keys by an index that follows them, or of each key's own entry."""
        indices = {i for i in by.values() if isinstance(i, fx.Node) and is_tensor(i)}
        following = {i: self.of(i).axis for i in indices if self.of(i).way not in ("free", "plain")}
        if any(axis is None for axis in following.values()):
            return None
        places = {op_table.index_axis(node, i, axis) for i, axis in following.items()}  # type: ignore[arg-type]
        whose = self.of(base)
        if whose.way == "lengthened" and not following:
            return PLAIN
        if whose.way in ("free", "plain", "lengthened"):
            place = places.pop() if len(places) == 1 else None
            return None if place is None else Followed("sliced", place)
        index = by.get(whose.axis)  # type: ignore[arg-type]
        if base in self.padding and isinstance(index, fx.Node) and index in self.offsets and not self.is_place(index):
            raise UnsupportedGraph(
                f"{walk.source_line(node)}: the mask looks padding up at other places than those of the keys"
            )
        if isinstance(index, fx.Node) and self.is_place(index) and set(following) == {index}:
            place = places.pop()
            return None if place is None else Followed("own place", place)
        return None

    def is_place(self, index: fx.Node) -> bool:
        """Whether an index is each key's place in the padded sequence."""
        offset = self.offsets.get(index)
        return offset is not None and bool(sympy.expand(offset - self.first) == 0)

    def _count(self, node: fx.Node) -> None:
        """Keep up by how much a tensor is more than the key index."""
        parents = [p for p in node.all_input_nodes if p in self.offsets]
        if len(parents) != 1 or self.known[node].way != "sliced" or not op_table.holds_indices(value(node).dtype):
            return
        name, offset = op_table.known_name(node), self.offsets[parents[0]]
        if name in op_table.SAME_VALUE | op_table.MOVES:
            self.offsets[node] = offset
        others = [arg for arg in node.args if arg is not parents[0]]
        if name in ("add", "iadd") and len(others) == 1 and not node.kwargs:
            more = self._as_length(others[0])
            if more is not None:
                self.offsets[node] = offset + more

    def _as_length(self, argument: object) -> sympy.Expr | None:
        """A number, or arithmetic on the cache's length."""
        if isinstance(argument, fx.Node) and argument in self.lengths:
            return self.lengths[argument]
        return self.sizes.in_length(argument) if isinstance(argument, int) or walk.is_size(argument) else None


def is_lengthened(node: fx.Node, sizes: Sizes) -> bool:
    """A tensor that does not grow, lengthened along its last dimension to all keys."""
    if walk.name_of(node) != "pad" or not is_tensor(node) or not sizes.is_total(value(node).shape[-1]):
        return False
    return not sizes.grown(value(node.args[0]))  # type: ignore[arg-type]
