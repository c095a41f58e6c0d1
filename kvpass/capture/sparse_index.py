"""Find masks that select the keys of highest score, and leave them out where they select all keys.

A *sparse index* is a mask that lets each query see the keys of highest score in a small attention.  While there are no
more keys than such a mask selects, it hides nothing.  A layer with at most so many slots is rewritten as if all keys
were selected, and the scoring keys, which the model caches as a third tensor, are dropped.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx as fx

from kvpass.capture.canonical import is_attention
from kvpass.fx import op_table, walk
from kvpass.fx.op_table import operator_name, tagged
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, example_value, operand_of


@dataclasses.dataclass(frozen=True)
class SparseIndex:
    """A selection among the keys.

    Attributes:
        node: the mask of selected keys, a number scattered to their indices.
        number: the mask's value at a selected key.
        topk: the topk that selects.
        limit: the largest number of keys that it selects; None if it selects all keys of this graph.
    """

    node: fx.Node
    number: bool | int | float
    topk: fx.Node
    limit: int | None

    def check(self, keys: int) -> None:
        """Check that the mask selects all of `keys` keys.

        Raises:
            UnsupportedGraph: there are more keys than it selects.
        """
        if self.limit is not None and keys > self.limit:
            why = f"a sparse index selects {self.limit} of the tokens, and here it would have to select among {keys}"
            walk.refuse(self.topk, f"{why}; kvpass can only leave it out where it selects all of them")


def sparse_indices(mask: fx.Node | None) -> list[SparseIndex]:
    """Return the sparse indices that a mask is computed from in its own layer."""
    if mask is None:
        return []
    candidates = [_read_sparse_index(node) for node in ancestors(mask) if op_table.operator_name(node) == "scatter"]
    return [index for index in candidates if index is not None and index.node in ancestors(mask, until=_ends_layer)]


def _ends_layer(node: fx.Node) -> bool:
    """Return whether a node projects hidden states or attends, so that nodes before it belong to other computations."""
    ends = tagged("projects") | {"softmax", "scaled_dot_product_attention"}
    return op_table.operator_name(node) in ends or is_attention(node)


def _read_sparse_index(node: fx.Node) -> SparseIndex | None:
    """Read a number that is scattered along the last dimension to the indices of a topk."""
    if len(node.args) != 4 or not isinstance(node.args[3], (bool, int, float)):
        return None
    topk = node.args[2]
    while isinstance(topk, fx.Node) and op_table.operator_name(topk) in ("to", "long", "int", "getitem"):
        topk = topk.args[0]
    if (
        not isinstance(topk, fx.Node)
        or op_table.operator_name(topk) != "topk"
        or node.args[1] not in (-1, example_value(node).ndim - 1)
    ):
        return None
    return SparseIndex(node, node.args[3], topk, _selection_limit(topk))


def _selection_limit(topk: fx.Node) -> int | None:
    """Return how many keys a topk selects at most: 0 if unknown, None if it selects all."""
    count, keys = expr(op_table.named_arguments(topk)["k"]), expr(example_value(operand_of(topk)).shape[-1])
    if count == keys:
        return None
    if count.is_Integer:
        return int(count)
    numbers = [part for part in count.args if part.is_Integer]
    is_least = count.func.__name__ == "Min" and {*count.args} == {*numbers, keys}
    return int(min(numbers)) if is_least and numbers else 0


def cached_scoring_keys(index: SparseIndex, outputs: list[fx.Node]) -> list[tuple[fx.Node, int]]:
    """Return the grown scoring keys [B, S, D] that the graph returns, each with the dimension along which they grow."""
    ancestor_nodes = ancestors(index.topk, until=_ends_layer)
    returned = [
        node for node in outputs if node in ancestor_nodes and walk.is_tensor(node) and example_value(node).ndim == 3
    ]
    return [(node, 1) for node in returned if operator_name(node) == "cat"]


def select_all(index: SparseIndex, graph: fx.Graph) -> fx.Node:
    """Emit a mask in which all keys are selected."""
    options = {"dtype": example_value(index.node).dtype, "device": example_value(index.node).device}
    return graph.call_function(torch.full, ((1,) * example_value(index.node).ndim, index.number), options)
