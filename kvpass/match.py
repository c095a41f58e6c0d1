"""Find the attention calls of a traced graph and the cache updates that feed them.

The anchors are attention calls, see `kvpass.calls`.  From key and value we walk back through operations
that only change the shape to the concatenation that grew the past.  Nothing is recognised by the name of a
model, a module or an argument.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass import calls, graphs, torn
from kvpass.calls import Call, is_as_wide
from kvpass.capture import operators
from kvpass.capture.operators import MOVES, SAME_VALUE, known_name
from kvpass.graphs import ancestors, expr, is_tensor, value


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """One attention call and its cache update.

    Attributes:
        call: the attention node.
        query: [B, Hq, q, D].
        key, value: the new tokens', [B, Hkv, q, D].
        past_key, past_value: the placeholders of the past, None when there is none (a prompt).
        grown_key, grown_value: what the model stores again: past and new tokens together.
        mask: the node of the mask, or None.
        scale: multiplies the products of query and key.
        causal: the call's own is_causal.
        keys_out, values_out: where the graph returns the key and value that the model stores.
        window: how many of the last tokens the model stores, None for all.
        cap, sink, lse: see `kvpass.calls.Call`.
        sees: the keys and values as the call is given them.
        made: the keys and values that attention sees, [B, Ha, past + q, D], where they or the mask are computed from
            the grown ones; None where attention sees these and nothing else reads them.
        readers: later attention calls on the same cache, such as those of layers that share it.
    """

    call: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    past_key: fx.Node | None
    past_value: fx.Node | None
    grown_key: fx.Node
    grown_value: fx.Node
    mask: fx.Node | None
    scale: float
    causal: bool
    keys_out: int
    values_out: int
    window: int | None = None
    cap: float | None = None
    sink: fx.Node | None = None
    lse: fx.Node | None = None
    made: tuple[fx.Node, fx.Node] | None = None
    sees: tuple[fx.Node, fx.Node] | None = None
    readers: tuple[AttentionSite, ...] = ()

    @property
    def all(self) -> tuple[AttentionSite, ...]:
        """The site and its readers."""
        return (self, *self.readers)

    @property
    def has_row_masks(self) -> bool:
        """Whether the rows of a batch have masks of their own."""
        return self.mask is not None and value(self.mask).ndim == 4 and expr(value(self.mask).shape[0]) != 1

    def computed(self) -> AttentionSite:
        """The same, with what it attends to taken as computed from the cache."""
        return dataclasses.replace(self, made=self.made or self.sees)

    @property
    def attended_key(self) -> fx.Node:
        """The keys that attention sees, [B, Ha or Hkv, past + q, D]."""
        return self.made[0] if self.made else self.grown_key

    @property
    def queries(self) -> Any:
        """q, possibly symbolic."""
        return value(self.query).shape[2]

    def moved(self, to: dict[fx.Node, fx.Node]) -> AttentionSite:
        """The same site in a copy of the graph."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        there: dict[str, Any] = {name: to[v] if isinstance(v, fx.Node) else v for name, v in fields.items()}
        for name in ("made", "sees"):
            pair = fields[name]
            there[name] = pair and (to[pair[0]], to[pair[1]])
        there["readers"] = tuple(reader.moved(to) for reader in self.readers)
        return AttentionSite(**there)


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of one attention call or cache update: a site, or why it is none.

    Attributes:
        node: the attention call, or the cache update that feeds none.
        site: what can be rewritten.
        refusal: why an update cannot be rewritten; None beside no site means that no cache is involved.
    """

    node: fx.Node
    site: AttentionSite | None = None
    refusal: str | None = None


class _Refused(Exception):
    pass


def find(gm: fx.GraphModule, carried: set[fx.Node]) -> list[Found]:
    """Every attention call of the graph, and every cache update that feeds none.

    Args:
        carried: the placeholders whose value is a cache handle of ours.
    """
    outputs = {node: place for place, node in enumerate(graphs.results(gm.graph)) if isinstance(node, fx.Node)}
    made = calls.find(gm)
    ends = {end for call in made for end in (call.node, call.lse) if end is not None}
    updates = [node for node in gm.graph.nodes if _grows_a_cache(node, outputs)]
    found: list[Found] = []
    for call in made:
        known = {f.site.keys_out: f.site.values_out for f in found if f.site}
        found.append(_examine(call, ends, outputs, updates, carried, known))
    used = {node for f in found if f.site for node in (f.site.grown_key, f.site.grown_value)}
    refused_at = {f.node for f in found if f.refusal}
    for update in updates:
        if update not in used and not any(update in ancestors(call) for call in refused_at):
            refusal = "the cache that is grown here feeds no attention call that can be followed"
            found.append(Found(update, refusal=refusal))
    found += [Found(node, refusal=_IN_PARTS) for node in gm.graph.nodes if _grows_in_parts(node, outputs)]
    found += _unused_handles(found, carried)
    return found


_IN_PARTS = "a cache grows here by a concatenation of more than a past and new tokens"


def _grows_in_parts(node: fx.Node, outputs: dict[fx.Node, int]) -> bool:
    """Whether an input [B, H, S, D] is returned with more than one tensor behind it."""
    if node.target not in (torch.cat, torch.concat) or node not in outputs or value(node).ndim != 4:
        return False
    given = operators.bound(node)
    first, *others = given["tensors"]
    return len(others) > 1 and given.get("dim") in (-2, 2) and first.op == "placeholder"


def by_cache(found: list[Found]) -> list[AttentionSite]:
    """The first site of each cache, with the others on that cache as its readers.

    If one of them attends to what is computed from the cache, so do all.
    """
    sites: dict[int, list[AttentionSite]] = {}
    for f in found:
        if f.site is not None:
            sites.setdefault(f.site.keys_out, []).append(f.site)
    made = {place for place, group in sites.items() if any(site.made for site in group)}
    alike = {place: [site.computed() if place in made else site for site in group] for place, group in sites.items()}
    return [dataclasses.replace(first, readers=tuple(rest)) for first, *rest in alike.values()]


def _unused_handles(found: list[Found], carried: set[fx.Node]) -> list[Found]:
    used = {past for f in found if f.site for past in (f.site.past_key, f.site.past_value)}
    if any(f.refusal for f in found):
        return []
    lost = [node for node in carried - used if any(not _about_shape(user) for user in node.users)]
    return [
        Found(next(iter(node.users)), refusal="a kvpass cache is used here in a way that is not an attention call")
        for node in lost[:1]
    ]


def _about_shape(node: fx.Node) -> bool:
    return not isinstance(value(node), torch.Tensor)


def _grows_a_cache(node: fx.Node, outputs: dict[fx.Node, int]) -> bool:
    """A concatenation of a past and new tokens along dimension -2 of [B, H, S, D], stored or of an empty past."""
    parts = _cat_parts(node)
    return parts is not None and (value(parts[0]).ndim == 1 or _stored(node, outputs) is not None)


def _stored(grown: fx.Node, outputs: dict[fx.Node, int]) -> tuple[int, int | None] | None:
    """Where the graph returns a grown cache, and of how many of its last tokens if not of all."""
    if grown in outputs:
        return outputs[grown], None
    for user in grown.users:
        count = _last_tokens(user)
        if user in outputs and count is not None:
            return outputs[user], count
    return None


def _last_tokens(node: fx.Node) -> int | None:
    """n, if a node is x[:, :, -n:] of [B, H, S, D]."""
    if graphs.name_of(node) != "getitem" or not isinstance(node.args[1], tuple):
        return None
    whole = slice(None)
    before, along, after = node.args[1][:2], node.args[1][2:3], node.args[1][3:]
    cut: Any = along[0] if along else whole
    others = all(part == whole for part in (*before, *after))
    if not others or not isinstance(cut, slice) or not isinstance(cut.start, int) or cut.start >= 0:
        return None
    return -cut.start if cut.stop is None and cut.step is None else None


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


def _examine(
    call: Call,
    ends: set[fx.Node],
    outputs: dict[fx.Node, int],
    updates: list[fx.Node],
    carried: set[fx.Node],
    known: dict[int, int],
) -> Found:
    behind = ancestors(call.key, stop=ends) | ancestors(call.value, stop=ends)
    near = _unprojected(call.key, ends) | _unprojected(call.value, ends)
    otherwise = [node for node in near if node not in updates and _grows_otherwise(node, outputs)]
    kept = [node for node in near if node.op == "placeholder" or node in outputs]
    otherwise += [user for node in kept for user in node.users if _overwrites(user, node)]
    cached = behind.intersection(updates) or behind & carried or otherwise
    try:
        if otherwise:
            line = graphs.source_line(otherwise[0])
            raise _Refused(
                f"its cache is updated at {line} in a way that is not a concatenation along dimension -2 of "
                "[B, H, S, D]; a preallocated cache such as StaticCache has to give way to a growing one: leave out "
                "cache_implementation='static', or pass a DynamicCache or none, as kvpass has fixed slots of its own"
            )
        site = _site(call, ends, outputs, known)
    except _Refused as why:
        if cached or _leaves_otherwise(call, outputs):
            return Found(call.node, refusal=str(why))
        return Found(call.node, refusal=torn.why(call, ends))
    return Found(call.node, site=site)


def _leaves_otherwise(call: Call, outputs: dict[fx.Node, int]) -> bool:
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
            if graphs.name_of(current) not in _PROJECTIONS:
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
    return graphs.writes(user) and user.args[0] is cache and is_tensor(cache) and value(cache).ndim >= 3


def _site(call: Call, ends: set[fx.Node], outputs: dict[fx.Node, int], known: dict[int, int]) -> AttentionSite:
    made = None
    try:
        grown_key, past_key, key = _origin(call.key, outputs)
        grown_value, past_value, val = _origin(call.value, outputs)
    except _Refused:
        stored = _stored_behind(call, ends, outputs)
        if stored is None:
            raise
        (grown_key, past_key, key), (grown_value, past_value, val) = stored
        made = (call.key, call.value)
    if (past_key is None) != (past_value is None):
        raise _Refused("the key has a past and the value has none, or the other way round")
    if made is None and call.mask is not None and not ancestors(call.mask, ends).isdisjoint((grown_key, grown_value)):
        made = (call.key, call.value)
    cached = [expr(value(node).shape[2]) for node in (grown_key, grown_value)]
    if any(value(node).ndim == 4 and expr(value(node).shape[2]) not in cached for node in made or ()):
        raise _Refused("there are not as many keys and values attended to as are cached")
    if past_key is None and _from_elsewhere(call):
        raise _Refused("its keys are made of other tokens than its queries")
    keys_out, window = _place(grown_key, outputs)
    values_out, value_window = _place(grown_value, outputs)
    if window != value_window:
        raise _Refused(f"the last {window} keys are stored and the last {value_window} values")
    _check(call, key, past_key, reader=keys_out in known)
    if keys_out == values_out or known.get(keys_out, values_out) != values_out or keys_out in known.values():
        raise _Refused("one cached tensor serves as keys and as values")
    return AttentionSite(
        call.node, call.query, key, val, past_key, past_value, grown_key, grown_value, call.mask, call.scale,
        call.causal, keys_out, values_out, window, call.cap, call.sink, call.lse, made, (call.key, call.value),
    )  # fmt: skip


def _from_elsewhere(call: Call) -> bool:
    """Whether queries come from tokens that keys do not come from: cross-attention, whose keys no step adds to."""
    return not _tokens_behind(call.query) <= _tokens_behind(call.key)


def _tokens_behind(node: fx.Node) -> set[fx.Node]:
    """The inputs that bring tokens in: what is looked up in tables, and hidden states."""
    behind = ancestors(node)
    looked_up = [n.args[0] for n in behind if n.target is torch.nn.functional.embedding and is_tensor(n.args[0])]
    found = {p for n in looked_up for p in ancestors(n) if p.op == "placeholder" and is_tensor(p)}  # type: ignore[arg-type]
    hidden = [p for p in behind if p.op == "placeholder" and is_tensor(p) and value(p).ndim == 3]
    return found | {p for p in hidden if value(p).is_floating_point() and not isinstance(value(p), torch.nn.Parameter)}


Origin = tuple[fx.Node, fx.Node | None, fx.Node]
"""What is stored, the past in it (None for an empty one) and the new tokens."""


def _stored_behind(call: Call, ends: set[fx.Node], outputs: dict[fx.Node, int]) -> tuple[Origin, Origin] | None:
    """The two caches that key and value are computed from, in the order in which the model's code grows them."""
    near = graphs.behind([call.key, call.value], ends, call.node)
    updates = [node for node in call.node.graph.nodes if node in near and _grows_a_cache(node, outputs)]
    grown = [node for node in updates if _stored(node, outputs) is not None]
    if len(grown) != 2:
        return None
    first, second = (_origin(node, outputs) for node in grown)
    return first, second


