"""Convert Dynamo's graph to the canonical form.

    before    k = cat([past_k, key], -2)              after    k = kvpass::append(past_k, key)
              v = cat([past_v, val], -2)                       v = kvpass::append(past_v, val)
              K = k[:, :, None].expand(...).reshape(...)       out = kvpass::attention(q, k, v, mask, None, 0.25, ...)
              V = v[:, :, None].expand(...).reshape(...)
              w = q @ K.transpose(2, 3) * 0.25 + mask
              out = softmax(w, -1) @ V

Later stages do not see how models write attention and caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from kvpass.capture import autocast_regions, cache_search, heads_first, simplify, sliced_tables
from kvpass.capture.cache_search import CachedAttentionCall, SearchResult
from kvpass.capture.canonical import APPEND, ATTENTION, LOG_SUM_EXP, AttentionSite, is_attention
from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.capture.origins import Origin
from kvpass.capture.rotary import find_rotary
from kvpass.fx import alias, op_table, splicing, walk
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, example_value
from kvpass.torch_private import fx_nodes


@dataclasses.dataclass(frozen=True)
class Capture:
    """A graph in canonical form.

    Attributes:
        dynamo_gm: Dynamo's graph, with heads before tokens, see `kvpass.capture.heads_first`.
        canonical_gm: a graph with the results of `dynamo_gm`.
        sites: its attention calls on caches; empty if any call was refused, and `canonical_gm` is then `dynamo_gm`.
        search_results: the result of each attention call and cache update.
        tokens_first: the indices of the arguments [B, S, H, D] that are [B, H, S, D] in both graphs.
    """

    dynamo_gm: fx.GraphModule
    canonical_gm: fx.GraphModule
    sites: list[AttentionSite]
    search_results: list[SearchResult]
    tokens_first: frozenset[int] = frozenset()

    @property
    def is_certain(self) -> bool:
        """Whether the order of heads and tokens is known: a cache was found, and its keys show their heads."""
        return bool(self.sites) and not any(site.computed and site.past_key is None for site in self.sites)

    @property
    def refusals(self) -> list[SearchResult]:
        """The search results that refuse a call or an update."""
        return [result for result in self.search_results if result.refusal]


def capture(dynamo_gm: fx.GraphModule, is_handle: Sequence[bool]) -> Capture:
    """Convert a graph to canonical form, in a copy.

    Up to three forms of the graph are tried: the graph as it is; if no cache is found in it, with the dimensions of
    einsum equations reordered; and with caches [B, S, H, D] transposed.  The first certain result is returned, or else
    the last one that found a cache.  See `Capture.is_certain`: keys that seem to be computed from a prompt's cached
    ones may be the keys of a transposed cache.

    Args:
        is_handle: for each placeholder, whether its value is a handle of a kvpass cache.
    """
    plain = _capture_as_it_is(dynamo_gm, is_handle)
    if plain.is_certain:
        return plain
    ordered = heads_first.order_equations(dynamo_gm)
    captured = plain if ordered is dynamo_gm or plain.sites else _capture_as_it_is(ordered, is_handle)
    if captured.is_certain:
        return captured
    relaid = _capture_heads_first(ordered, is_handle)
    return captured if relaid is None or (captured.sites and not relaid.sites) else relaid


def _capture_as_it_is(dynamo_gm: fx.GraphModule, is_handle: Sequence[bool]) -> Capture:
    canonical_gm = _normalized(dynamo_gm)
    handles = {node for node, flag in zip(walk.placeholders(canonical_gm.graph), is_handle, strict=True) if flag}
    search_results = cache_search.find_cached_attention(canonical_gm, handles)
    cached_calls = [result.cached_call for result in search_results if result.cached_call]
    if any(result.refusal for result in search_results) or not cached_calls:
        return Capture(dynamo_gm, dynamo_gm, [], search_results)
    attention_sites = _insert_operators(canonical_gm.graph, cached_calls)
    sliced_tables.index_sliced_tables(canonical_gm.graph, attention_sites)
    for site in attention_sites:
        if find_rotary(site) is None:
            heads_first.separate_rotary(site)
    canonical_gm.recompile()
    return Capture(dynamo_gm, canonical_gm, attention_sites, search_results)


def _normalized(dynamo_gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with calls normalized: positional arguments, products for einsum, no vmap."""
    copy, _ = fx_nodes.copy_graph_module(dynamo_gm)
    _replace_transposed_attributes(copy.graph)
    op_table.normalize_calls(copy.graph)
    simplify.multiply_equations(copy.graph)
    simplify.multiply_outer_products(copy.graph)
    autocast_regions.inline_autocast_regions(copy.graph)
    simplify.replace_vmap(copy.graph)
    return copy


