"""Find where keys and values come from: a cache that grows.

The operations between a cache and attention run on numbered elements at small sizes, which shows where each row, token
and head ends up.  Small sizes cannot reveal a subscript such as `[:, :, -64:]`.  So the recorded size of each operation
must also be a multiple of the cache's size, as a symbolic expression.

`cat_parts` and `origin_of` decide which updates grow a past.  Caches [B, S, H, D] are seen as [B, H, S, D], see
`kvpass.capture.heads_first`.  With each new case, add a test of a graph that it must not match.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable

import torch
import torch.fx as fx

from kvpass.capture.products import is_as_wide
from kvpass.capture.rotary import follow_to
from kvpass.fx import op_table, propagation, walk
from kvpass.fx.op_table import has_tag, operator_name, tagged
from kvpass.fx.shapes import expr
from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import symbolic_shapes


@dataclasses.dataclass(frozen=True)
class Origin:
    """A cache's past (None if empty), its new tokens and their concatenation, each [B, H, tokens, D]."""

    grown: fx.Node
    past: fx.Node | None
    new: fx.Node


LAYOUT = (
    "caches that are attended to grow by torch.cat([past, new], -2) of [B, H, S, D], or along 1 of [B, S, H, D]; let "
    "the model keep them so, or run it uncompiled"
)


class CacheRefused(Exception):
    """Keys or values do not come from a cache that kvpass can read; the message says why."""


def cat_parts(node: fx.Node, along: int = 2) -> tuple[fx.Node, fx.Node] | None:
    """Return the past and the new tokens of a concatenation that grows a cache along a dimension, or None."""
    if operator_name(node) != "cat" or not is_tensor(node):
        return None
    args = op_table.named_arguments(node)
    tensors, dim = args["tensors"], args.get("dim", 0)
    if len(tensors) != 2 or example_value(node).ndim != 4 or dim not in (along, along - 4):
        return None
    past, new = tensors
    is_past = past.op == "placeholder" or example_value(past).ndim == 1
    return (past, new) if is_past else None


def origin_of(attended: fx.Node, outputs: dict[fx.Node, int]) -> Origin:
    """Follow a key or value back to its cache, and check that heads, tokens and features are the cache's."""
    chain = walk.chain(attended, lambda each: has_tag(each, "moves", "keeps"))
    parts, node = cat_parts(chain[-1]), chain[-1]
    if parts is None:
        returned = [each for each in chain if each in outputs and example_value(each).ndim == 4]
        if not returned:
            raise CacheRefused(
                f"its key or value comes from {walk.target_name(node)!r} ({walk.source_line(node)}), which is not a "
                "concatenation with the past, and is not computed from one cached pair"
            )
        node = returned[-1]
    steps = chain[: chain.index(node)]
    check_heads(attended, node, steps)
    if parts is None:
        _check_order(attended, node)
        return Origin(node, None, node)
    past, new = parts
    if example_value(node).dtype != example_value(new).dtype and not is_as_wide(
        example_value(node).dtype, example_value(new).dtype
    ):
        own, kept = example_value(new).dtype, example_value(node).dtype
        raise CacheRefused(
            f"the model computes {own} and caches {kept}: kvpass would return other numbers; cache {own}"
        )
    empty = example_value(past).ndim != 4 or expr(example_value(past).shape[2]) == 0
    if empty or past.op != "placeholder":
        return Origin(node, None, new)
    cached, grown = example_value(past).dtype, example_value(node).dtype
    if cached != grown:
        raise CacheRefused(
            f"the cache holds {cached} and the new tokens are {example_value(new).dtype}, which makes the whole cache "
            f"{grown}: start with a new prompt after a change of the model's dtype"
        )
    return Origin(node, past, new)


def _check_takes_all(node: fx.Node, grown: fx.Node, copies: float) -> None:
    """Refuse an operation that selects a part of the cache at the recorded size, though not at small sizes.

    Which elements a subscript selects depends on how a length compares with its bounds.  Dynamo has decided this
    comparison, so the result at the recorded size holds for all lengths that the graph serves.  `copies` is the number
    of elements of the result for each element of the cache, at small sizes.
    """
    size, whole = example_value(node).numel(), example_value(grown).numel()
    if copies.is_integer() and symbolic_shapes.known_equal(size, whole * int(copies)):
        return
    raise CacheRefused(
        f"{operator_name(node)!r} at {walk.source_line(node)} selects a part of the cached keys or values"
    )


def check_heads(attended: fx.Node, grown: fx.Node, chain: list[fx.Node], along: int = 2) -> None:
    """Check that each query head reads the keys of its group, by running the operations on numbered elements.

    Args:
        attended: the keys or values that attention reads.
        grown: the cache.
        chain: the operations from the cache to `attended`, the last one first.
        along: the dimension of the cache's tokens, 2 or 1; the heads' dimension is the other one.
    """
    small = propagation.SmallSizes([*chain, grown])
    shape = small.shape(grown)
    numbered = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    dtype, moved = example_value(grown).dtype, numbered
    for node in reversed(chain):
        read = example_value(node).dtype
        if read != dtype and not is_as_wide(read, dtype):
            raise CacheRefused(f"attention reads the {dtype} cache in {read}: kvpass would return other numbers")
        moved = small.try_run(node, {node.all_input_nodes[0]: moved}) if has_tag(node, "moves") else moved
        if moved is None:
            line = walk.source_line(node)
            raise CacheRefused(f"{line}: {operator_name(node)!r} on keys or values is not supported")
        _check_takes_all(node, grown, moved.numel() / numbered.numel())
    cached = numbered.transpose(along, 2)
    rows, _, tokens, features = cached.shape
    if moved.shape[-2:] != (tokens, features) or moved.numel() % numbered.numel():
        raise CacheRefused(
            f"keys or values of shape {tuple(example_value(grown).shape)} are cached, attention reads others: {LAYOUT}"
        )
    groups = moved.numel() // numbered.numel()
    if not torch.equal(moved.reshape(rows, -1, tokens, features), cached.repeat_interleave(groups, 1)):
        raise CacheRefused(
            "a query head does not read the keys or values of its group's KV head: rows, heads, "
            f"tokens or features are moved between the cache and {walk.source_line(attended)}"
        )


def _check_order(attended: fx.Node, grown: fx.Node) -> None:
    """Refuse a cache of one head and one token if attention reads dimension 1 as tokens.

    Numbered elements cannot show that.  Where both dimensions may be the tokens, the second one is assumed; a step in
    which the first one grows is refused.
    """
    if list(map(expr, example_value(grown).shape[1:3])) != [1, 1]:
        return
    heads, tokens = (follow_to(grown, dim, attended) for dim in (1, 2))
    if heads == example_value(attended).ndim - 2 != tokens:
        raise CacheRefused("attention reads dimension 1 of the cached tensor as tokens")


def since_projection(
    nodes: Iterable[fx.Node], results: set[fx.Node], updates: Collection[fx.Node] = ()
) -> set[fx.Node]:
    """Return the ancestors of keys and values, ending at linear layers and attention outputs.

    Args:
        updates: nodes that grow a cache; what the new tokens are computed from is left out.
    """
    ends = tagged("projects") | {"layer_norm"}

    def inputs(node: fx.Node) -> Iterable[fx.Node]:
        parts = cat_parts(node) if node in updates else None
        return parts[:1] if parts else [] if operator_name(node) in ends else node.all_input_nodes

    return set(walk.reach(nodes, inputs, results))