def _place(grown: fx.Node, outputs: dict[fx.Node, int]) -> tuple[int, int | None]:
    stored = _stored(grown, outputs)
    if stored is None:
        raise _Refused("the grown cache is not returned by the graph")
    return stored


def _check(call: Call, key: fx.Node, past: fx.Node | None, reader: bool) -> None:
    query = call.query
    if call.dropout:
        raise _Refused(f"attention with dropout {call.dropout}: the model is in training mode")
    if not value(key).is_floating_point():
        raise _Refused(f"the cache holds {value(key).dtype}, which is not floating-point")
    if value(query).ndim != 4 or value(key).ndim != 4:
        raise _Refused(f"queries of shape {tuple(value(query).shape)} are not [B, Hq, q, D]")
    if not reader and expr(value(query).shape[2]) != expr(value(key).shape[2]):
        raise _Refused("there are not as many new keys as queries")
    if past is not None and call.causal:
        raise _Refused("is_causal with a past aligns the mask to the first key")


def _origin(node: fx.Node, outputs: dict[fx.Node, int]) -> Origin:
    """Walk from a key or value to the cache, and see that its heads, tokens and features are those of the cache."""
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
                f"its key or value comes from {graphs.name_of(node)!r} ({graphs.source_line(node)}), which is no "
                "concatenation with the past, and is not computed from one cached pair"
            )
        node = seen_output
        chain = chain[: chain.index(node)] if node in chain else chain
    _check_heads(attended, node, chain)
    if parts is None:
        return node, None, node
    past, new = parts
    empty = value(past).ndim != 4 or expr(value(past).shape[2]) == 0
    return node, None if empty or past.op != "placeholder" else past, new