def _capture_heads_first(dynamo_gm: fx.GraphModule, is_handle: Sequence[bool]) -> Capture | None:
    """Convert a graph with caches [B, S, H, D]; None if there are none.

    Outputs in that order that no attention call grows, such as keys of cross-attention, reach the model unchanged.
    """
    names, returned = heads_first.find_tokens_first(_normalized(dynamo_gm)), walk.results(dynamo_gm.graph)
    for _ in range(2):
        if not names:
            return None
        relaid = heads_first.transpose_caches(dynamo_gm, names)
        captured, relaid_sites = _capture_as_it_is(relaid.dynamo_gm, is_handle), list[AttentionSite]()
        if captured.refusals:
            return Capture(dynamo_gm, dynamo_gm, [], captured.search_results)
        stray = relaid.outputs - {index for site in captured.sites for index in (site.keys_out, site.values_out)}
        if not stray:
            break
        names -= {returned[index].name for index in stray}
    else:
        return None
    for site in captured.sites:
        key_dim, value_dim = (1 if index in relaid.outputs else 2 for index in (site.keys_out, site.values_out))
        relaid_sites.append(dataclasses.replace(site, token_dims=(key_dim, value_dim)))
    return dataclasses.replace(captured, sites=relaid_sites, tokens_first=relaid.inputs)


_ATTRIBUTES = {"mT": (-1, -2), "mH": (-1, -2), "T": (0, 1), "H": (0, 1)}
_ATEN = torch.ops.aten
_OPERATORS: dict[Any, str] = {_ATEN.mT: "mT", _ATEN.mH: "mH", _ATEN.numpy_T: "T", _ATEN.matrix_H: "H"}
"""The operators that Dynamo records for these attributes since torch 2.14."""


def _replace_transposed_attributes(graph: fx.Graph) -> None:
    """Replace x.mT by x.transpose(-1, -2), and similar attributes, if x is real."""
    for node in list(graph.nodes):
        name = _attribute(node)
        tensor = example_value(node.args[0]) if name else None
        if not isinstance(tensor, torch.Tensor) or tensor.is_complex() or (name in ("T", "H") and tensor.ndim != 2):
            continue
        with graph.inserting_before(node):
            transposed = graph.call_method("transpose", (node.args[0], *_ATTRIBUTES[str(name)]))
        _replace(node, transposed)
        graph.erase_node(node)


def _attribute(node: fx.Node) -> str | None:
    """Return the attribute of `_ATTRIBUTES` that a node reads, or None."""
    if node.op != "call_function":
        return None
    if node.target is getattr:
        return str(node.args[1]) if node.args[1] in _ATTRIBUTES else None
    target: Any = node.target
    return _OPERATORS.get(getattr(target, "overloadpacket", target))


def _insert_operators(graph: fx.Graph, cached_calls: list[CachedAttentionCall]) -> list[AttentionSite]:
    """Replace every cache update and every attention call on a cache by a canonical operator.

    Returns:
        The first attention call on each cache, with later calls on the same cache as `shared_by`.

    Raises:
        UnsupportedGraph: the slots of a layer cannot store the cached tensors.
    """
    results = {node for r in cached_calls for node in (*r.call.results, r.key.grown, r.value.grown)}
    # Writes in place to the logits are among these nodes, although nothing uses their results.
    computed_from = alias.ancestors_with_writes(list(results))
    appended: dict[fx.Node, fx.Node] = {}
    for cached_call in cached_calls:
        for origin in (cached_call.key, cached_call.value):
            if origin.grown not in appended:
                appended[origin.grown] = _append(graph, origin)
    replaced: dict[fx.Node, fx.Node] = {}
    inserted: list[tuple[CachedAttentionCall, fx.Node, fx.Node | None, tuple[fx.Node, fx.Node]]] = []
    for cached_call in cached_calls:
        call = cached_call.call.with_operands(replaced)
        grown = (appended[cached_call.key.grown], appended[cached_call.value.grown])
        computed = (appended.get(call.key, call.key), appended.get(call.value, call.value))
        attended = computed if cached_call.computed else grown
        lse = None if call.lse is None else _insert_log_sum_exp(graph, call, attended[0])
        replaced[cached_call.call.node] = _attend(graph, call, attended)
        inserted.append((cached_call, replaced[cached_call.call.node], lse, grown))
    alias.eliminate_dead(graph, among=computed_from)
    found: dict[int, list[AttentionSite]] = {}
    for cached_call, node, lse, grown in inserted:
        if node.users:  # it was not dead
            site = _site(cached_call, node, lse if lse is not None and lse.users else None, grown)
            found.setdefault(site.keys_out, []).append(site)
    return [_with_later_calls(*group) for group in found.values()]


