"""Find the attention calls of Dynamo's graph that read a cache, and how each cache grows.

The search starts at attention calls (`kvpass.capture.decomposed_attention`).  From key and value it follows operations
that only change shapes back to the concatenation with the past.  Names of models, modules and arguments play no role.

The operations on the way run on numbered elements at small sizes, which shows where each row, token and head ends up.
Small sizes cannot reveal a subscript such as `[:, :, -64:]`.  So the recorded size of each operation must also be a
multiple of the cache's size, as a symbolic expression.

A cache of fixed size, such as StaticCache, is refused.  Support would need `append` to take the write position, with a
proof that it equals the number of tokens seen and that all later entries are masked.

`_cat_parts` and `_origin` decide which updates grow a past.  With each new case, add a test of a graph that it must not
match.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
import torch.fx as fx

from kvpass.capture import decomposed_attention, other_caches, sparse_index
from kvpass.capture.canonical import stored
from kvpass.capture.decomposed_attention import AttentionCall, UnreadSoftmax, is_as_wide
from kvpass.fx import alias, op_table, walk
from kvpass.fx.alias import Memory
from kvpass.fx.op_table import is_a, known_name, tagged
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, is_tensor, value
from kvpass.torch_private import symbolic_shapes


@dataclasses.dataclass(frozen=True)
class Origin:
    """A cache's past (None if empty), its new tokens and their concatenation, each [B, H, tokens, D]."""

    grown: fx.Node
    past: fx.Node | None
    new: fx.Node


@dataclasses.dataclass(frozen=True)
class Reading:
    """An attention call on a cache.

    Attributes:
        call: the attention call.
        key, value: the caches that its keys and values come from.
        computed: whether it reads keys or values that are computed from the cached ones.
        keys_out, values_out: the output indices of the grown caches.
    """

    call: AttentionCall
    key: Origin
    value: Origin
    computed: bool
    keys_out: int
    values_out: int


@dataclasses.dataclass(frozen=True)
class CallReading:
    """The result for one attention call or cache update: a reading, or the reason why there is none.

    Attributes:
        node: the attention call, or a cache update that feeds none.
        reading: the attention call on its cache, if it can be rewritten.
        refusal: the reason why it cannot be rewritten; None without a reading means that no growing cache is involved.
        fixed: keys and values that are returned but do not grow.
    """

    node: fx.Node
    reading: Reading | None = None
    refusal: str | None = None
    fixed: tuple[fx.Node, ...] = ()


class _Refused(Exception):
    pass


def find(gm: fx.GraphModule, handles: set[fx.Node]) -> list[CallReading]:
    """Find every attention call of Dynamo's graph, and every cache update that feeds none.

    Args:
        gm: Dynamo's graph, with arguments bound.
        handles: the placeholders whose value is a handle of a kvpass cache.
    """
    outputs = {node: index for index, node in enumerate(walk.results(gm.graph)) if isinstance(node, fx.Node)}
    calls, unread = decomposed_attention.find(gm)
    call_results = {result for call in calls for result in (call.node, call.lse) if result is not None}
    updates = [node for node in gm.graph.nodes if _grows_a_cache(node, outputs)]
    found: list[CallReading] = []
    memory = alias.Memory(gm.graph)
    queries = other_caches.queries_of(calls, memory)
    for call in calls:
        values_of = {f.reading.keys_out: f.reading.values_out for f in found if f.reading}
        fixed = _fixed(call, outputs, queries, memory)
        found.append(fixed or _examine(call, call_results, outputs, updates, handles, values_of, memory))
    used_updates = {origin.grown for f in found if f.reading for origin in (f.reading.key, f.reading.value)}
    used_updates |= {node for f in found for node in f.fixed}
    refused_at = {f.node for f in found if f.refusal}
    for update in updates:
        if update not in used_updates and not any(update in ancestors(call) for call in refused_at):
            reason = _next_unread_softmax(update, unread) if calls or unread else _NO_ATTENTION
            found.append(CallReading(update, refusal=_UNREAD + reason))
    if not any(f.refusal for f in found):
        found += [
            CallReading(node, refusal=reason)
            for node, reason in other_caches.unread(gm.graph, _known_outputs(found, outputs))
        ]
    found += _unused_handles(found, handles) + _ordinary_caches(found, handles)
    return found