def _check_heads(attended: fx.Node, grown: fx.Node, chain: list[fx.Node]) -> None:
    """Each query head's keys must be those of its group: run the operations on numbered elements and see.

    Args:
        chain: the operations from the grown cache to what is attended to, the last one first.
    """
    shape = operators.concrete(value(grown).shape)
    numbered = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    dtype, made = value(grown).dtype, numbered
    for node in reversed(chain):
        if not value(node).dtype == dtype and not is_as_wide(value(node).dtype, dtype):
            raise _Refused(f"what is cached in {dtype} is attended to in {value(node).dtype}, which loses digits")
        try:
            made = operators.run_on(node, {node.all_input_nodes[0]: made}) if known_name(node) in MOVES else made
        except (RuntimeError, TypeError, IndexError):
            line = graphs.source_line(node)
            raise _Refused(f"{line}: {known_name(node)!r} on keys or values is not understood") from None
    rows, _, tokens, width = shape
    if made.shape[-2:] != (tokens, width) or made.numel() % numbered.numel():
        raise _Refused(f"keys or values of shape {tuple(value(grown).shape)} are cached, others are attended to")
    groups = made.numel() // numbered.numel()
    if not torch.equal(made.reshape(rows, -1, tokens, width), numbered.repeat_interleave(groups, 1)):
        raise _Refused(
            "the keys or values of a head are not those that are cached for its group of query heads: rows, heads, "
            f"tokens or features are moved between the cache and {graphs.source_line(attended)}"
        )


