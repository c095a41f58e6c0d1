"""Rotary embeddings: what rotates a key, and by which positions, found in a canonical graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.capture import canonical, decomposed_attention
from kvpass.capture.sites import AttentionSite
from kvpass.fx import alias, op_table, walk
from kvpass.fx.op_table import MOVES, SAME_VALUE, known_name
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, is_tensor, value
from kvpass.torch_private import dynamo

ROTATED_APART = "the query is not rotated by the positions that rotate the key"
BY_OTHER_TOKENS = "a key is not proven to be rotated by its own position alone: its angles may follow from other tokens"
ALIKE_IN_ALL_ROWS = "the rows of a batch, which may be padded differently, count their tokens in one vector"


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a key: `key` = R(`raw`, `position`).

    Attributes:
        raw: the key before it, [B, Hkv, q, D].
        position: the integer tensor of positions that R reads.
    """

    raw: fx.Node
    position: fx.Node

    def counts_rows_alike(self, site: AttentionSite) -> bool:
        """Whether the rows of a batch need positions of their own and there is no dimension for them, as in [q, 1].

        Of one token [q, 1] looks like [1, q], and [1, q, 1] always begins as if with rows: what tells is where the
        first dimension comes to stand in the key.
        """
        position, queries = value(self.position), expr(value(site.query).shape[2])
        if position.ndim == 1:
            return site.has_row_masks
        if sympy.simplify(expr(position.numel()) - queries) != 0:
            return False
        return bool(expr(position.shape[0]) != 1) or not rows_come_first(self.position, site.key)

    def counts_tokens(self, site: AttentionSite) -> bool:
        """Whether a token has one position, and not several as in images."""
        rows, queries = (expr(value(site.query).shape[dim]) for dim in (0, 2))
        count = expr(value(self.position).numel())
        return bool(sympy.simplify(count - queries) == 0 or sympy.simplify(count - rows * queries) == 0)


def rows_come_first(position: fx.Node, rotated: fx.Node) -> bool:
    """Whether the first dimension of positions, which may be of size 1, comes to stand first in what they rotate.

    Also where that is not known.
    """
    indices: dict[fx.Node, int | None] = {position: 0}
    behind = ancestors(rotated, stop={position})
    for node in position.graph.nodes:
        parents = [parent for parent in node.all_input_nodes if indices.get(parent) is not None]
        if parents and node not in indices and node in behind:
            found = {_placed(node, parent, indices[parent]) for parent in parents}  # type: ignore[arg-type]
            indices[node] = found.pop() if len(found) == 1 else None
    return indices.get(rotated) in (0, None)


def find_rotary(gm: fx.GraphModule, site: AttentionSite) -> Rotary | None:
    """The rotary embedding of a site's key, or None if its key does not depend on positions.

    `raw` is the latest key on the way such that all that follows it depends on positions and on nothing
    else that the tokens have a say in.
    """
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    ends = _boundaries(gm.graph)
    behind = ancestors(site.key, stop=ends)
    shape = [expr(size) for size in value(site.key).shape]
    candidates = [
        n for n in behind if is_tensor(n) and n is not site.key and [expr(s) for s in value(n).shape] == shape
    ]
    for raw in sorted(candidates, key=order.__getitem__, reverse=True):
        rest = ancestors(site.key, stop={raw, *ends})
        positions = [n for n in rest if _becomes_an_angle(n, rest)]
        if len(positions) == 1 and not _carries_tokens(ancestors(site.key, stop={raw}) - ancestors(positions[0]), ends):
            return Rotary(raw, positions[0])
    return None


