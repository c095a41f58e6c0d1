"""Find where keys and values come from: a cache that grows, a cache of cross-attention, or an unread cache.

The operations between a cache and attention run on numbered elements at small sizes, which shows where each row, token
and head ends up.  Small sizes cannot reveal a subscript such as `[:, :, -64:]`.  So the recorded size of each operation
must also be a multiple of the cache's size, as a symbolic expression.

`cat_parts` and `origin_of` decide which updates grow a past.  Caches [B, S, H, D] are seen as [B, H, S, D], see
`kvpass.capture.heads_first`.  With each new case, add a test of a graph that it must not match.

Keys of cross-attention are stored once.  In a prompt such a cache looks like any other: no past precedes the new keys,
and the graph returns them.  The inputs tell the difference: its keys are computed from an encoder's output, and from
none of the tokens of its queries.  The number of keys proves nothing, because it may equal the number of queries.  A
cache that grows in a later step is examined there again.

A cache may be updated outside of the graph: after a graph break, or in an uncompiled function.  Or it may grow in a
way that capture does not read.  Whatever the code and layout, a model takes a tensor and returns a longer one.  So an
output is refused if it is computed from an input without a projection in between and is longer along exactly one
dimension.  A tensor of constant length, such as the last states of a convolution, is bounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.fx as fx

from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.capture.products import is_as_wide
from kvpass.capture.rotary import follow_to
from kvpass.fx import alias, op_table, propagation, shapes, walk
from kvpass.fx.alias import AliasSets
from kvpass.fx.op_table import has_tag, operator_name, tagged
from kvpass.fx.shapes import expr
from kvpass.fx.walk import example_value, is_tensor, target_name
from kvpass.torch_private import dynamo, symbolic_shapes


@dataclasses.dataclass(frozen=True)
class Origin:
    """A cache's past (None if empty), its new tokens and their concatenation, each [B, H, tokens, D]."""

    grown: fx.Node
    past: fx.Node | None
    new: fx.Node


@dataclasses.dataclass(frozen=True)
class OutsideKeys:
    """An input with the keys or values that an attention call reads, which no node of the graph updates.

    Attributes:
        index, dim: the input's index among the arguments, and the keys' dimension in its shape.
        query_len: q, as a size of the graph.
        line: the source line of the attention call, if it is known.
    """

    index: int
    dim: int
    query_len: Any
    line: str | None


class CacheRefused(Exception):
    """Keys or values do not come from a cache that kvpass can read; the message says why."""


def cat_parts(node: fx.Node, along: int = 2) -> tuple[fx.Node, fx.Node] | None:
    """Return the past and the new tokens of a concatenation that grows a cache along a dimension, or None."""
    if operator_name(node) not in ("cat", "concat") or not is_tensor(node):
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
            f"keys or values of shape {tuple(example_value(grown).shape)} are cached, attention reads others: {_LAYOUT}"
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


DOES_NOT_GROW = "its keys and values do not grow: they are computed from other inputs than its queries"


def queries_of(calls: list[AttentionCall], alias_sets: AliasSets) -> dict[fx.Node, fx.Node]:
    """Map the results of each attention call to its query, if the query depends on inputs.

    A query of parameters alone, as in attention over layers, is left out: there the tokens arrive as keys and values.
    """
    return {
        result: call.query
        for call in calls
        if _call_inputs(alias.ancestors_with_writes([call.query], reader=call.node, alias_sets=alias_sets))
        for result in call.results
    }


def is_cross_attention(call: AttentionCall, queries: Mapping[fx.Node, fx.Node], alias_sets: AliasSets) -> bool:
    """Return whether no key or value depends on an input of the query's tokens: these never grow.

    In later layers a query also depends on earlier attention outputs.  Its tokens are found along their `queries`.
    """
    query_inputs = _call_inputs(
        alias.ancestors_with_writes([call.query], reader=call.node, through=queries, alias_sets=alias_sets)
    )
    kv_inputs = (  # keys that share an input with the query end the search, which goes through all layers before
        _call_inputs(alias.ancestors_with_writes([node], reader=call.node, alias_sets=alias_sets))
        for node in (call.key, call.value)
    )
    return bool(query_inputs) and all(inputs and query_inputs.isdisjoint(inputs) for inputs in kv_inputs)