TURNED_APART = "the query is not turned by the positions that turn the key"
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
        """Whether the rows of a batch need positions of their own and there is no dimension for them, as in [1, q]."""
        position, queries = value(self.position), expr(value(site.query).shape[2])
        if position.ndim == 1:
            return site.has_row_masks
        return bool(expr(position.shape[0]) != 1 and sympy.simplify(expr(position.numel()) - queries) == 0)

    def counts_tokens(self, site: AttentionSite) -> bool:
        """Whether a token has one position, and not several as in images."""
        rows, queries = (expr(value(site.query).shape[dim]) for dim in (0, 2))
        count = expr(value(self.position).numel())
        return bool(sympy.simplify(count - queries) == 0 or sympy.simplify(count - rows * queries) == 0)


def find_rotary(gm: fx.GraphModule, site: AttentionSite) -> Rotary | None:
    """The rotary embedding of a site's key, or None if its key does not depend on positions.

    `raw` is the latest key on the way such that all that follows it depends on positions and on nothing
    else that the tokens have a say in.
    """
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    ends = _boundaries(gm.graph)
    behind = ancestors(site.key, stop=ends)
    shape = [expr(size) for size in value(site.key).shape]
    candidates = [
        n for n in behind if is_tensor(n) and n is not site.key and [expr(s) for s in value(n).shape] == shape
    ]
    for raw in sorted(candidates, key=order.__getitem__, reverse=True):
        rest = ancestors(site.key, stop={raw, *ends})
        positions = [n for n in rest if _turns_into_an_angle(n, rest)]
        if len(positions) == 1 and not _carries_tokens(ancestors(site.key, stop={raw}) - ancestors(positions[0]), ends):
            return Rotary(raw, positions[0])
    return None


