"""Find the attention calls of Dynamo's graph that read a cache, and how each cache grows.

The search starts at attention calls (`kvpass.capture.decomposed_attention`).  From key and value it follows operations
that only change shapes back to the concatenation with the past (`kvpass.capture.origins`).  Names of models, modules
and arguments play no role.

A cache of fixed size, such as StaticCache, is refused.  Support would need `append` to take the write position, with a
proof that it equals the number of tokens seen and that all later entries are masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from kvpass.capture import cross_attention, decomposed_attention, origins, products, sparse_index, untracked_growth
from kvpass.capture.cross_attention import OutsideKeys
from kvpass.capture.decomposed_attention import AttentionCall
from kvpass.capture.origins import CacheRefused, Origin, cat_parts, origin_of
from kvpass.fx import alias, op_table, walk
from kvpass.fx.alias import AliasSets
from kvpass.fx.op_table import has_tag, operator_name
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, example_value, is_tensor, operand_of


@dataclasses.dataclass(frozen=True)
class CachedAttentionCall:
    """An attention call, and the caches that it reads.

    Attributes:
        call: the attention call.
        key, value: the caches that its keys and values come from.
        computed: whether it reads keys or values that are computed from the cached ones.
        keys_out, values_out: the output indices of the grown caches.
        window: the number of last tokens that the model stores, None for all.
    """

    call: AttentionCall
    key: Origin
    value: Origin
    computed: bool
    keys_out: int
    values_out: int
    window: int | None


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of one attention call or cache update: how it reads its cache, or why it is refused.

    Attributes:
        node: the attention call, or a cache update that feeds none.
        cached_call: the attention call on its cache, if it can be rewritten.
        refusal: the reason why it cannot be rewritten.  If neither is set, the call reads no cache that grows.
        cross_cache: the keys and values of cross-attention, which are returned and never grow.
        outside: the inputs with keys and values of a call that updates no cache; only calls show whether they grow.
    """

    node: fx.Node
    cached_call: CachedAttentionCall | None = None
    refusal: str | None = None
    cross_cache: tuple[fx.Node, ...] = ()
    outside: tuple[OutsideKeys, ...] = ()


def find_cached_attention(dynamo_gm: fx.GraphModule, handles: set[fx.Node]) -> list[SearchResult]:
    """Find every attention call of Dynamo's graph, and every cache update that feeds none.

    Args:
        handles: the placeholders whose value is a handle of a kvpass cache.
    """
    return _CacheSearch(dynamo_gm, handles).run()


_UNREAD = "the cache that is grown here feeds no attention call that can be followed"
_NO_ATTENTION = (
    "; the graph has no attention: it breaks in between, see TORCH_LOGS=graph_breaks, or the model attends without "
    "scaled_dot_product_attention and softmax. Where it breaks for a warning about output_attentions=True, leave that "
    "out: slots do not store every token, so probabilities are incomplete. Where the model uses flex_attention, which "
    "is not followed, load it with attn_implementation='sdpa' or 'eager'"
)
_ORDINARY = (
    "this layer's cache is an ordinary tensor, while other layers have caches of kvpass: a tensor was put in the place "
    "of the cache after the prompt, or this was cross-attention in the prompt; pass each layer the cache that the "
    "model returned for it"
)