def _boundaries(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of attention calls: what comes before them is another matter."""
    return {node for node in graph.nodes if canonical.is_attention(node) or decomposed_attention.is_boundary(node)}


def positions_of(rotary: Rotary, site: AttentionSite) -> list[fx.Node]:
    """The positions that rotate the site's key and its queries: none if some query is not rotated by the key's.

    A model that rotates queries and keys one by one makes what it needs of the same positions twice.
    """
    ends, rotates_key = _boundaries(site.call.graph), reshaped(rotary.position)
    found = [rotary.position]
    for each in site.all:
        behind = ancestors(each.query, stop=ends)
        angles = [node for node in behind if _becomes_an_angle(node, behind)]
        alike = [node for node in angles if _same(reshaped(node), rotates_key)]
        if not alike:
            return []
        found += alike
    return list(dict.fromkeys(found))


def reshaped(node: fx.Node) -> fx.Node:
    """What a tensor is another shape, or another dtype, of."""
    while known_name(node) in MOVES | SAME_VALUE | {"long", "int"} and is_tensor(node.args[0]) and _takes_all(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def turns_each_token_alone(rotary: Rotary, site: AttentionSite) -> bool:
    """Whether a key is rotated by its own position alone, and not by what other tokens of its call have.

    Each dimension of positions and of the raw key that counts rows or tokens is followed to the rotated key, through
    operations that are proven to make a slice of the same one.  A prompt of one token has no such dimension to follow;
    there nothing may be summed up along any.  No other input of the call may count tokens.
    """
    position = reshaped(rotary.position)
    beside = alias.behind([site.key], {rotary.raw, position})
    if any(_may_count(node) for node in beside):
        return False
    among = beside | {rotary.raw, position}
    roots = {position: range(value(position).ndim), rotary.raw: (0, 2)}
    return all(_is_followed(node, dim, among) for node, dims in roots.items() for dim in dims)


def _may_count(node: fx.Node) -> bool:
    """Whether a node is an input of the call that may say how many tokens it has, as whole numbers and scalars may."""
    if node.op != "placeholder" or not is_tensor(node) or dynamo.is_of_module(node):
        return False
    return (not value(node).is_floating_point() and not value(node).is_complex()) or value(node).ndim == 0


def _is_followed(root: fx.Node, dim: int, among: set[fx.Node]) -> bool:
    """Whether all that is made of a tensor, among some nodes, has the slices of its dimension apart."""
    single = expr(value(root).shape[dim]) == 1
    indices: dict[fx.Node, int | None] = {root: dim}
    for node in root.graph.nodes:
        parents = [parent for parent in node.all_input_nodes if parent in indices]
        if node not in among or node in indices or not parents or walk.is_size(node) or _is_empty(node):
            continue
        follow = _follow_one if single else _follow
        found = {follow(node, parent, indices[parent]) for parent in parents}
        index = found.pop() if len(found) == 1 else None
        if index is None and (not single or known_name(node) in op_table.REDUCES | op_table.ALONG):
            return False
        indices[node] = index
    return True


def _is_empty(node: fx.Node) -> bool:
    """Whether a tensor has no elements, as the features that are not rotated where all are."""
    return is_tensor(node) and expr(value(node).numel()) == 0


def _follow_one(node: fx.Node, parent: fx.Node, dim: int | None) -> int | None:
    """`_follow` for a dimension of size 1, which a pointwise operation may broadcast without mixing anything."""
    if dim is not None and op_table.is_pointwise(node):
        return _placed(node, parent, dim)
    return _follow(node, parent, dim)


def _follow(node: fx.Node, parent: fx.Node, dim: int | None) -> int | None:
    """The dimension of a result whose slices are made of those of an operand's; see `operators.carry`."""
    if dim is None:
        return None
    name, given = known_name(node) or walk.name_of(node), value(parent)
    index = op_table.propagate_dim(node, parent, dim)
    if index is not None or not isinstance(given, torch.Tensor):
        return index
    looked_up = op_table.lookup(node)
    if looked_up and parent is not looked_up[0]:
        return op_table.index_axis(node, parent, dim)
    if name in ("polar", "complex"):
        return int(dim + value(node).ndim - given.ndim)
    if name in ("view_as_complex", "view_as_real"):
        return dim if dim < min(given.ndim, value(node).ndim) else None
    if name in ("outer", "ger"):
        return 0 if parent is node.args[0] else 1
    if name == "stack":
        along = op_table.bound(node).get("dim", node.args[1] if len(node.args) > 1 else 0) % value(node).ndim
        return int(dim + (along <= dim))
    return _in_equation(node, parent, dim) if name == "einsum" else None


def _in_equation(node: fx.Node, parent: fx.Node, dim: int) -> int | None:
    """Where einsum puts a dimension of an operand, by the letter that stands for it."""
    equation, *operands = node.args
    given = list(operands[0]) if isinstance(operands[0], (tuple, list)) else operands
    left, arrow, right = str(equation).replace(" ", "").partition("->")
    if not arrow or "." in left or given.count(parent) != 1:
        return None
    letters = left.split(",")[given.index(parent)]
    return right.index(letters[dim]) if letters[dim] in right and letters.count(letters[dim]) == 1 else None


def _placed(node: fx.Node, parent: fx.Node, dim: int) -> int | None:
    """Where a dimension of an operand comes to stand, however large the result is along it."""
    if op_table.is_pointwise(node) and is_tensor(node):
        return int(dim + value(node).ndim - value(parent).ndim)
    return op_table.propagate_dim(node, parent, dim)


def _takes_all(node: fx.Node) -> bool:
    """Whether an index, if the node is one, takes every element."""
    if walk.name_of(node) != "getitem":
        return True
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)


def _same(one: Any, other: Any) -> bool:
    """Whether two nodes, or arguments of nodes, are the same computation."""
    if isinstance(one, fx.Node) and isinstance(other, fx.Node) and one is not other:
        if walk.is_size(one) and walk.is_size(other):
            return bool(expr(one) == expr(other))
        made = one.op == other.op and one.op in ("call_function", "call_method") and one.target == other.target
        return made and one.kwargs == other.kwargs and _same(one.args, other.args)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _becomes_an_angle(node: fx.Node, among: set[fx.Node]) -> bool:
    """An integer tensor whose next use is no longer one."""
    if not is_tensor(node) or value(node).is_floating_point() or value(node).dtype == torch.bool:
        return False
    return any(user in among and is_tensor(user) and value(user).is_floating_point() for user in node.users)


def _carries_tokens(nodes: set[fx.Node], calls: set[fx.Node]) -> bool:
    """Whether any of the nodes brings in hidden states: attention outputs, embeddings, or inputs of rank 3 and more."""
    for node in nodes:
        if node in calls or node.target is torch.nn.functional.embedding:
            return True
        if node.op == "placeholder" and is_tensor(node) and value(node).is_floating_point() and value(node).ndim >= 3:
            return True
    return False
