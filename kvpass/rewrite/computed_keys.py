"""Cut out the computation of keys and values from cached vectors, as in multi-head latent attention.

The cache of such a layer stores a latent vector and a shared key for each token, and the model computes the keys and
values of all heads from them.  This subgraph is cut out and applied to slots when they are read, under `vmap` as in
`kvpass.rewrite.mask_subgraph`.  The slots hold the cached vectors and are no larger.

A mask may also be computed from cached vectors, for example a bias for each key that is computed from its value.  The
tensors that such a mask reads from the vectors of one token, its *key features*, are cut out with the keys and values.

It is unknown which query heads read which part of such a cache.  So its heads are joined into one, and keep the same
tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.canonical import AttentionSite
from kvpass.fx import alias, op_table, propagation, splicing, walk
from kvpass.fx.shapes import SizeResolver, expr
from kvpass.fx.splicing import Subgraph
from kvpass.fx.walk import example_value


def join_heads(vectors: Tensor) -> Tensor:
    """Join the heads of vectors: [B, h, N, D] to [B, 1, N, h * D]."""
    return vectors.transpose(1, 2).flatten(2)[:, None]


def split_heads(vectors: Tensor, heads: int) -> Tensor:
    """Split joined heads: [B, 1, N, h * D] to [B, h, N, D]; split vectors stay unchanged."""
    return vectors if vectors.shape[1] == heads else torch.unflatten(vectors[:, 0], -1, (heads, -1)).transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class ComputedKeys:
    """Compute keys and values from cached vectors.

    Attributes:
        subgraph: from the cached pair of one token, [B, h, 1, D'] and [B, h, 1, Dv'], to its key and value
            [B, Ha, 1, D] and its key features.
        heads: h.
    """

    subgraph: Subgraph
    heads: int

    def on_slots(self, key: Tensor, value: Tensor, bound: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute keys, values and features from slots [B, 1, N, h * D'] and [B, 1, N, h * Dv'].

        Returns:
            Keys [B, Ha, N, D], values [B, Ha, N, Dv], and the key features, each [N, ...].
        """

        def compute_one(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            pair = [torch.unflatten(x, -1, (self.heads, -1))[:, :, None] for x in (key, value)]  # [B, h, 1, D']
            keys, values, *key_features = self.subgraph.run(*pair, *bound)
            return keys[:, :, 0], values[:, :, 0], *key_features

        keys, values, *key_features = torch.vmap(compute_one, in_dims=1)(key[:, 0], value[:, 0])
        return keys.movedim(0, 2), values.movedim(0, 2), key_features


def cut_computed_keys(
    step_gm: fx.GraphModule, site: AttentionSite, sizes: SizeResolver, key_features: Sequence[fx.Node]
) -> ComputedKeys | None:
    """Cut out the computation of a site's keys, values and features; None if it attends to the cached vectors.

    Raises:
        UnsupportedGraph: the values of one token depend on other tokens, or the values of one row on other rows.
    """
    if not site.computed:
        return None
    tokens = _TokenAxis({expr(example_value(node).shape[2]) for node in (site.grown_key, site.grown_value)}, sizes)
    if not site.length_symbols:
        walk.refuse(
            site.call,
            "keys or values are computed from the cache, and the graph serves one length of the cache alone: after a "
            "prompt of one token, begin with two; otherwise the model's code compares the length with a number, as "
            "with a sparse index or a window over such a cache",
        )
    results, stored = [*site.attended, *key_features], [site.grown_key, site.grown_value]
    subgraph = alias.dependents(alias.ancestors_with_writes(results, stored, site.call), stored) - set(stored)
    for node in subgraph:
        _check_per_token(node, tokens)
    _check_rows([node for node in step_gm.graph.nodes if node in subgraph], stored)

    def resolve(node: fx.Node) -> int:
        return 1 if tokens.counts(node) else sizes.resolved_size(node)

    return ComputedKeys(
        splicing.cut(step_gm, results, stored, resolve, reader=site.call), example_value(site.grown_key).shape[1]
    )


@dataclasses.dataclass(frozen=True)
class _TokenAxis:
    """The sizes that count tokens in the grown keys and values, and all sizes of the graph."""

    totals: set[sympy.Expr]
    sizes: SizeResolver

    def counts(self, node: fx.Node) -> bool:
        """Return whether a node is the number of tokens."""
        return walk.is_size(node) and expr(node) in self.totals

    def has(self, node: fx.Node) -> bool:
        """Return whether a node is a tensor, or several tensors, with entries for the tokens."""
        parts = example_value(node) if isinstance(example_value(node), (tuple, list)) else [example_value(node)]
        return any(map(self.sizes.growing_dims, parts))

    def axis(self, node: fx.Node) -> int | None:
        """Return the one dimension that runs over the tokens, or None."""
        first = example_value(node)[0] if isinstance(example_value(node), (tuple, list)) else example_value(node)
        growing = self.sizes.growing_dims(first)
        return growing[0] if len(growing) == 1 and expr(first.shape[growing[0]]) in self.totals else None


def _check_per_token(node: fx.Node, tokens: _TokenAxis) -> None:
    """Raise UnsupportedGraph for a node that may mix tokens, or computes with their number."""
    counts = [] if walk.is_size(node) else filter(tokens.counts, node.all_input_nodes)
    if not all(op_table.uses_only_as_size(node, each) for each in counts):
        walk.refuse(node, "keys or values are computed from the number of keys, which is different on slots")
    if not isinstance(example_value(node), torch.Tensor):
        return  # a size, or a tuple whose items are checked
    axis = tokens.axis(node)
    parents = [p for p in node.all_input_nodes if tokens.has(p)]
    alike = op_table.has_tag(node, "creates") or all(_propagate_dim(node, p, tokens.axis(p)) == axis for p in parents)
    if axis is None or not alike:
        by = f"keys or values are computed from the cache by {walk.target_name(node)!r}"
        walk.refuse(node, f"{by}, which may mix tokens, so it cannot be evaluated for one slot")


def _check_rows(nodes: list[fx.Node], stored: list[fx.Node]) -> None:
    """Raise UnsupportedGraph if a node, given in graph order, may mix rows, whose slots hold different tokens."""
    count = expr(example_value(stored[0]).shape[0])
    if count == 1:
        return
    rows: dict[fx.Node, int | None] = dict.fromkeys(stored, 0)
    for node in nodes:
        if op_table.has_tag(node, "creates"):
            rows[node] = 0 if expr(example_value(node).shape[0]) == count else None
        elif isinstance(example_value(node), (torch.Tensor, tuple, list)) and not isinstance(
            example_value(node), torch.Size
        ):
            parents = [parent for parent in node.all_input_nodes if parent in rows]
            rows[node] = propagation.common_dim(_propagate_dim(node, parent, rows[parent]) for parent in parents)
            if rows[node] is None:
                by = f"keys or values are computed from the cache by {walk.target_name(node)!r}"
                walk.refuse(node, f"{by}, which may mix the rows of a batch")


def _propagate_dim(node: fx.Node, parent: fx.Node, axis: int | None) -> int | None:
    """Return the dimension of a result whose slices depend on no other slices of an operand along `axis`, or None."""
    if axis is None:
        return None
    name = op_table.operator_name(node)
    if name in ("copy_", "setitem"):  # one tensor over another, or over a part along other dimensions
        last: int = example_value(node).ndim - example_value(parent).ndim + axis
        if name == "copy_" or parent is node.args[0]:
            return last
        subscript = op_table.subscript(node)  # may cut the last dimension, and must keep every token's index
        return last if all(op_table.keeps_whole_dimension(part) for part in subscript[:-1]) else None
    return propagation.propagate_dim(node, parent, axis)
