"""Which attention calls of a model's own graph are on a cache, and how that grows.

The anchors are attention calls, see `kvpass.capture.decomposed_attention`.  From key and value we walk back through
operations that only change the shape to the concatenation that grew the past.  Nothing is recognised by the name of a
model, a module or an argument.

The operations on the way run on numbered elements at small sizes, which shows where rows, tokens and heads end up.
Small sizes show nothing of a subscript such as `[:, :, -64:]`, so the size that Dynamo recorded for each operation must
be a multiple of the cache's, as an expression.

A cache of a fixed size, such as StaticCache's, is refused.  To read one, `append` would take the position as an
operand, with a proof that it is the number of tokens seen, and whatever lies behind the last token must be proven
hidden.

`_cat_parts` and `_origin` decide which updates grow a past.  Add a case in which a new one must not fire.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from kvpass.capture import cross_attention, decomposed_attention, graph_break, sparse_index, unsupported_growth
from kvpass.capture.decomposed_attention import AttentionCall, UnreadSoftmax, is_as_wide
from kvpass.capture.sites import stored
from kvpass.fx import alias, op_table, walk
from kvpass.fx.alias import Writers
from kvpass.fx.op_table import MOVES, SAME_VALUE, known_name
from kvpass.fx.shapes import expr
from kvpass.fx.walk import ancestors, is_tensor, value
from kvpass.torch_private import symbolic_shapes


@dataclasses.dataclass(frozen=True)
class Origin:
    """What is stored, the past in it (None for an empty one) and the new tokens, each [B, H, tokens, D]."""

    grown: fx.Node
    past: fx.Node | None
    new: fx.Node


@dataclasses.dataclass(frozen=True)
class Reading:
    """An attention call on a cache.

    Attributes:
        key, value: where what it attends to comes from.
        computed: it attends to what is computed from the cache, and not to what is cached.
        keys_out, values_out: where the graph returns the grown ones.
    """

    call: AttentionCall
    key: Origin
    value: Origin
    computed: bool
    keys_out: int
    values_out: int


@dataclasses.dataclass(frozen=True)
class CallReading:
    """What became of one attention call or cache update: read, or why not.

    Attributes:
        node: the attention call, or the cache update that feeds none.
        reading: what can be rewritten.
        refusal: why an update cannot be rewritten; None beside no reading means that no growing cache is involved.
        fixed: what it attends to, where that is returned and yet does not grow.
    """

    node: fx.Node
    reading: Reading | None = None
    refusal: str | None = None
    fixed: tuple[fx.Node, ...] = ()


class _Refused(Exception):
    pass


def find(gm: fx.GraphModule, carried: set[fx.Node]) -> list[CallReading]:
    """Every attention call of a model's own graph, and every cache update that feeds none.

    Args:
        carried: the placeholders whose value is a cache handle of ours.
    """
    outputs = {node: index for index, node in enumerate(walk.results(gm.graph)) if isinstance(node, fx.Node)}
    read, unread = decomposed_attention.find(gm)
    ends = {end for call in read for end in (call.node, call.lse) if end is not None}
    updates = [node for node in gm.graph.nodes if _grows_a_cache(node, outputs)]
    found: list[CallReading] = []
    writers = alias.Writers.of(gm.graph)
    queries = cross_attention.queries_of(read, writers)
    for call in read:
        known = {f.reading.keys_out: f.reading.values_out for f in found if f.reading}
        fixed = _fixed(call, outputs, queries, writers)
        found.append(fixed or _examine(call, ends, outputs, updates, carried, known, writers))
    used = {origin.grown for f in found if f.reading for origin in (f.reading.key, f.reading.value)}
    used |= {node for f in found for node in f.fixed}
    refused_at = {f.node for f in found if f.refusal}
    for update in updates:
        if update not in used and not any(update in ancestors(call) for call in refused_at):
            why = _softmax_near(update, unread) if read or unread else _BROKEN
            found.append(CallReading(update, refusal=_UNREAD + why))
    if not any(f.refusal for f in found):
        found += [
            CallReading(node, refusal=why) for node, why in unsupported_growth.unread(gm.graph, _known(found, outputs))
        ]
    found += _unused_handles(found, carried) + _beside_handles(found, carried)
    return found


def _known(found: list[CallReading], outputs: dict[fx.Node, int]) -> set[int]:
    """The places of outputs that are caches which were read, those of sparse indices among them."""
    readings = [f.reading for f in found if f.reading]
    chosen = [each for reading in readings for each in sparse_index.find(reading.call.mask)]
    scored_by = {outputs[node] for each in chosen for node, _ in sparse_index.cached(each, list(outputs))}
    return scored_by | {index for reading in readings for index in (reading.keys_out, reading.values_out)}


_UNREAD = "the cache that is grown here feeds no attention call that can be followed"
_BROKEN = (
    "; the graph has none at all, so that it breaks in between: see TORCH_LOGS=graph_breaks. Where it breaks for a "
    "warning about output_attentions=True, leave that out: slots do not hold every token, and have no weights for all. "
    "Where the model uses flex_attention, which is not followed, load it with attn_implementation='sdpa' or 'eager'"
)


def _softmax_near(update: fx.Node, unread: list[UnreadSoftmax]) -> str:
    """What was not understood around the first softmax that an update leads to, if it leads to any."""
    near = next((each for each in unread if update in ancestors(each.softmax)), None)
    return f"; the next softmax is not read as attention, for {near}" if near else ""


def _unused_handles(found: list[CallReading], carried: set[fx.Node]) -> list[CallReading]:
    used = {origin.past for f in found if f.reading for origin in (f.reading.key, f.reading.value)}
    if any(f.refusal for f in found):
        return []
    lost = [node for node in carried - used if any(not _about_shape(user) for user in node.users)]
    return [
        CallReading(
            next(iter(node.users)), refusal="a kvpass cache is used here in a way that is not an attention call"
        )
        for node in lost[:1]
    ]


def _beside_handles(found: list[CallReading], carried: set[fx.Node]) -> list[CallReading]:
    """Caches that grow as ordinary tensors where others are kvpass's."""
    pasts = {origin.past: f.node for f in found if f.reading for origin in (f.reading.key, f.reading.value)}
    ordinary = [call for past, call in pasts.items() if carried and past not in carried]
    return [CallReading(ordinary[0], refusal=_ORDINARY)] if ordinary else []


