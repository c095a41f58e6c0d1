"""Keys and values that are computed from what is cached: multi-head latent attention.

The cache of such a layer holds a latent vector and a shared key for each token, and the model makes the keys and
values of all heads from them.  The subgraph that does so is cut out and applied to slots at read, under `vmap` as in
`kvpass.rewrite.mask_slice`; the slots hold what the model caches and are no larger.

A mask may be computed from what is cached as well, say by a bias for each key that is made from its value.  What it
reads of a token's rows alone, its *facts*, is cut out with the keys and values.

Which query heads such a cache belongs to cannot be said in general, so that all its heads keep the same tokens: they
are joined into one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.sites import AttentionSite
from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, op_table, splicing, walk
from kvpass.fx.shapes import Sizes, expr
from kvpass.fx.splicing import Slice
from kvpass.fx.walk import value


def joined(rows: Tensor) -> Tensor:
    """[B, h, N, D] as [B, 1, N, h * D]."""
    return rows.transpose(1, 2).flatten(2)[:, None]


@dataclasses.dataclass(frozen=True)
class ComputedKeys:
    """From what is cached to what is attended to.

    Attributes:
        slice: inputs are the cached pair of one token, [B, h, 1, D'] and [B, h, 1, Dv'], outputs its key and value
            [B, Ha, 1, D] and its facts.
        heads: h.
    """

    slice: Slice
    heads: int

    def on_slots(self, key: Tensor, value: Tensor, bound: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What attention sees of [B, 1, N, h * D'] and [B, 1, N, h * Dv'].

        Returns:
            Keys [B, Ha, N, D], values [B, Ha, N, Dv], and the facts, each [N, ...].
        """

        def one(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            pair = [torch.unflatten(x, -1, (self.heads, -1))[:, :, None] for x in (key, value)]  # [B, h, 1, D']
            keys, values, *facts = self.slice.module(*pair, *bound)
            return keys[:, :, 0], values[:, :, 0], *facts

        keys, values, *facts = torch.vmap(one, in_dims=1)(key[:, 0], value[:, 0])
        return keys.movedim(0, 2), values.movedim(0, 2), facts


def cut_computed_keys(
    gm: fx.GraphModule, site: AttentionSite, sizes: Sizes, facts: Sequence[fx.Node]
) -> ComputedKeys | None:
    """Cut out what computes a site's keys, values and facts from its cache; None where they are cached as they are.

    Raises:
        UnsupportedGraph: those of one token are made from other tokens as well, or those of one row from other rows.
    """
    if site.computed is None:
        return None
    tokens = _Tokens.of(site)
    if not tokens.growing:
        raise UnsupportedGraph(
            f"{walk.source_line(site.call)}: the model's code compares the cache's length with a number, so that a "
            "graph serves one length only; a sparse index over its tokens does that, and so does a window on them"
        )
    made, stored = [*site.computed, *facts], [site.grown_key, site.grown_value]
    behind = alias.dependent(gm.graph, alias.behind(made, stored, site.call), stored) - set(stored)
    for node in behind:
        _check_per_token(node, tokens)
    _check_rows([node for node in gm.graph.nodes if node in behind], stored)

    def number(node: fx.Node) -> int:
        return 1 if expr(node) in tokens.totals else sizes.fixed(node)

    return ComputedKeys(splicing.cut(gm, made, stored, number, reader=site.call), value(site.grown_key).shape[1])


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """How many there are in a cache with the new ones, as keys and as values have it, and the symbols that grow."""

    totals: set[sympy.Expr]
    growing: set[sympy.Symbol]

    @staticmethod
    def of(site: AttentionSite) -> _Tokens:
        grown = {expr(value(node).shape[2]) for node in (site.grown_key, site.grown_value)}
        pasts = [expr(value(node).shape[2]) for node in (site.past_key, site.past_value) if node is not None]
        return _Tokens(grown, {symbol for past in pasts for symbol in past.free_symbols})

    def has(self, node: fx.Node) -> bool:
        """Whether a node is a tensor, or several, with entries for the tokens."""
        parts = value(node) if isinstance(value(node), (tuple, list)) else [value(node)]
        return any(isinstance(x, torch.Tensor) and any(map(self.follows, x.shape)) for x in parts)

    def axis(self, node: fx.Node) -> int | None:
        """The one dimension that runs over the tokens."""
        first = value(node)[0] if isinstance(value(node), (tuple, list)) else value(node)
        growing = [d for d, size in enumerate(first.shape) if self.follows(size)]
        return growing[0] if len(growing) == 1 and expr(first.shape[growing[0]]) in self.totals else None

    def follows(self, size: Any) -> bool:
        """Whether a size depends on how many tokens the cache holds."""
        return not expr(size).free_symbols.isdisjoint(self.growing)


_WRITES = frozenset({"copy_", "setitem"})
_FRESH = frozenset({"new_empty", "empty_like", "empty", "new_zeros", "zeros_like"})


def _check_per_token(node: fx.Node, tokens: _Tokens) -> None:
    """Refuse what may mix tokens."""
    if not isinstance(value(node), torch.Tensor):
        return  # a size, or a tuple whose items are looked at
    axis, name = tokens.axis(node), walk.name_of(node)
    parents = [p for p in node.all_input_nodes if tokens.has(p)]
    if axis is not None and (name in _FRESH or all(_keeps_apart(node, p, tokens) == axis for p in parents)):
        return
    raise UnsupportedGraph(
        f"{walk.source_line(node)}: keys or values are computed from the cache by {name!r}, which may look at "
        "several tokens at once and cannot be asked about one slot"
    )


def _check_rows(nodes: list[fx.Node], stored: list[fx.Node]) -> None:
    """Refuse what may mix the rows of a batch, whose slots hold different tokens.

    Args:
        nodes: what depends on the cache, in the order of the graph.
    """
    count = expr(value(stored[0]).shape[0])
    if count == 1:
        return
    rows: dict[fx.Node, int | None] = dict.fromkeys(stored, 0)
    for node in nodes:
        if walk.name_of(node) in _FRESH:
            rows[node] = 0 if expr(value(node).shape[0]) == count else None
        elif isinstance(value(node), (torch.Tensor, tuple, list)):
            parents = [parent for parent in node.all_input_nodes if parent in rows]
            found = {_follows(node, parent, rows[parent]) for parent in parents}
            rows[node] = found.pop() if len(found) == 1 else None
            if rows[node] is None:
                raise UnsupportedGraph(
                    f"{walk.source_line(node)}: keys or values are computed from the cache by "
                    f"{walk.name_of(node)!r}, which may put a row's where another row's are attended to"
                )


def _keeps_apart(node: fx.Node, parent: fx.Node, tokens: _Tokens) -> int | None:
    """The dimension of the result in which the tokens of an operand are kept apart."""
    return _follows(node, parent, tokens.axis(parent))


def _follows(node: fx.Node, parent: fx.Node, axis: int | None) -> int | None:
    """Where a dimension of an operand is in the result, whose slices along it are made from that one's."""
    if axis is None:
        return None
    if walk.name_of(node) in _WRITES:  # one tensor written over another, or a part of it along other dimensions
        last = value(node).ndim - value(parent).ndim + axis
        return last if walk.name_of(node) == "copy_" or parent is node.args[0] or _writes_whole(node) else None
    if node.target in _NORMS:
        return _beside_norm(node, axis)
    return op_table.propagate_dim(node, parent, axis)


_NORMS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.normalize: ("input", "p", "dim", "eps"),
    torch.linalg.vector_norm: ("x", "ord", "dim", "keepdim"),
    torch.norm: ("input", "p", "dim", "keepdim"),
    "norm": ("input", "p", "dim", "keepdim"),
}
"""Functions and the method that measure vectors along a dimension, and their arguments."""


def _beside_norm(node: fx.Node, axis: int) -> int | None:
    """Where a dimension is in the result of a norm along others; None if the norm runs along it."""
    given = dict(zip(_NORMS[node.target], node.args, strict=False)) | dict(node.kwargs)
    normalizes = node.target is torch.nn.functional.normalize
    dims, ndim = given.get("dim", 1 if normalizes else None), value(node.args[0]).ndim  # type: ignore[arg-type]
    along = {dim % ndim for dim in (dims if isinstance(dims, (tuple, list)) else [dims]) if isinstance(dim, int)}
    if not along or axis in along:
        return None
    keeps = normalizes or bool(given.get("keepdim", False))
    return axis if keeps else axis - sum(dim < axis for dim in along)


def _writes_whole(node: fx.Node) -> bool:
    """Whether x[...] = y leaves every token of y at its place: the subscript cuts the last dimension at most."""
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(op_table.keeps_whole(part) for part in parts[:-1])
