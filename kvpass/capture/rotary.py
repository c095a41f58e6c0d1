"""Find the rotary embedding of a key and the positions that it reads, in a canonical graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.capture import canonical, decomposed_attention
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.products import is_as_wide
from kvpass.fx import alias, op_table, propagation, shapes, walk
from kvpass.fx.op_table import has_tag
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, example_value, is_tensor
from kvpass.torch_private import dynamo

QUERY_ROTATED_BY_OTHERS = "the query and the key are rotated by different positions"
KEY_ROTATED_BY_OTHERS = (
    "a key is not proven to be rotated by its own position alone: its angles, or its scale, may depend on tokens"
)
ROWS_SHARE_POSITIONS = "the rows of a batch share one vector of positions, although they may be padded differently"


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a key: `key` = R(`raw`, `position`).

    Attributes:
        raw: the key before the rotation, [B, Hkv, q, D].
        position: the integer tensor of positions that R reads.
    """

    raw: fx.Node
    position: fx.Node

    def rows_share_positions(self, site: AttentionSite) -> bool:
        """Return whether rows need their own positions but share one vector, as in shape [q, 1].

        With one token, [q, 1] looks like [1, q], and [1, q, 1] always looks as if it had rows.  So the first dimension
        of the positions is followed to the key.
        """
        position, queries = example_value(self.position), expr(example_value(site.query).shape[2])
        if position.ndim == 1:
            return (
                site.mask is not None
                and example_value(site.mask).ndim == 4
                and expr(example_value(site.mask).shape[0]) != 1
            )
        if sympy.simplify(expr(position.numel()) - queries) != 0:
            return False
        return bool(expr(position.shape[0]) != 1) or not rows_come_first(self.position, site.key, {self.raw})

    def counts_tokens(self, site: AttentionSite) -> bool:
        """Return whether each token has one position, and not several as in images."""
        rows, queries = (expr(example_value(site.query).shape[dim]) for dim in (0, 2))
        count = expr(example_value(self.position).numel())
        return bool(sympy.simplify(count - queries) == 0 or sympy.simplify(count - rows * queries) == 0)


def find_obstacle(sites: Iterable[AttentionSite], alias_sets: alias.AliasSets) -> tuple[AttentionSite, str] | None:
    """Return the first layer whose keys cannot be stored before their rotary embedding, and why; None if all can."""
    found = ((site, _obstacle(site, alias_sets)) for site in sites)
    return next(((site, why) for site, why in found if why is not None), None)


def _obstacle(site: AttentionSite, alias_sets: alias.AliasSets) -> str | None:
    if site.past_key is not None:
        return "the prompt ran uncompiled, so its keys are rotated to absolute positions already"
    if site.window is not None:
        return "the layer has its own sliding window, so layers cache different numbers of tokens"
    if site.computed:
        return "the keys are computed from cached vectors, which are rotated already"
    rotary = find_rotary(site)
    if rotary is None:
        return "the keys carry no rotary embedding that can be separated"
    if not rotary.counts_tokens(site):
        return "a token has several positions"
    if not positions_of(rotary, site):
        return QUERY_ROTATED_BY_OTHERS
    if not rotates_each_token_alone(rotary, site, alias_sets):
        return KEY_ROTATED_BY_OTHERS
    return ROWS_SHARE_POSITIONS if rotary.rows_share_positions(site) else None


def rows_come_first(position: fx.Node, rotated: fx.Node, stop: Iterable[fx.Node] = ()) -> bool:
    """Return whether the first dimension of positions, possibly of size 1, becomes the first of the rotated tensor.

    The answer is also true if the dimension cannot be followed.  See `follow_to` for `stop`.
    """
    return follow_to(position, 0, rotated, stop) in (0, None)


def follow_to(root: fx.Node, dim: int, result: fx.Node, stop: Iterable[fx.Node] = ()) -> int | None:
    """Return the dimension of a result that a dimension of one of its ancestors becomes, or None.

    Args:
        stop: ancestors that are not followed, nor the nodes between the root and them.
    """
    dims: dict[fx.Node, int | None] = {root: dim}
    for node in sorted(ancestors(result, {root, *stop})):
        parents = {parent: along for parent in node.all_input_nodes if (along := dims.get(parent)) is not None}
        if parents:
            dims[node] = propagation.common_dim(_aligned_dim(node, parent, along) for parent, along in parents.items())
    return dims.get(result)