_ORDINARY = (
    "its cache is an ordinary tensor that grows beside caches of kvpass: somebody replaced it, or it was left alone in "
    "the prompt, as its keys were made of other inputs than its queries, and must stay as it is"
)


def _about_shape(node: fx.Node) -> bool:
    return not isinstance(value(node), torch.Tensor)


def _grows_a_cache(node: fx.Node, outputs: dict[fx.Node, int]) -> bool:
    """A concatenation of a past and new tokens along dimension -2 of [B, H, S, D], stored or of an empty past."""
    parts = _cat_parts(node)
    return parts is not None and (value(parts[0]).ndim == 1 or stored(node, outputs) is not None)


def _cat_parts(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The past and the new tokens of a concatenation that grows a cache."""
    if node.target not in (torch.cat, torch.concat) or not is_tensor(node):
        return None
    bound: dict[str, Any] = dict(zip(("tensors", "dim"), node.args, strict=False)) | dict(node.kwargs)
    tensors, dim = bound["tensors"], bound.get("dim", bound.get("axis", 0))
    if len(tensors) != 2 or value(node).ndim != 4 or dim not in (-2, 2):
        return None
    past, new = tensors
    is_past = past.op == "placeholder" or value(past).ndim == 1
    return (past, new) if is_past else None


def _fixed(
    call: AttentionCall, outputs: dict[fx.Node, int], queries: Mapping[fx.Node, fx.Node], writers: Writers
) -> CallReading | None:
    """A call on keys and values that are returned without a past, and to which no token of its queries adds."""
    try:
        origins = _origin(call.key, outputs), _origin(call.value, outputs)
    except _Refused:
        return None
    stored_once = all(origin.past is None for origin in origins) and cross_attention.is_fixed(call, queries, writers)
    return CallReading(call.node, fixed=tuple(origin.grown for origin in origins)) if stored_once else None


def _examine(
    call: AttentionCall,
    ends: set[fx.Node],
    outputs: dict[fx.Node, int],
    updates: list[fx.Node],
    carried: set[fx.Node],
    known: dict[int, int],
    writers: Writers,
) -> CallReading:
    behind = ancestors(call.key, stop=ends) | ancestors(call.value, stop=ends)
    near = _unprojected(call.key, ends) | _unprojected(call.value, ends)
    otherwise = [node for node in near if node not in updates and _grows_otherwise(node, outputs)]
    kept = [node for node in near if node.op == "placeholder" or node in outputs]
    otherwise += [user for node in kept for user in node.users if _overwrites(user, node)]
    otherwise += _replaced_in(call, ends, outputs)
    cached = behind.intersection(updates) or behind & carried or otherwise
    try:
        if otherwise:
            line = walk.source_line(otherwise[0])
            raise _Refused(
                f"its cache is updated at {line} in a way that is not a concatenation along dimension -2 of "
                "[B, H, S, D]; a preallocated cache such as StaticCache has to give way to a growing one: leave out "
                "cache_implementation='static' or 'sliding_window', or pass a DynamicCache or none, as kvpass has "
                "fixed slots of its own"
            )
        reading = _reading(call, ends, outputs, known, writers)
    except _Refused as why:
        if cached or _leaves_otherwise(call, outputs):
            return CallReading(call.node, refusal=str(why))
        return CallReading(call.node, refusal=graph_break.why(call, ends))
    return CallReading(call.node, reading)


def _replaced_in(call: AttentionCall, ends: set[fx.Node], outputs: dict[fx.Node, int]) -> list[fx.Node]:
    """The update of a cache of a fixed size, by torch.where, say, if both keys and values come from one.

    Where there are as many keys as queries, these may be all tokens, and an input what was made of them before a break.
    """
    if expr(value(call.key).shape[-2]) == expr(value(call.query).shape[-2]):
        return []
    updates = [
        [
            n
            for n in _unprojected(x, ends)
            if n in outputs and _cat_parts(n) is None and unsupported_growth.stays_as_long(n)
        ]
        for x in (call.key, call.value)
    ]
    return updates[0] if all(updates) else []


def _leaves_otherwise(call: AttentionCall, outputs: dict[fx.Node, int]) -> bool:
    """Whether keys or values are returned in another form than they are attended to: a cache, in a layout not ours.

    Returned as they are, they are what an encoder gave, which no later call adds to.
    """
    todo = [*_moved_from(call.key), *_moved_from(call.value)]
    seen, plain = set(todo), set(todo)
    while todo:
        node = todo.pop()
        if node in outputs and node not in plain:
            return True
        following = [u for u in node.users if known_name(u) in _REARRANGES and u not in seen and u is not call.node]
        seen.update(following)
        todo += following
    return False


_REARRANGES = MOVES | SAME_VALUE | {"stack", "cat", "concat"}


def _moved_from(node: fx.Node) -> list[fx.Node]:
    """A tensor and those that it is another arrangement of."""
    found = [node]
    while known_name(found[-1]) in MOVES | SAME_VALUE:
        source = found[-1].args[0]
        if not isinstance(source, fx.Node) or not is_tensor(source) or value(source).ndim < 4:
            break
        found.append(source)
    return found


def _unprojected(node: fx.Node, ends: set[fx.Node]) -> set[fx.Node]:
    """What a key or value is made of up to the projections of hidden states, behind which are other layers' states."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current not in seen and current not in ends:
            seen.add(current)
            if walk.name_of(current) not in _PROJECTIONS:
                todo.extend(current.all_input_nodes)
    return seen


_PROJECTIONS = frozenset({"linear", "addmm", "embedding", "conv1d", "layer_norm"})


def _grows_otherwise(node: fx.Node, outputs: dict[fx.Node, int]) -> bool:
    """An input concatenated with something else and returned: a cache, in a layout that is not ours."""
    if node.target not in (torch.cat, torch.concat) or node not in outputs or _cat_parts(node) is not None:
        return False
    first = node.all_input_nodes[0]
    return first.op == "placeholder" and is_tensor(first) and value(first).ndim >= 3


def _overwrites(user: fx.Node, cache: fx.Node) -> bool:
    """An input or output that is written to in place: a preallocated cache."""
    return alias.writes(user) and user.args[0] is cache and is_tensor(cache) and value(cache).ndim >= 3


def _reading(
    call: AttentionCall, ends: set[fx.Node], outputs: dict[fx.Node, int], known: dict[int, int], writers: Writers
) -> Reading:
    computed = False
    try:
        key, val = _origin(call.key, outputs), _origin(call.value, outputs)
        computed = _is_converted(call, key, val)
    except _Refused:
        behind = _stored_behind(call, ends, outputs, writers)
        if behind is None:
            raise
        (key, val), computed = behind, True
    if (key.past is None) != (val.past is None):
        raise _Refused("the key has a past and the value has none, or the other way round")
    if computed:
        _check_as_many(call, key, val)
    if key.past is None and _from_elsewhere(call, writers):
        raise _Refused("its keys are made of other tokens than its queries")
    (keys_out, window), (values_out, value_window) = _place(key.grown, outputs), _place(val.grown, outputs)
    if window != value_window:
        raise _Refused(f"the last {window} keys are stored and the last {value_window} values")
    _check(call, key, reader=keys_out in known)
    _check_left_alone(key, writers)
    _check_left_alone(val, writers)
    if keys_out == values_out or known.get(keys_out, values_out) != values_out or keys_out in known.values():
        raise _Refused("one cached tensor serves as keys and as values")
    return Reading(call, key, val, computed, keys_out, values_out)


def _is_converted(call: AttentionCall, key: Origin, val: Origin) -> bool:
    """Whether keys or values are attended to in another dtype than they are cached in."""
    pairs = ((call.key, key), (call.value, val))
    return any(value(attended).dtype != value(origin.grown).dtype for attended, origin in pairs)


def _check_as_many(call: AttentionCall, key: Origin, val: Origin) -> None:
    """Refuse keys that are computed from a part of the cache, or from several of its tokens each."""
    cached = {expr(value(origin.grown).shape[2]) for origin in (key, val)}
    for node in (call.key, call.value):
        if expr(value(node).shape[-2]) not in cached:
            raise _Refused(
                f"attention reads {value(node).shape[-2]} keys and the cache returns "
                f"{value(key.grown).shape[2]}: this layer prunes or pools its keys. A window or a choice of keys can "
                "be a part of the attention mask instead"
            )


def _check_left_alone(origin: Origin, writers: Writers) -> None:
    """A step stores new tokens where the model attends, and what is written to their memory in between would show."""
    late = None if origin.past is None else alias.overwritten({origin.new}, origin.grown, writers)
    if late is not None:
        raise _Refused(f"new tokens are written to at {walk.source_line(late)}, after they were stored")


def _from_elsewhere(call: AttentionCall, writers: Writers) -> bool:
    """Whether queries come from tokens that keys do not come from: cross-attention, whose keys no step adds to."""
    queried, attended = (_tokens_behind(node, call.node, writers) for node in (call.query, call.key))
    return not queried <= attended


def _tokens_behind(node: fx.Node, reader: fx.Node, writers: Writers) -> set[fx.Node]:
    """The inputs that bring tokens in: what is looked up in tables, and hidden states."""
    behind = alias.behind([node], reader=reader, writers=writers)
    looked_up = [n.args[0] for n in behind if n.target is torch.nn.functional.embedding and is_tensor(n.args[0])]
    found = {p for n in looked_up for p in ancestors(n) if p.op == "placeholder" and is_tensor(p)}  # type: ignore[arg-type]
    hidden = [p for p in behind if p.op == "placeholder" and is_tensor(p) and value(p).ndim == 3]
    return found | {p for p in hidden if value(p).is_floating_point() and not isinstance(value(p), torch.nn.Parameter)}


def _stored_behind(
    call: AttentionCall, ends: set[fx.Node], outputs: dict[fx.Node, int], writers: Writers
) -> tuple[Origin, Origin] | None:
    """The two caches that key and value are computed from, in the order in which the model's code grows them."""
    near = alias.behind([call.key, call.value], ends, call.node, writers=writers)
    updates = [node for node in call.node.graph.nodes if node in near and _grows_a_cache(node, outputs)]
    grown = [node for node in updates if stored(node, outputs) is not None]
    if not updates:
        grown = [node for node in call.node.graph.nodes if _starts_a_cache(node, call, ends, outputs)]
    if len(grown) != 2:
        return None
    first, second = (_origin(node, outputs) for node in grown)
    return first, second


def _starts_a_cache(node: fx.Node, call: AttentionCall, ends: set[fx.Node], outputs: dict[fx.Node, int]) -> bool:
    """Whether a prompt returns a node as rows [B, h, q, D] for its tokens, of which keys or values are computed."""
    if node not in outputs or not is_tensor(node) or value(node).ndim != 4 or node.op == "placeholder":
        return False
    near = _unprojected(call.key, ends) | _unprojected(call.value, ends)
    return node in near and expr(value(node).shape[2]) == expr(value(call.query).shape[2])


def _place(grown: fx.Node, outputs: dict[fx.Node, int]) -> tuple[int, int | None]:
    index = stored(grown, outputs)
    if index is None:
        raise _Refused("the grown cache is not returned by the graph")
    return index


def _check(call: AttentionCall, origin: Origin, reader: bool) -> None:
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
    if not reader and expr(value(query).shape[2]) != expr(value(key).shape[2]):
        raise _Refused("there are not as many new keys as queries")
    if origin.past is not None and call.causal:
        raise _Refused("is_causal with a past aligns the mask to the first key")


def _origin(node: fx.Node, outputs: dict[fx.Node, int]) -> Origin:
    """GraphRun from a key or value to the cache, and see that its heads, tokens and features are those of the cache."""
    chain, seen_output = list[fx.Node](), None
    attended = node
    while True:
        parts = _cat_parts(node)
        if parts is not None:
            break
        if node in outputs and value(node).ndim == 4:
            seen_output = node
        if known_name(node) not in MOVES | SAME_VALUE or not is_tensor(node.args[0]):
            break
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if parts is None:
        if seen_output is None:
            raise _Refused(
                f"its key or value comes from {walk.name_of(node)!r} ({walk.source_line(node)}), which is no "
                "concatenation with the past, and is not computed from one cached pair"
            )
        node = seen_output
        chain = chain[: chain.index(node)] if node in chain else chain
    _check_heads(attended, node, chain)
    if parts is None:
        return Origin(node, None, node)
    past, new = parts
    if value(node).dtype != value(new).dtype and not is_as_wide(value(node).dtype, value(new).dtype):
        raise _Refused(f"{value(new).dtype} is cached as {value(node).dtype}, which loses digits")
    empty = value(past).ndim != 4 or expr(value(past).shape[2]) == 0
    return Origin(node, None if empty or past.op != "placeholder" else past, new)


def _check_takes_all(node: fx.Node, grown: fx.Node, copies: float) -> None:
    """Refuse a selection of the cache's elements that is none at the small sizes at which it is run.

    What a subscript selects depends on how a length compares with its bounds.  Dynamo has decided that, so that the
    size which it recorded says whether everything is taken, at all lengths that the graph serves.

    Args:
        copies: how many times as many elements as `grown` the result has at small sizes.
    """
    size, whole = value(node).numel(), value(grown).numel()
    if copies.is_integer() and symbolic_shapes.known_equal(size, whole * int(copies)):
        return
    raise _Refused(f"{known_name(node)!r} at {walk.source_line(node)} takes a part of the cached keys or values")


def _check_heads(attended: fx.Node, grown: fx.Node, chain: list[fx.Node]) -> None:
    """Each query head's keys must be those of its group: run the operations on numbered elements and see.

    Args:
        chain: the operations from the grown cache to what is attended to, the last one first.
    """
    shape = op_table.concrete(value(grown).shape)
    numbered = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    dtype, made = value(grown).dtype, numbered
    for node in reversed(chain):
        if not value(node).dtype == dtype and not is_as_wide(value(node).dtype, dtype):
            raise _Refused(f"what is cached in {dtype} is attended to in {value(node).dtype}, which loses digits")
        try:
            made = op_table.run_on(node, {node.all_input_nodes[0]: made}) if known_name(node) in MOVES else made
        except (RuntimeError, TypeError, IndexError):
            line = walk.source_line(node)
            raise _Refused(f"{line}: {known_name(node)!r} on keys or values is not understood") from None
        _check_takes_all(node, grown, made.numel() / numbered.numel())
    rows, _, tokens, width = shape
    if made.shape[-2:] != (tokens, width) or made.numel() % numbered.numel():
        raise _Refused(f"keys or values of shape {tuple(value(grown).shape)} are cached, others are attended to")
    groups = made.numel() // numbered.numel()
    if not torch.equal(made.reshape(rows, -1, tokens, width), numbered.repeat_interleave(groups, 1)):
        raise _Refused(
            "the keys or values of a head are not those that are cached for its group of query heads: rows, heads, "
            f"tokens or features are moved between the cache and {walk.source_line(attended)}"
        )