class _CacheSearch:
    """The search for the caches of one graph.

    Attributes:
        outputs: the output index of each returned node.
        calls: the attention calls.
        other_softmaxes: each softmax that cannot be read as an attention call, with the reason.
        results: the results of all attention calls.
        updates: the nodes that grow a cache.
        search_results: the results so far.
    """

    def __init__(self, dynamo_gm: fx.GraphModule, handles: set[fx.Node]) -> None:
        self.graph, self.handles = dynamo_gm.graph, handles
        self.outputs = {
            node: index for index, node in enumerate(walk.results(dynamo_gm.graph)) if isinstance(node, fx.Node)
        }
        self.calls, self.other_softmaxes = decomposed_attention.find_attention_calls(dynamo_gm)
        self.results = {result for call in self.calls for result in call.results}
        self.updates = [node for node in dynamo_gm.graph.nodes if self._grows_a_cache(node)]
        self.alias_sets = alias.AliasSets(dynamo_gm.graph)
        self.search_results: list[SearchResult] = []

    @property
    def cached_calls(self) -> list[CachedAttentionCall]:
        return [each.cached_call for each in self.search_results if each.cached_call]

    def run(self) -> list[SearchResult]:
        queries = cross_attention.queries_of(self.calls, self.alias_sets)
        for call in self.calls:
            self.search_results.append(self._read_cross_attention(call, queries) or self._examine_call(call))
        self._refuse_unread_updates()
        if not any(each.refusal for each in self.search_results):
            untracked = untracked_growth.untracked_growth(self.graph, self._known_outputs())
            self.search_results += [SearchResult(node, refusal=reason) for node, reason in untracked]
        self._refuse_mixed_caches()
        return self.search_results

    def _refuse_unread_updates(self) -> None:
        """Refuse cache updates that feed no attention call, unless a call that they feed is refused already."""
        used = {origin.grown for cached_call in self.cached_calls for origin in (cached_call.key, cached_call.value)}
        used |= {node for each in self.search_results for node in each.cross_cache}
        refused_at = {each.node for each in self.search_results if each.refusal}
        for update in self.updates:
            if update in used or any(update in ancestors(call) for call in refused_at):
                continue
            reason = "" if self.calls or self.other_softmaxes else _NO_ATTENTION
            why = next((why for softmax, why in self.other_softmaxes.items() if update in ancestors(softmax)), None)
            if why:
                reason = f"; the next softmax is not read as attention, for {why}"
            self.search_results.append(SearchResult(update, refusal=_UNREAD + reason))

    def _known_outputs(self) -> set[int]:
        """Return the output indices of all caches that were read, scoring keys of sparse indices included."""
        indices = [
            index for cached_call in self.cached_calls for index in sparse_index.sparse_indices(cached_call.call.mask)
        ]
        returned = list(self.outputs)
        scoring_keys = [node for index in indices for node, _ in sparse_index.cached_scoring_keys(index, returned)]
        caches = {
            index for cached_call in self.cached_calls for index in (cached_call.keys_out, cached_call.values_out)
        }
        return caches | {self.outputs[node] for node in scoring_keys}

    def _refuse_mixed_caches(self) -> None:
        """Refuse handles that are used outside of attention calls, and ordinary caches that grow next to handles."""
        pasts = {origin.past: each.call.node for each in self.cached_calls for origin in (each.key, each.value)}
        stray = [user for node in self.handles - pasts.keys() for user in node.users if is_tensor(user)]
        ordinary = [call for past, call in pasts.items() if self.handles and past not in self.handles]
        if stray and not any(each.refusal for each in self.search_results):
            self.search_results.append(
                SearchResult(stray[0], refusal="a kvpass cache is used here outside of an attention call")
            )
        if ordinary:
            self.search_results.append(SearchResult(ordinary[0], refusal=_ORDINARY))

    # -- one attention call -----------------------------------------------------------------------------------------

    def _grows_a_cache(self, node: fx.Node) -> bool:
        """Return whether a node joins past and new tokens, and is stored or has an empty past."""
        parts = cat_parts(node)
        return parts is not None and (
            example_value(parts[0]).ndim == 1 or stored_output(node, self.outputs) is not None
        )

    def _read_cross_attention(self, call: AttentionCall, queries: Mapping[fx.Node, fx.Node]) -> SearchResult | None:
        """Read cross-attention, whose keys and values are stored once and never grow."""
        try:
            origins_of_call = origin_of(call.key, self.outputs), origin_of(call.value, self.outputs)
        except CacheRefused:
            return None
        has_no_past = all(origin.past is None for origin in origins_of_call)
        if has_no_past and cross_attention.is_cross_attention(call, queries, self.alias_sets):
            return SearchResult(call.node, cross_cache=tuple(origin.grown for origin in origins_of_call))
        return None

    def _examine_call(self, call: AttentionCall) -> SearchResult:
        computed_from = ancestors(call.key, stop=self.results) | ancestors(call.value, stop=self.results)
        other_updates = self._other_updates(call)
        on_cache = computed_from.intersection(self.updates) or computed_from & self.handles or other_updates
        try:
            if other_updates:
                line = walk.source_line(other_updates[0])
                raise CacheRefused(
                    f"its cache is updated at {line} in a way that is not a concatenation along dimension -2 of "
                    "[B, H, S, D] or 1 of [B, S, H, D]; replace a preallocated cache such as StaticCache by a "
                    "growing one: leave out cache_implementation='static' or 'sliding_window', or pass a DynamicCache "
                    "or none, as kvpass has its own fixed slots"
                )
            return SearchResult(call.node, self._read_call(call))
        except CacheRefused as reason:
            if on_cache or self._is_returned_rearranged(call):
                return SearchResult(call.node, refusal=str(reason))
            refusal = cross_attention.refusal_of(call, self.results)
            return SearchResult(
                call.node, refusal=refusal, outside=() if refusal else tuple(cross_attention.outside_keys(call))
            )

    def _other_updates(self, call: AttentionCall) -> list[fx.Node]:
        """Return the nodes that update the cache of a call without growing it along the tokens.

        What new tokens are computed from is no cache of the call, such as the state of a convolution.
        """
        local = origins.since_projection((call.key, call.value), self.results, self.updates)
        updates = [node for node in local if node not in self.updates and self._grows_in_other_layout(node)]
        kept = [node for node in local if node.op == "placeholder" or node in self.outputs]
        states = [node for node in kept if is_tensor(node) and example_value(node).ndim >= 3]
        states = [node for node in states if not self._is_filled_in_place(node, call)]
        updates += [writer for node in states for writer in self.alias_sets.writers(node)]
        return updates + self._fixed_size_updates(call)

    def _is_filled_in_place(self, node: fx.Node, call: AttentionCall) -> bool:
        """Return whether new tokens alone are written to memory of this graph, before attention reads any of them.

        Memory that is also returned holds new tokens alone only if it has no slots beside theirs.
        """
        memory = self.alias_sets.root(node)
        stored, *attended = (expr(example_value(each).numel()) for each in (node, call.key, call.value))
        if memory.op in ("placeholder", "get_attr") or not any((size / stored).is_integer for size in attended):
            return False
        seen, new = (expr(example_value(each).shape[-2]) for each in (call.key, call.query))
        if seen != new and node in self.outputs:
            return False

        def reads(each: fx.Node) -> bool:
            roots = map(self.alias_sets.root, each.all_input_nodes)
            return self.alias_sets.root(each) is not memory and memory in roots

        read = min(filter(reads, ancestors(call.key) | ancestors(call.value)), default=call.node)
        return all(writer < read for writer in self.alias_sets.writers(node))

    def _fixed_size_updates(self, call: AttentionCall) -> list[fx.Node]:
        """Return the updates of a cache of fixed size, as by torch.where, if keys and values both come from one.

        If keys and queries are equally many, these may be all tokens, and the input may be computed before a graph
        break.
        """
        if expr(example_value(call.key).shape[-2]) == expr(example_value(call.query).shape[-2]):
            return []

        def is_update(node: fx.Node) -> bool:
            return node in self.outputs and cat_parts(node) is None and untracked_growth.is_fixed_size_update(node)

        sources = [origins.since_projection([attended], self.results) for attended in (call.key, call.value)]
        of_keys, of_values = ([*filter(is_update, nodes)] for nodes in sources)
        return of_keys if of_values else []

    def _is_returned_rearranged(self, call: AttentionCall) -> bool:
        """Return whether keys or values are returned in another arrangement: a cache in an unsupported layout.

        Returned unchanged, they are an encoder's output, which no later call extends.
        """

        def is_rearranged(node: fx.Node) -> bool:
            return has_tag(node, "moves", "keeps") and example_value(operand_of(node)).ndim >= 4

        sources = {*walk.chain(call.key, is_rearranged), *walk.chain(call.value, is_rearranged)}
        moved = walk.reach(
            sources, lambda node: [user for user in node.users if has_tag(user, "moves", "keeps", "joins")]
        )
        return any(node in self.outputs and node not in sources for node in moved)

    def _grows_in_other_layout(self, node: fx.Node) -> bool:
        """Return whether a node concatenates an input and is returned: a cache in an unsupported layout."""
        if operator_name(node) != "cat" or node not in self.outputs or cat_parts(node) is not None:
            return False
        first = node.all_input_nodes[0]
        return first.op == "placeholder" and is_tensor(first) and example_value(first).ndim >= 3

    def _caches_of(self, call: AttentionCall) -> tuple[Origin, Origin, bool]:
        """Return the caches of keys and values, and whether what is attended to is computed from them."""
        try:
            key, val = origin_of(call.key, self.outputs), origin_of(call.value, self.outputs)
        except CacheRefused:
            sources = self._source_caches(call)
            if sources is None:
                raise
            return *sources, True
        pairs = ((call.key, key), (call.value, val))
        return key, val, any(example_value(node).dtype != example_value(cache.grown).dtype for node, cache in pairs)

    def _read_call(self, call: AttentionCall) -> CachedAttentionCall:
        key, val, computed = self._caches_of(call)
        if (key.past is None) != (val.past is None):
            raise CacheRefused("only one of key and value has a past")
        if computed:
            call = call.with_operands({node: _by_head(node) for node in (call.key, call.value)})
            _check_key_count(call, key, val)
        if key.past is None and not self._tokens_of(call.query, call) <= self._tokens_of(call.key, call):
            raise CacheRefused("its keys are computed from other tokens than its queries")
        (keys_out, window), (values_out, value_window) = self._output_of(key.grown), self._output_of(val.grown)
        if window != value_window:
            raise CacheRefused(f"the cache returns the last {window} keys but the last {value_window} values")
        values_of = {cached_call.keys_out: cached_call.values_out for cached_call in self.cached_calls}
        _check_supported(call, key, shares_cache=keys_out in values_of)
        _check_unmodified(key, self.alias_sets)
        _check_unmodified(val, self.alias_sets)
        other_values = values_of.get(keys_out, values_out) != values_out
        if keys_out == values_out or other_values or keys_out in values_of.values():
            raise CacheRefused("one cached tensor serves as keys and as values")
        return CachedAttentionCall(call, key, val, computed, keys_out, values_out, window)

    def _tokens_of(self, node: fx.Node, call: AttentionCall) -> set[fx.Node]:
        """Return the inputs that bring tokens: ids that embeddings look up, and hidden states [B, q, D]."""
        nodes = alias.ancestors_with_writes([node], reader=call.node, alias_sets=self.alias_sets)
        ids = [n.args[0] for n in nodes if n.target is torch.nn.functional.embedding and is_tensor(n.args[0])]
        index_inputs = {p for n in ids for p in ancestors(n) if p.op == "placeholder" and is_tensor(p)}
        states = [p for p in nodes if p.op == "placeholder" and is_tensor(p) and example_value(p).ndim == 3]
        tensors = [p for p in states if not isinstance(example_value(p), torch.nn.Parameter)]
        return index_inputs | {p for p in tensors if example_value(p).is_floating_point()}

    def _source_caches(self, call: AttentionCall) -> tuple[Origin, Origin] | None:
        """Return the two caches that key and value are computed from, or None if there are not two.

        Their order is the order in which the graph grows them, unless only the second feeds the keys.  In multi-head
        latent attention both feed keys and values.
        """
        of_key, of_value = (
            alias.ancestors_with_writes([node], self.results, call.node, alias_sets=self.alias_sets)
            for node in (call.key, call.value)
        )
        grown = self.updates
        if (of_key | of_value).isdisjoint(grown):
            local = origins.since_projection((call.key, call.value), self.results)
            grown = [node for node in self.graph.nodes if node in local and self._starts_a_cache(node, call)]
        found = [n for n in grown if n in of_key | of_value and stored_output(n, self.outputs) is not None]
        if len(found) != 2:
            return None
        first, second = found
        exchanged = second in of_key and first not in of_key and first in of_value and second not in of_value
        pair = (second, first) if exchanged else (first, second)
        return origin_of(pair[0], self.outputs), origin_of(pair[1], self.outputs)

    def _starts_a_cache(self, node: fx.Node, call: AttentionCall) -> bool:
        """Return whether a prompt returns a node [B, h, q, D] of keys and values."""
        if node not in self.outputs or not is_tensor(node) or example_value(node).ndim != 4 or node.op == "placeholder":
            return False
        return bool(expr(example_value(node).shape[2]) == expr(example_value(call.query).shape[2]))

    def _output_of(self, grown: fx.Node) -> tuple[int, int | None]:
        """Return the output index of a grown cache and the number of tokens stored."""
        if (found := stored_output(grown, self.outputs)) is not None:
            return found
        again = next((user for user in grown.users if operator_name(user) == "cat"), None)
        if again is None:
            raise CacheRefused("the grown cache is not returned by the graph")
        raise CacheRefused(
            f"the grown cache grows again at {walk.source_line(again)}: compile a function that calls the model once "
            "on a cache, and loop outside of it"
        )


