"""Sparse indices: a mask that lets each query see the keys that score best, by a small attention of its own.

Such a mask hides nothing while there are no more keys than it selects.  On no more slots than that it is taken for
one that selects all, and the keys by which it scores, which the model caches beside the others, are not kept at all.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx

from kvpass.capture.canonical import is_attention
from kvpass.errors import UnsupportedGraph
from kvpass.fx import walk
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, name_of, value


@dataclasses.dataclass(frozen=True)
class SparseIndex:
    """A choice among the keys.

    Attributes:
        node: the mask of the chosen ones, a number scattered to their places.
        number: what stands at a chosen place.
        best: the topk that chooses them.
        most: how many it chooses of more than that; None if the graph serves one length only.
    """

    node: fx.Node
    number: bool | int | float
    best: fx.Node
    most: int | None

    def check(self, keys: int) -> None:
        """Refuse more keys than are chosen.

        Raises:
            UnsupportedGraph: there are.
        """
        if self.most is not None and keys > self.most:
            raise UnsupportedGraph(
                f"{walk.source_line(self.best)}: a sparse index chooses {self.most} of the tokens, and here it would "
                f"have to choose among {keys}; kvpass can only leave it out where it chooses all of them"
            )


def find(mask: fx.Node | None) -> list[SparseIndex]:
    """The choices that a mask is made of."""
    if mask is None:
        return []
    made = [_read(node) for node in ancestors(mask) if name_of(node) == "scatter"]
    return [index for index in made if index is not None and _nearest(index, mask)]


def _nearest(index: SparseIndex, mask: fx.Node) -> bool:
    """Whether the mask is made of it in this layer, and not of hidden states that an earlier one had a say in."""
    seen, todo = set[fx.Node](), [mask]
    while todo:
        node = todo.pop()
        if node is index.node:
            return True
        if node not in seen and not _makes_states(node):
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return False


def _makes_states(node: fx.Node) -> bool:
    """Whether a node projects hidden states or attends, so that what is before it is another layer's matter."""
    return name_of(node) in _PROJECTIONS or is_attention(node)


_PROJECTIONS = frozenset({"linear", "addmm", "softmax", "scaled_dot_product_attention"})


def _read(node: fx.Node) -> SparseIndex | None:
    """A number scattered along the last dimension to the places of a topk."""
    if len(node.args) != 4 or not isinstance(node.args[3], (bool, int, float)):
        return None
    best = node.args[2]
    while isinstance(best, fx.Node) and name_of(best) in ("to", "long", "int", "getitem"):
        best = best.args[0]
    if not isinstance(best, fx.Node) or name_of(best) != "topk" or node.args[1] not in (-1, value(node).ndim - 1):
        return None
    return SparseIndex(node, node.args[3], best, _most(best))


def _most(best: fx.Node) -> int | None:
    count, keys = expr(best.args[1] if len(best.args) > 1 else best.kwargs["k"]), expr(value(best.args[0]).shape[-1])  # type: ignore[arg-type]
    if count == keys:
        return None
    numbers = [part for part in (*count.args, count) if part.is_Integer]
    return int(numbers[0]) if count.is_Integer or count.func.__name__ == "Min" else 0


def cached(index: SparseIndex, outputs: list[fx.Node]) -> list[tuple[fx.Node, int]]:
    """The grown keys by which it scores that the graph returns, and the dimension along which they grow."""
    behind = ancestors(index.best, filter(_makes_states, ancestors(index.best)))
    kept = [node for node in outputs if node in behind and walk.is_tensor(node) and value(node).ndim == 3]
    return [(node, 1) for node in kept if node.target is torch.cat]


def everything(index: SparseIndex, graph: fx.Graph) -> fx.Node:
    """A mask of which everything is chosen, emitted into a graph."""
    kind = {"dtype": value(index.node).dtype, "device": value(index.node).device}
    return graph.call_function(torch.full, ((1,) * value(index.node).ndim, index.number), kind)