def _boundaries(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of attention calls: what comes before them is another matter."""
    return {node for node in graph.nodes if calls.is_boundary(node)}


def positions_of(rotary: Rotary, site: AttentionSite) -> list[fx.Node]:
    """The positions that turn the site's key and its queries: none if some query is not turned by the key's.

    A model that turns queries and keys one by one makes what it needs of the same positions twice.
    """
    ends, turns_key = _boundaries(site.call.graph), reshaped(rotary.position)
    found = [rotary.position]
    for each in site.all:
        behind = ancestors(each.query, stop=ends)
        angles = [node for node in behind if _turns_into_an_angle(node, behind)]
        alike = [node for node in angles if _same(reshaped(node), turns_key)]
        if not alike:
            return []
        found += alike
    return list(dict.fromkeys(found))


def reshaped(node: fx.Node) -> fx.Node:
    """What a tensor is another shape, or another dtype, of."""
    while known_name(node) in MOVES | SAME_VALUE | {"long", "int"} and is_tensor(node.args[0]) and _takes_all(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def given_positions(rotary: Rotary, site: AttentionSite) -> list[fx.Node]:
    """The inputs that are the positions which turn a site's key and queries."""
    found = [reshaped(position) for position in positions_of(rotary, site)]
    return [node for node in dict.fromkeys(found) if node.op == "placeholder"]


def _takes_all(node: fx.Node) -> bool:
    """Whether an index, if the node is one, takes every element."""
    if graphs.name_of(node) != "getitem":
        return True
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)


def _same(one: Any, other: Any) -> bool:
    """Whether two nodes, or arguments of nodes, are the same computation."""
    if isinstance(one, fx.Node) and isinstance(other, fx.Node) and one is not other:
        if graphs.is_size(one) and graphs.is_size(other):
            return bool(expr(one) == expr(other))
        made = one.op == other.op and one.op in ("call_function", "call_method") and one.target == other.target
        return made and one.kwargs == other.kwargs and _same(one.args, other.args)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _turns_into_an_angle(node: fx.Node, among: set[fx.Node]) -> bool:
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


def iotas(nodes: Iterable[fx.Node], sizes: graphs.Sizes, window: int | None = None) -> list[fx.Node]:
    """The aranges that count the keys: past and new tokens, from zero.

    Args:
        window: the past tokens that the model stores, if they are fewer than it has seen.  Its keys are then
            counted by an arange of a fixed size that is moved by a size that grows.
    """
    counts = [n for n in nodes if n.target is torch.arange and len(n.args) == 1]
    if window is None:
        return [n for n in counts if sizes.is_total(n.args[0])]
    fixed = [n for n in counts if not sizes.grows(n.args[0]) and sizes.fixed(n.args[0]) == window + sizes.queries]
    return [n for n in fixed if any(_moves(user, sizes) for user in n.users)]


def _moves(node: fx.Node, sizes: graphs.Sizes) -> bool:
    """Adds a size that grows with the cache."""
    sums = [arg for arg in node.args if graphs.is_size(arg) and sizes.grows(arg)]
    return bool(sums) and graphs.name_of(node) in ("add", "iadd")


def token_inputs(nodes: set[fx.Node], actual: dict[fx.Node, Any], sizes: graphs.Sizes) -> dict[fx.Node, int]:
    """The inputs among the nodes that may have an entry for every token, and the dimension that runs over them.

    That is what grows along one dimension.  Whether the entries are the tokens' is for the uses to show: a lookup by
    each key's place, or an operation that aligns the dimension with the keys.

    Args:
        actual: the value of each placeholder in this call.
    """
    found: dict[fx.Node, int] = {}
    for node in nodes:
        growing = (
            [d for d, size in enumerate(value(node).shape) if sizes.grows(size)] if _is_input(node, actual) else []
        )
        if len(growing) == 1:
            found[node] = growing[0]
    return found


def _is_input(node: fx.Node, actual: dict[fx.Node, Any]) -> bool:
    given = actual.get(node)
    return node.op == "placeholder" and isinstance(given, torch.Tensor) and not isinstance(given, torch.nn.Parameter)