def _by_head(computed: fx.Node) -> fx.Node:
    """Return computed keys or values [B, H, S, D] before their rows and heads were joined, or their heads split."""

    def keeps_heads(node: fx.Node) -> bool:
        return example_value(node).ndim != 4 and (products.only_splits_heads(node) or _adds_dimensions(node))

    node = walk.chain(computed, keeps_heads)[-1]
    if example_value(node).ndim != 4:
        raise CacheRefused(
            f"keys or values of shape {tuple(example_value(computed).shape)} are computed from cached ones: attention "
            "must read them as [B, H, S, D], possibly with rows and heads joined"
        )
    return node


def _adds_dimensions(node: fx.Node) -> bool:
    """Return whether a node is a subscript such as x[:, :, None] that adds dimensions before the last two."""
    return operator_name(node) == "getitem" and products.same_last_two(node) and op_table.takes_all(node)


def _check_key_count(call: AttentionCall, key: Origin, val: Origin) -> None:
    """Refuse keys that are computed from a part of the cache, or from several tokens each."""
    cached = {expr(example_value(origin.grown).shape[2]) for origin in (key, val)}
    for node in (call.key, call.value):
        if expr(example_value(node).shape[-2]) not in cached:
            raise CacheRefused(
                f"attention reads {example_value(node).shape[-2]} keys and the cache returns "
                f"{example_value(key.grown).shape[2]}: this layer prunes or pools its keys. A window or a choice of "
                "keys can be a part of the attention mask instead"
            )