def find_rotary(site: AttentionSite, token_dim: int = 2) -> Rotary | None:
    """Return the rotary embedding of a site's key, or None if the key does not depend on positions.

    `raw` is the latest key after which everything depends on one tensor of positions and on no hidden states.

    Args:
        token_dim: the dimension of the tokens in `raw`: 2, or 1 for a `raw` [B, q, Hkv, D].
    """
    rows, heads, count, features = example_value(site.key).shape
    shape = (rows, heads, count, features) if token_dim == 2 else (rows, count, heads, features)
    unclear, cached_dtype = bool(expr(heads) == expr(count)), example_value(site.key).dtype
    for raw in _latest_first(site.key):
        if raw is site.key or not is_tensor(raw) or not shapes.same_shape(example_value(raw).shape, shape):
            continue
        if not is_as_wide(cached_dtype, than=example_value(raw).dtype):  # the model caches nothing wider
            continue
        if _is_mixed_with_tokens(site.key, raw) or (unclear and follow_to(raw, token_dim, site.key) not in (2, None)):
            continue
        since_raw = nodes_behind(site.key, {raw})
        positions = _converted_to_angles(since_raw, site.key)
        if len(positions) != 1:
            continue
        others = ancestors(site.key, stop={raw}) - ancestors(positions[0])
        tables = {table for table in tables_at(positions[0], others) if dynamo.is_of_module(table)}
        if not _carries_tokens(others - tables):
            return Rotary(raw, positions[0])
    return None


def _is_mixed_with_tokens(key: fx.Node, raw: fx.Node) -> bool:
    """Return whether hidden states enter a key after `raw`, except through integers.

    If there is attention or an embedding, it is found soon, and the many nodes before it are not examined.
    """

    def operands(node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if not _is_integer(each)]

    return any(_brings_tokens(node) for node in walk.reach([key], operands, {raw}))


def _is_end(node: fx.Node) -> bool:
    """Return whether a node is part of an attention call, at which searches stop."""
    return canonical.is_attention(node) or decomposed_attention.is_boundary(node)