def _known_outputs(found: list[CallReading], outputs: dict[fx.Node, int]) -> set[int]:
    """Return the output indices of caches that were read, those of sparse indices among them."""
    readings = [f.reading for f in found if f.reading]
    indices = [index for reading in readings for index in sparse_index.find(reading.call.mask)]
    scoring_keys = {outputs[n] for index in indices for n, _ in sparse_index.cached_scoring_keys(index, list(outputs))}
    return scoring_keys | {index for reading in readings for index in (reading.keys_out, reading.values_out)}


_UNREAD = "the cache that is grown here feeds no attention call that can be followed"
_NO_ATTENTION = (
    "; the graph has none at all, so that it breaks in between: see TORCH_LOGS=graph_breaks. Where it breaks for a "
    "warning about output_attentions=True, leave that out: slots do not hold every token, and have no weights for all. "
    "Where the model uses flex_attention, which is not followed, load it with attn_implementation='sdpa' or 'eager'"
)


def _next_unread_softmax(update: fx.Node, unread: list[UnreadSoftmax]) -> str:
    following = next((each for each in unread if update in ancestors(each.softmax)), None)
    return f"; the next softmax is not read as attention, for {following}" if following else ""


def _unused_handles(found: list[CallReading], handles: set[fx.Node]) -> list[CallReading]:
    """Refuse a graph that uses a handle of kvpass outside of attention calls."""
    used = {origin.past for f in found if f.reading for origin in (f.reading.key, f.reading.value)}
    if any(f.refusal for f in found):
        return []
    uses = [user for node in handles - used for user in node.users if is_tensor(user)]
    return [CallReading(use, refusal="a kvpass cache is used here outside of an attention call") for use in uses[:1]]


def _ordinary_caches(found: list[CallReading], handles: set[fx.Node]) -> list[CallReading]:
    """Refuse a graph in which ordinary caches grow while others are kvpass's."""
    pasts = {origin.past: f.node for f in found if f.reading for origin in (f.reading.key, f.reading.value)}
    ordinary = [call for past, call in pasts.items() if handles and past not in handles]
    return [CallReading(ordinary[0], refusal=_ORDINARY)] if ordinary else []


_ORDINARY = (
    "its cache is an ordinary tensor that grows beside caches of kvpass: it was replaced, or its keys came from other "
    "inputs than its queries in the prompt, and such a cache must not grow"
)


def _grows_a_cache(node: fx.Node, outputs: dict[fx.Node, int]) -> bool:
    """Return whether a node grows a cache: it joins past and new tokens and is stored, or the past is empty."""
    parts = _cat_parts(node)
    return parts is not None and (value(parts[0]).ndim == 1 or stored(node, outputs) is not None)