def _check_unmodified(origin: Origin, alias_sets: AliasSets) -> None:
    """Refuse writes in place to cached tokens, and to new tokens after they are stored, where the model attends."""
    if origin.past is None:
        return
    writer = alias.overwriting_node({origin.new}, alias_sets, origin.grown)
    if writer is not None:
        raise CacheRefused(f"new tokens are written to at {walk.source_line(writer)}, after they were stored")
    writer = alias.overwriting_node({origin.grown, origin.past}, alias_sets)
    if writer is not None:
        raise CacheRefused(f"cached keys or values are written to at {walk.source_line(writer)}")


def _check_supported(call: AttentionCall, origin: Origin, shares_cache: bool) -> None:
    """Refuse training, integer caches, and queries and keys of unsupported shapes."""
    query, key = call.query, origin.new
    if call.dropout:
        raise CacheRefused(
            f"attention with dropout {call.dropout}: the model is in training mode; call model.eval(), or pass "
            "use_cache=False to train"
        )
    if not example_value(key).is_floating_point():
        raise CacheRefused(f"the cache holds {example_value(key).dtype}, which is not floating-point")
    if example_value(query).ndim != 4 or example_value(key).ndim != 4:
        raise CacheRefused(f"queries of shape {tuple(example_value(query).shape)} are not [B, Hq, q, D]")
    if not shares_cache and expr(example_value(query).shape[2]) != expr(example_value(key).shape[2]):
        raise CacheRefused("the numbers of new keys and of queries differ")
    if origin.past is not None and call.causal:
        raise CacheRefused("is_causal with a past aligns the mask to the first key")


def stored_output(grown: fx.Node, outputs: dict[fx.Node, int]) -> tuple[int, int | None] | None:
    """Return a cache's output index and the number of last tokens stored (None for all), or None without an output."""
    if grown in outputs:
        return outputs[grown], None
    for user in grown.users:
        count = _last_tokens(user)
        if user in outputs and count is not None:
            return outputs[user], count
    return None


def _last_tokens(node: fx.Node) -> int | None:
    """Return n if a node is x[:, :, -n:] of [B, H, S, D], else None."""
    if operator_name(node) != "getitem" or not isinstance(node.args[1], tuple):
        return None
    whole = slice(None)
    before, along, after = node.args[1][:2], node.args[1][2:3], node.args[1][3:]
    tokens: Any = along[0] if along else whole
    others_whole = all(part == whole for part in (*before, *after))
    if not others_whole or not isinstance(tokens, slice) or not isinstance(tokens.start, int) or tokens.start >= 0:
        return None
    return -tokens.start if tokens.stop is None and tokens.step is None else None