def _call_inputs(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the tensor inputs of the call, which may differ from step to step; parameters are left out."""
    return {node for node in nodes if node.op == "placeholder" and is_tensor(node) and not dynamo.is_of_module(node)}


def refusal_of(call: AttentionCall, ends: set[fx.Node]) -> str | None:
    """Return the reason why an attention call that updates no cache cannot stay unchanged, or None if it can.

    If queries, keys and values are all inputs, the cache grew before a graph break.  With as many keys as queries,
    as in a prompt or an encoder, that is harmless.  Queries that the graph itself computes may attend to an encoder's
    output.  The search stops at `ends`, the results of all attention calls.
    """
    if not (_is_input(call.key) and _is_input(call.value)):
        return None
    computes_states = tagged("projects", "contracts")
    made_here = any(walk.target_name(node) in computes_states for node in walk.ancestors(call.query, ends))
    if made_here or expr(example_value(call.query).shape[-2]) == expr(example_value(call.key).shape[-2]):
        return None
    return (
        "its queries, keys and values all come from outside of the graph: a graph break, or a function that runs "
        "uncompiled, stands between the update of the cache and attention. Find it with TORCH_LOGS=graph_breaks"
    )


def outside_keys(call: AttentionCall) -> list[OutsideKeys]:
    """Return the inputs from which a call that updates no cache takes its keys and values.

    There are none if keys and queries are equally many, as in an encoder.
    """
    count, queries = expr(example_value(call.key).shape[-2]), example_value(call.query).shape[-2]
    sources = dict.fromkeys(source for node in (call.key, call.value) for source in _source_inputs(node))
    indices, line = {node: i for i, node in enumerate(walk.placeholders(call.node.graph))}, walk.known_line(call.node)
    dims = {node: [d for d, size in enumerate(example_value(node).shape) if expr(size) == count] for node in sources}
    found = [OutsideKeys(indices[node], of_node[-1], queries, line) for node, of_node in dims.items() if of_node]
    return [] if count == expr(queries) else found


def _is_input(node: fx.Node) -> bool:
    """Return whether a tensor is an input or a view of one."""
    return walk.chain(node, lambda each: has_tag(each, "moves", "keeps"))[-1].op == "placeholder"


def unread_caches(graph: fx.Graph, read: set[int]) -> list[tuple[fx.Node, str]]:
    """Return the outputs that extend an input and are not `read` as caches, each with the reason of the refusal."""
    others = [node for index, node in enumerate(walk.results(graph)) if index not in read and _is_state(node)]
    found = []
    for node in dict.fromkeys(node for node in others if node.op != "placeholder"):
        sources = _source_inputs(node)
        if any(shapes.same_shape(example_value(node).shape, example_value(source).shape) for source in sources):
            continue
        past = next((source for source in sources if _is_longer(node, source)), None)
        if past is not None:
            found.append((node, f"{past.name!r} grows here, and it is not read as a cache: {_LAYOUT}"))
    return found


_LAYOUT = (
    "caches that are attended to grow by torch.cat([past, new], -2) of [B, H, S, D], or along 1 of [B, S, H, D]; let "
    "the model keep them so, or run it uncompiled"
)


def is_fixed_size_update(node: fx.Node) -> bool:
    """Return whether a tensor is an input of the same shape with some elements replaced: a cache of fixed size."""
    parents = node.all_input_nodes if _is_state(node) and node.op != "placeholder" else []
    return any(
        shapes.same_shape(example_value(node).shape, example_value(source).shape)
        for parent in parents
        for source in _source_inputs(parent)
    )


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
        return parts[:1] if parts else [] if target_name(node) in ends else node.all_input_nodes

    return set(walk.reach(nodes, inputs, results))


def _source_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of at least three dimensions that a tensor rearranges or selects from."""
    mixing = tagged("projects", "contracts", "normalizes", "mixes")
    sources = walk.reach([node], lambda each: () if target_name(each) in mixing else each.all_input_nodes)
    return [source for source in sources if source.op == "placeholder" and _is_state(source)]


def _is_state(node: object) -> bool:
    """Return whether a node is a floating-point tensor of at least three dimensions, and not a parameter."""
    if not is_tensor(node) or isinstance(example_value(node), torch.nn.Parameter):
        return False
    return bool(example_value(node).ndim >= 3 and example_value(node).is_floating_point())


def _is_longer(node: fx.Node, past: fx.Node) -> bool:
    """Return whether a tensor has the shape of another except for one dimension, which may be longer."""
    shape, past_shape = example_value(node).shape, example_value(past).shape
    if len(shape) != len(past_shape):
        return False
    others = [sizes for sizes in zip(shape, past_shape, strict=True) if expr(sizes[0]) != expr(sizes[1])]
    return len(others) == 1 and not symbolic_shapes.known_at_most(*others[0])