def _cat_parts(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the past and the new tokens of a concatenation that grows a cache, or None."""
    if known_name(node) not in ("cat", "concat") or not is_tensor(node):
        return None
    args = op_table.bound(node)
    tensors, dim = args["tensors"], args.get("dim", 0)
    if len(tensors) != 2 or value(node).ndim != 4 or dim not in (-2, 2):
        return None
    past, new = tensors
    is_past = past.op == "placeholder" or value(past).ndim == 1
    return (past, new) if is_past else None


def _fixed(
    call: AttentionCall, outputs: dict[fx.Node, int], queries: Mapping[fx.Node, fx.Node], memory: Memory
) -> CallReading | None:
    """Read a call on keys and values that are returned without a past and that its tokens do not extend."""
    try:
        origins = _origin(call.key, outputs), _origin(call.value, outputs)
    except _Refused:
        return None
    stored_once = all(origin.past is None for origin in origins) and other_caches.is_fixed(call, queries, memory)
    return CallReading(call.node, fixed=tuple(origin.grown for origin in origins)) if stored_once else None


def _examine(
    call: AttentionCall,
    results: set[fx.Node],
    outputs: dict[fx.Node, int],
    updates: list[fx.Node],
    handles: set[fx.Node],
    values_of: dict[int, int],
    memory: Memory,
) -> CallReading:
    computed_from = ancestors(call.key, stop=results) | ancestors(call.value, stop=results)
    local = _since_projection(call.key, results) | _since_projection(call.value, results)
    other_updates = [node for node in local if node not in updates and _grows_in_other_layout(node, outputs)]
    stored_nodes = [node for node in local if node.op == "placeholder" or node in outputs]
    states = [node for node in stored_nodes if is_tensor(node) and value(node).ndim >= 3]
    other_updates += [user for node in states for user in node.users if alias.writes(user) and user.args[0] is node]
    other_updates += _fixed_size_updates(call, results, outputs)
    on_cache = computed_from.intersection(updates) or computed_from & handles or other_updates
    try:
        if other_updates:
            line = walk.source_line(other_updates[0])
            raise _Refused(
                f"its cache is updated at {line} in a way that is not a concatenation along dimension -2 of "
                "[B, H, S, D]; a preallocated cache such as StaticCache has to give way to a growing one: leave out "
                "cache_implementation='static' or 'sliding_window', or pass a DynamicCache or none, as kvpass has "
                "fixed slots of its own"
            )
        reading = _reading(call, results, outputs, values_of, memory)
    except _Refused as reason:
        if on_cache or _is_returned_rearranged(call, outputs):
            return CallReading(call.node, refusal=str(reason))
        return CallReading(call.node, refusal=other_caches.refusal_of(call, results))
    return CallReading(call.node, reading)


def _fixed_size_updates(call: AttentionCall, results: set[fx.Node], outputs: dict[fx.Node, int]) -> list[fx.Node]:
    """Return the updates of a cache of fixed size, as by torch.where, if both keys and values come from one.

    With as many keys as queries these may be all tokens, and the input a tensor that was computed before a graph break.
    """
    if expr(value(call.key).shape[-2]) == expr(value(call.query).shape[-2]):
        return []
    updates = [
        [
            node
            for node in _since_projection(attended, results)
            if node in outputs and _cat_parts(node) is None and other_caches.is_fixed_size_update(node)
        ]
        for attended in (call.key, call.value)
    ]
    return updates[0] if all(updates) else []


def _is_returned_rearranged(call: AttentionCall, outputs: dict[fx.Node, int]) -> bool:
    """Return whether keys or values are returned in another arrangement: a cache in an unsupported layout.

    Returned unchanged, they are an encoder's output, which no later call extends.
    """
    sources = {*_arrangement_sources(call.key), *_arrangement_sources(call.value)}
    rearranged = walk.reach(sources, lambda node: [u for u in node.users if is_a(u, "moves", "keeps", "joins")])
    return any(node in outputs and node not in sources for node in rearranged)


def _arrangement_sources(node: fx.Node) -> list[fx.Node]:
    return walk.chain(node, lambda n: is_a(n, "moves", "keeps") and value(n.args[0]).ndim >= 4)  # type: ignore[arg-type]


def _since_projection(node: fx.Node, results: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that a key or value is computed from, up to the projections of hidden states."""
    ends = tagged("projects") | {"layer_norm"}
    return ancestors(node, results, until=lambda each: walk.name_of(each) in ends)


def _grows_in_other_layout(node: fx.Node, outputs: dict[fx.Node, int]) -> bool:
    """Return whether a node concatenates an input and is returned: a cache in an unsupported layout."""
    if known_name(node) not in ("cat", "concat") or node not in outputs or _cat_parts(node) is not None:
        return False
    first = node.all_input_nodes[0]
    return first.op == "placeholder" and is_tensor(first) and value(first).ndim >= 3


def _reading(
    call: AttentionCall,
    results: set[fx.Node],
    outputs: dict[fx.Node, int],
    values_of: dict[int, int],
    memory: Memory,
) -> Reading:
    computed = False
    try:
        key, val = _origin(call.key, outputs), _origin(call.value, outputs)
        computed = _is_converted(call, key, val)
    except _Refused:
        sources = _source_caches(call, results, outputs, memory)
        if sources is None:
            raise
        (key, val), computed = sources, True
    if (key.past is None) != (val.past is None):
        raise _Refused("only one of key and value has a past")
    if computed:
        _check_key_count(call, key, val)
    if key.past is None and _is_cross_attention(call, memory):
        raise _Refused("its keys are computed from other tokens than its queries")
    (keys_out, window), (values_out, value_window) = _output_of(key.grown, outputs), _output_of(val.grown, outputs)
    if window != value_window:
        raise _Refused(f"the cache returns the last {window} keys but the last {value_window} values")
    _check_supported(call, key, shares_cache=keys_out in values_of)
    _check_unmodified(key, memory)
    _check_unmodified(val, memory)
    if keys_out == values_out or values_of.get(keys_out, values_out) != values_out or keys_out in values_of.values():
        raise _Refused("one cached tensor serves as keys and as values")
    return Reading(call, key, val, computed, keys_out, values_out)


def _is_converted(call: AttentionCall, key: Origin, val: Origin) -> bool:
    """Return whether attention reads keys or values in another dtype than the cached one."""
    pairs = ((call.key, key), (call.value, val))
    return any(value(attended).dtype != value(origin.grown).dtype for attended, origin in pairs)


def _check_key_count(call: AttentionCall, key: Origin, val: Origin) -> None:
    """Refuse keys that are computed from a part of the cache, or each from several tokens."""
    cached = {expr(value(origin.grown).shape[2]) for origin in (key, val)}
    for node in (call.key, call.value):
        if expr(value(node).shape[-2]) not in cached:
            raise _Refused(
                f"attention reads {value(node).shape[-2]} keys and the cache returns "
                f"{value(key.grown).shape[2]}: this layer prunes or pools its keys. A window or a choice of keys can "
                "be a part of the attention mask instead"
            )


def _check_unmodified(origin: Origin, memory: Memory) -> None:
    """Refuse writes in place to new tokens after they are stored; a step stores them only where the model attends."""
    writer = None if origin.past is None else alias.overwritten({origin.new}, origin.grown, memory)
    if writer is not None:
        raise _Refused(f"new tokens are written to at {walk.source_line(writer)}, after they were stored")


def _is_cross_attention(call: AttentionCall, memory: Memory) -> bool:
    """Return whether queries come from tokens that keys do not come from, as in cross-attention."""
    query_tokens, key_tokens = (_token_sources(node, call.node, memory) for node in (call.query, call.key))
    return not query_tokens <= key_tokens


def _token_sources(node: fx.Node, reader: fx.Node, memory: Memory) -> set[fx.Node]:
    """Return the inputs that bring tokens: ids that embeddings look up, and hidden states [B, q, D]."""
    computed_from = alias.behind([node], reader=reader, memory=memory)
    ids = [n.args[0] for n in computed_from if n.target is torch.nn.functional.embedding and is_tensor(n.args[0])]
    found = {p for n in ids for p in ancestors(n) if p.op == "placeholder" and is_tensor(p)}  # type: ignore[arg-type]
    states = [p for p in computed_from if p.op == "placeholder" and is_tensor(p) and value(p).ndim == 3]
    return found | {p for p in states if value(p).is_floating_point() and not isinstance(value(p), torch.nn.Parameter)}


def _source_caches(
    call: AttentionCall, results: set[fx.Node], outputs: dict[fx.Node, int], memory: Memory
) -> tuple[Origin, Origin] | None:
    """Return the two caches that key and value are computed from, in the order in which the graph grows them."""
    computed_from = alias.behind([call.key, call.value], results, call.node, memory=memory)
    updates = [node for node in call.node.graph.nodes if node in computed_from and _grows_a_cache(node, outputs)]
    grown = [node for node in updates if stored(node, outputs) is not None]
    if not updates:
        grown = [node for node in call.node.graph.nodes if _starts_a_cache(node, call, results, outputs)]
    if len(grown) != 2:
        return None
    first, second = (_origin(node, outputs) for node in grown)
    return first, second


def _starts_a_cache(node: fx.Node, call: AttentionCall, results: set[fx.Node], outputs: dict[fx.Node, int]) -> bool:
    """Return whether a prompt returns a node [B, h, q, D] from which keys or values are computed."""
    if node not in outputs or not is_tensor(node) or value(node).ndim != 4 or node.op == "placeholder":
        return False
    local = _since_projection(call.key, results) | _since_projection(call.value, results)
    return node in local and expr(value(node).shape[2]) == expr(value(call.query).shape[2])


def _output_of(grown: fx.Node, outputs: dict[fx.Node, int]) -> tuple[int, int | None]:
    """Return the output index of a grown cache and the number of tokens stored."""
    found = stored(grown, outputs)
    if found is None:
        raise _Refused("the grown cache is not returned by the graph")
    return found


def _check_supported(call: AttentionCall, origin: Origin, shares_cache: bool) -> None:
    """Refuse training, integer caches, and queries and keys of unsupported shapes."""
    query, key = call.query, origin.new
    if call.dropout:
        raise _Refused(
            f"attention with dropout {call.dropout}: the model is in training mode; call model.eval(), or pass "
            "use_cache=False to train"
        )
    if not value(key).is_floating_point():
        raise _Refused(f"the cache holds {value(key).dtype}, which is not floating-point")
    if value(query).ndim != 4 or value(key).ndim != 4:
        raise _Refused(f"queries of shape {tuple(value(query).shape)} are not [B, Hq, q, D]")
    if not shares_cache and expr(value(query).shape[2]) != expr(value(key).shape[2]):
        raise _Refused("there are not as many new keys as queries")
    if origin.past is not None and call.causal:
        raise _Refused("is_causal with a past aligns the mask to the first key")


def _origin(attended: fx.Node, outputs: dict[fx.Node, int]) -> Origin:
    """Follow a key or value back to its cache, and check that heads, tokens and features are the cache's."""
    chain = walk.chain(attended, lambda each: is_a(each, "moves", "keeps"))
    parts, node = _cat_parts(chain[-1]), chain[-1]
    if parts is None:
        returned = [each for each in chain if each in outputs and value(each).ndim == 4]
        if not returned:
            raise _Refused(
                f"its key or value comes from {walk.name_of(node)!r} ({walk.source_line(node)}), which is no "
                "concatenation with the past, and is not computed from one cached pair"
            )
        node = returned[-1]
    _check_heads(attended, node, chain[: chain.index(node)])
    if parts is None:
        return Origin(node, None, node)
    past, new = parts
    if value(node).dtype != value(new).dtype and not is_as_wide(value(node).dtype, value(new).dtype):
        raise _Refused(f"{value(new).dtype} is cached as {value(node).dtype}, which loses digits")
    empty = value(past).ndim != 4 or expr(value(past).shape[2]) == 0
    return Origin(node, None if empty or past.op != "placeholder" else past, new)


def _check_takes_all(node: fx.Node, grown: fx.Node, copies: float) -> None:
    """Refuse an operation that selects a part of the cache at the recorded size, though not at small sizes.

    Which elements a subscript selects depends on how a length compares with its bounds.  Dynamo has decided this
    comparison, so the recorded size tells it for all lengths that the graph serves.

    Args:
        node: the operation.
        grown: the cache.
        copies: the number of elements of the result per element of the cache, at small sizes.
    """
    size, whole = value(node).numel(), value(grown).numel()
    if copies.is_integer() and symbolic_shapes.known_equal(size, whole * int(copies)):
        return
    raise _Refused(f"{known_name(node)!r} at {walk.source_line(node)} selects a part of the cached keys or values")


def _check_heads(attended: fx.Node, grown: fx.Node, chain: list[fx.Node]) -> None:
    """Check that each query head reads the rows of its group, by running the operations on numbered elements.

    Args:
        attended: the keys or values that attention reads.
        grown: the cache.
        chain: the operations from the cache to `attended`, the last one first.
    """
    shape = op_table.concrete(value(grown).shape)
    numbered = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    dtype, moved = value(grown).dtype, numbered
    for node in reversed(chain):
        if not value(node).dtype == dtype and not is_as_wide(value(node).dtype, dtype):
            raise _Refused(f"attention reads the {dtype} cache in {value(node).dtype}, which loses digits")
        try:
            moved = op_table.run_on(node, {node.all_input_nodes[0]: moved}) if is_a(node, "moves") else moved
        except (RuntimeError, TypeError, IndexError):
            line = walk.source_line(node)
            raise _Refused(f"{line}: {known_name(node)!r} on keys or values is not supported") from None
        _check_takes_all(node, grown, moved.numel() / numbered.numel())
    rows, _, tokens, features = shape
    if moved.shape[-2:] != (tokens, features) or moved.numel() % numbered.numel():
        raise _Refused(f"keys or values of shape {tuple(value(grown).shape)} are cached, attention reads others")
    groups = moved.numel() // numbered.numel()
    if not torch.equal(moved.reshape(rows, -1, tokens, features), numbered.repeat_interleave(groups, 1)):
        raise _Refused(
            "a query head does not read the keys or values of its group's KV head: rows, heads, "
            f"tokens or features are moved between the cache and {walk.source_line(attended)}"
        )