def nodes_behind(node: fx.Node, stop: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Return the node and its ancestors, without attention calls and the nodes before them."""
    return {each for each in ancestors(node, stop, _is_end) if not _is_end(each)}


def _latest_first(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of `nodes_behind`, each before its operands."""
    todo = {node}
    while todo:
        latest = max(todo)
        todo.remove(latest)
        if not _is_end(latest):
            yield latest
            todo.update(latest.all_input_nodes)


def positions_of(rotary: Rotary, site: AttentionSite) -> list[fx.Node]:
    """Return all positions that rotate the site's key and queries, or [] if other positions also rotate a query.

    A model that rotates queries and keys separately computes the same positions twice.
    """
    positions = [rotary.position]
    for call in site.attention_calls:
        of_query = _positions_of_query(call.query, strip_reshapes(rotary.position))
        if not of_query:
            return []
        positions += of_query
    return list(dict.fromkeys(positions))


def _positions_of_query(query: fx.Node, key_positions: fx.Node) -> list[fx.Node]:
    """Return the nodes with the positions of a query that angles are computed from, or [] if others exist.

    All changes of a query after its projection are examined, such as a scale that depends on positions.
    """
    since = {node for node in ancestors(query, until=_is_end_of_query) if not _is_end_of_query(node)}
    shaped = {node for node in since if is_tensor(node) and _is_shaped(node, example_value(query).shape)}
    first = {node for node in shaped if ancestors(node, until=_is_end_of_query).isdisjoint(shaped - {node})}
    since = ancestors(query, first, _is_end_of_query)
    same = {n for n in since if _is_integer(n) and _is_same_computation(strip_reshapes(n), key_positions)}
    found: set[fx.Node] = set()
    for angle in _converted_to_angles(since, query):
        sources = ancestors(angle, same)
        if any(_may_follow_tokens(node) or has_tag(node, "counts") for node in sources - same):
            return []
        found |= {angle} if angle in same else same & {p for node in sources for p in node.all_input_nodes}
    return sorted(found)


def strip_reshapes(node: fx.Node) -> fx.Node:
    """Return the node whose values a node has in another shape or dtype."""
    return walk.chain(node, lambda n: has_tag(n, "moves", "keeps", "keeps_integers") and op_table.takes_all(n))[-1]


def rotates_each_token_alone(rotary: Rotary, site: AttentionSite, alias_sets: alias.AliasSets) -> bool:
    """Return whether the rotation of a token's key depends on that token's position alone.

    Each dimension over rows or tokens, of the positions and the raw key, is followed to the rotated key through
    operations that compute each slice from the same slice.  A prompt of one token lacks this dimension: it must have no
    reductions.  No other input may depend on the tokens of the call.  `alias_sets` are the graph's.
    """
    position = strip_reshapes(rotary.position)
    others = alias.ancestors_with_writes([site.key], {rotary.raw, position}, alias_sets=alias_sets)
    if any(_may_follow_tokens(node) for node in others):
        return False
    among = others | {rotary.raw, position}
    roots = {position: range(example_value(position).ndim), rotary.raw: (0, 2)}
    return all(_is_followed(node, dim, among) for node, dims in roots.items() for dim in dims)


def _may_follow_tokens(node: fx.Node) -> bool:
    """Return whether an input may depend on the call's tokens; integers and scalars on any device may count them.

    Other tensors of modules stay unchanged, which `kvpass.runtime.checks` verifies.
    """
    if node.op != "placeholder" or not is_tensor(node) or dynamo.is_of_module(node):
        return False
    return not walk.is_inexact(example_value(node)) or example_value(node).ndim == 0 or not dynamo.outlives_calls(node)


def _is_followed(root: fx.Node, dim: int, among: set[fx.Node]) -> bool:
    """Return whether no node computed from a tensor mixes the slices along its dimension."""
    single = expr(example_value(root).shape[dim]) == 1
    dims: dict[fx.Node, int | None] = {root: dim}
    for node in sorted(among - {root}):
        parents = [parent for parent in node.all_input_nodes if parent in dims]
        if not parents or walk.is_size(node) or isinstance(example_value(node), torch.Size):
            continue
        if is_tensor(node) and expr(example_value(node).numel()) == 0:  # such as features that a key does not have
            continue
        followed = propagation.common_dim(_follow(node, parent, dims[parent], single) for parent in parents)
        if followed is None and (not single or has_tag(node, "reduces", "along")):
            return False
        dims[node] = followed
    return True


def _follow(node: fx.Node, parent: fx.Node, dim: int | None, single: bool) -> int | None:
    """Return the dimension of a result whose slices are computed from an operand's slices alone, or None.

    A pointwise operation may broadcast a dimension of a `single` slice without mixing.
    """
    if dim is None:
        return None
    if single and op_table.is_pointwise(node):
        return _aligned_dim(node, parent, dim)
    propagated = propagation.propagate_dim(node, parent, dim)
    lookup = propagation.lookup(node) if propagated is None and is_tensor(parent) else None
    return propagation.index_axis(node, parent, dim) if lookup and parent is not lookup[0] else propagated


def _aligned_dim(node: fx.Node, parent: fx.Node, dim: int) -> int | None:
    """Return the dimension of a result that an operand's dimension is aligned with, at any size."""
    if op_table.is_pointwise(node) and is_tensor(node):
        return int(dim + example_value(node).ndim - example_value(parent).ndim)
    return propagation.propagate_dim(node, parent, dim)


def _is_same_computation(one: object, other: object) -> bool:
    """Return whether two nodes, or arguments of nodes, are the same computation."""
    if isinstance(one, fx.Node) and isinstance(other, fx.Node) and one is not other:
        if walk.is_size(one) and walk.is_size(other):
            return bool(expr(one) == expr(other))
        same_call = one.op == other.op and one.op in ("call_function", "call_method") and one.target == other.target
        return same_call and one.kwargs == other.kwargs and _is_same_computation(one.args, other.args)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(_is_same_computation(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _is_end_of_query(node: fx.Node) -> bool:
    """Return whether a node computes states that contain a query."""
    return _is_end(node) or (has_tag(node, "projects") and not has_tag(node, "looks_up"))


def _is_shaped(node: fx.Node, shape: torch.Size) -> bool:
    """Return whether a tensor has a shape [B, H, q, D], or that shape with tokens before heads."""
    rows, heads, count, features = shape
    return any(shapes.same_shape(example_value(node).shape, x) for x in (shape, (rows, count, heads, features)))


def _is_integer(node: fx.Node) -> bool:
    return walk.has_integers(example_value(node))


def _converted_to_angles(among: set[fx.Node], rotated: fx.Node) -> list[fx.Node]:
    """Return the integer tensors that are next used as floating-point or complex ones, without inverse frequencies."""
    inexact = {node for node in among if is_tensor(node) and walk.is_inexact(example_value(node))}
    converted = [node for node in among if _is_integer(node) and not inexact.isdisjoint(node.users)]
    return converted if len(converted) < 2 else [node for node in converted if not _is_of_features(node, rotated)]


def _is_of_features(node: fx.Node, rotated: fx.Node) -> bool:
    """Return whether a tensor of numbers, such as arange(0, D, 2), has no dimension that becomes the tokens'."""
    if any(each.op in ("placeholder", "get_attr") or walk.is_size(each) for each in ancestors(node)):
        return False
    return all(follow_to(node, dim, rotated) not in (1, 2) for dim in range(example_value(node).ndim))


def tables_at(position: fx.Node, nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """Return the tensors that some nodes index by positions, and which dimension they index."""
    origin, lookups = strip_reshapes(position), filter(None, map(propagation.lookup, nodes))
    return {
        table: dim
        for table, indices in lookups
        for dim, index in indices.items()
        if isinstance(index, fx.Node) and strip_reshapes(index) is origin
    }


def _brings_tokens(node: fx.Node) -> bool:
    """Return whether a node is an attention call or an embedding."""
    return _is_end(node) or node.target is torch.nn.functional.embedding


def _carries_tokens(nodes: set[fx.Node]) -> bool:
    """Return whether a node brings in hidden states: attention, an embedding, or an input of 3 dimensions or more."""
    for node in nodes:
        if _brings_tokens(node):
            return True
        if (
            node.op == "placeholder"
            and is_tensor(node)
            and example_value(node).is_floating_point()
            and example_value(node).ndim >= 3
        ):
            return True
    return False