def _with_later_calls(first: AttentionSite, *later: AttentionSite) -> AttentionSite:
    """Join the attention calls on one cache; mark all as `computed` if one reads keys or values computed from it."""
    computed = any(site.computed for site in (first, *later))
    shared_by = tuple(dataclasses.replace(site, computed=computed) for site in later)
    return dataclasses.replace(first, computed=computed, shared_by=shared_by)


def _site(
    cached_call: CachedAttentionCall, call: fx.Node, lse: fx.Node | None, grown: tuple[fx.Node, fx.Node]
) -> AttentionSite:
    args = op_table.named_arguments(call)
    attended, mask = (args["key"], args["value"]), args["mask"]
    reads_mask_from_cache = mask is not None and not ancestors(mask, until=is_attention).isdisjoint(grown)
    (past_key, key), (past_value, val) = grown[0].args, grown[1].args
    _check_cached_pair(call, args["query"], *grown)
    copied = {name: args[name] for name in ("query", "mask", "scale", "causal", "cap", "sink_logit", "hidden_logit")}
    return AttentionSite(
        call=call, key=key, value=val, past_key=past_key, past_value=past_value, grown_key=grown[0],  # type: ignore[arg-type]
        grown_value=grown[1], keys_out=cached_call.keys_out, values_out=cached_call.values_out,
        window=cached_call.window, computed=attended != grown or reads_mask_from_cache, attended=attended, lse=lse,
        decomposed=args["product_dtype"] is not None, **copied,
    )  # fmt: skip


def _check_cached_pair(call: fx.Node, query: fx.Node, key: fx.Node, values: fx.Node) -> None:
    """Raise UnsupportedGraph unless the slots of a layer can hold keys and values that grow for a query."""
    key_dtype, value_dtype = example_value(key).dtype, example_value(values).dtype
    # Under autocast a rotary embedding in float32 makes keys wider than values.
    if key_dtype != value_dtype and (key_dtype != torch.float32 or value_dtype.itemsize != 2):
        dtypes = f"keys are cached in {key_dtype} and values in {value_dtype}"
        walk.refuse(call, f"{dtypes}, but the slots of a layer have one dtype; cast one of them before it is cached")
    query_rows, cached_rows = (example_value(node).shape[0] for node in (query, key))
    if expr(query_rows) != expr(cached_rows):
        rows = f"{query_rows} rows of queries attend to a cache of {cached_rows} rows"
        walk.refuse(call, f"{rows}, so it is unknown which row keeps which tokens")


def _append(graph: fx.Graph, origin: Origin) -> fx.Node:
    """Insert the operator for a cache update; without a concatenation it replaces the new tokens themselves.

    New tokens may be written in place before they are read, as into empty memory.
    """
    new = _new_in_cache_dtype(origin)
    written = alias.writers_to({new}) if new is origin.grown else []
    with graph.inserting_after(max([origin.grown, *written])):
        node = graph.call_function(APPEND, (origin.past, new))
    _replace(origin.grown, node)
    return node


def _new_in_cache_dtype(origin: Origin) -> fx.Node:
    """Return the new tokens in the dtype of the cache, to which the model's concatenation promotes them."""
    new, dtype = origin.new, example_value(origin.grown).dtype
    if example_value(new).dtype == dtype:
        return new
    return splicing.emit_before(origin.grown, "to", new, dtype)


def _attend(graph: fx.Graph, call: AttentionCall, attended: tuple[fx.Node, fx.Node]) -> fx.Node:
    options: dict[str, Any] = {}
    if call.dtypes is not None:
        product, logit, output = call.dtypes
        options = dict(hidden_logit=call.hidden_logit, product_dtype=product, logit_dtype=logit, output_dtype=output)
    args = (call.query, *attended, call.mask, call.sink_logit, call.scale, call.cap)
    with graph.inserting_before(call.node):
        node = graph.call_function(ATTENTION, args, {"causal": call.causal, **options})
    _replace(call.node, node)
    return node


def _insert_log_sum_exp(graph: fx.Graph, call: AttentionCall, key: fx.Node) -> fx.Node:
    """Insert the log-sum-exp of the same logits, in the model's shape and dtype, and return its operator."""
    assert call.lse is not None
    assert call.dtypes is not None
    recorded = example_value(call.lse)
    args = (call.query, key, call.mask, call.scale, call.cap, call.hidden_logit, call.dtypes[0], recorded.dtype)
    with graph.inserting_before(call.lse):
        node = graph.call_function(LOG_SUM_EXP, args)
        result = node if recorded.ndim == 3 else graph.call_method("unsqueeze", (node, -1))
    _replace(call.lse, result)
    if result is not node:
        node.meta.update(result.meta)
        splicing.with_value(node, recorded.squeeze(-1))
    return node


def _replace(node: fx.Node, replacement: fx.Node) -> None:
    """Replace a node of the model by a new one, which takes over its metadata."""
    replacement.meta.update(node.meta, kvpass_stands_for=node.name)
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: replacement < user)
