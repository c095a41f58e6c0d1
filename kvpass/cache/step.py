"""Define what one attention layer does with new tokens: write, attend, observe, evict.

`decode_step` takes one token and is static; the rewrite traces it and splices it into the decode graph.  `extend_step`
takes a chunk and leaves the slots unchanged; `kvpass.cache.admission.admit` then admits the chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvpass.cache.admission import align, first_values, rescored
from kvpass.cache.slots import FREE, STEADY, AnySlots, ClassedSlots, Layout, Slots, of_heads, rows_at
from kvpass.cache.statistics import StatisticsSpec, in_one_operator, statistics
from kvpass.fx.precision import FILLED, upcast
from kvpass.lowering.attend import LOWEST, Rope, Rotation, UnknownQueries, attend, by_kernel, capped, scores
from kvpass.lowering.attention_statistics import regrouped
from kvpass.lowering.formats import Rows, Sections, plain
from kvpass.policies.base import Policy
from kvpass.policies.protocols import Aligning, Merging
from kvpass.policies.ranking import LATE, rank_of
from kvpass.policies.types import Attention, State, Tokens


class Mask(Protocol):
    """The model's own mask as a function of the keys' indices."""

    def __call__(self, index: Tensor, position: Tensor, facts: list[Tensor]) -> Tensor:
        """Return the mask, bool or additive, [B, Hkv or 1, G or 1, q, N].

        Args:
            index, position: int64 [B, H', N], the keys' indices in the padded sequence and positions among real tokens.
            facts: tensors that the model computes from the stored rows of each key.
        """


Rotate = Callable[[Sections, Tensor], list[Tensor]]
"""The model's own rotary embedding: keys [B, Hkv, N, D] at positions int64 [B, H', N], in sections of D."""


ComputeKeys = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, list[Tensor]]]
"""The model's computation of keys and values from its cache.

It takes stored rows [B, Hkv, N, D'] of K and of V, and returns keys and values [B, Ha, N, D] and facts [N, ...] for the
mask.
"""


@dataclasses.dataclass(frozen=True)
class Site:
    """The properties of one attention call in the graph.

    Attributes:
        scale: the factor on the products of queries and keys.
        mask: the model's mask on slots, or None.
        rotate: the model's rotary embedding, or None if keys are stored rotated or have none.
        rope: the same embedding for kernels, without ranks, if they can apply it.
        cap, sink_logit: see `kvpass.capture.canonical.attention`; the latter is [B or 1, Hq, q or 1, 1].
        weights: the policy's weights as inputs of the graph; empty if they are read from the policy.
        compute_keys: computes keys and values from the stored rows, or None if these are the keys and values.
        lse: whether the model also reads the log-sum-exp of the logits.
        write_index: the slots to write to, [B, H'], if they are not those of `slots.free`.
        hidden: the logit of keys that a bool mask hides; None if they are left out.
        decomposed: whether the model spells out the softmax, which gives NaN for a query without keys.
        knows_padding: whether padding is known and not cached.
    """

    scale: float
    mask: Mask | None = None
    rotate: Rotate | None = None
    rope: Rope | None = None
    weights: tuple[Tensor, ...] = ()
    cap: float | None = None
    sink_logit: Tensor | None = None
    compute_keys: ComputeKeys | None = None
    lse: bool = False
    write_index: Tensor | None = None
    hidden: float | None = None
    decomposed: bool = False
    knows_padding: bool = False

    def unknown_queries(self, slots: Slots, valid: Tensor, bias: torch.dtype | None) -> UnknownQueries | None:
        """Return the queries whose output may be unknown, or None if there are none.

        A model that adds a bias in half precision loses logits, or digits of them, next to numbers that hide.  Sums
        here are wider.  That changes no query that sees a key.

        Args:
            valid: bool [B, q], false for padding.
            bias: the dtype of the mask's bias, None without one.
        """
        if (
            self.mask is None
            or self.sink_logit is not None
            or not (self.decomposed or (self.knows_padding and bias is not None))
        ):
            return None
        real = valid[:, None, None, :, None]  # not padding: its output must be a number
        padded = real & (slots.length != slots.seen)[:, None, None, None, None]
        no_query = torch.zeros_like(real)
        rounded = self.decomposed and bias in (torch.float16, torch.bfloat16)
        return UnknownQueries(
            real if self.decomposed else no_query, padded if self.knows_padding else no_query, real if rounded else None
        )

    def sink_logits(self, heads: int) -> Tensor | None:
        """Return the sink's logits [B or 1, Hkv, G, q or 1, 1]."""
        return None if self.sink_logit is None else torch.unflatten(self.sink_logit, 1, (heads, -1))


class Attended(NamedTuple):
    """The results of attention, and the mask that it ran under.

    Attributes:
        output: [B, Hq, q, Dv].
        masks: for each class of heads, the visible keys and the model's bias, if any: [B, Ha or 1, ., q, N].
        lse: the log-sum-exp [B, Hq, q] in the dtype of `upcast`, if the model reads it.
    """

    output: Tensor
    masks: tuple[tuple[Tensor, Tensor | None], ...]
    lse: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _ClassCall:
    """The part of a call on slots that one class of heads does, as if it were a layer of its own."""

    layout: Layout
    site: Site
    slots: Slots
    query: Tensor
    key: Tensor
    value: Tensor


def _class_calls(
    layout: Layout, site: Site, slots: ClassedSlots, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[_ClassCall]:
    """Yield the call of each class, with the heads that each row has in it."""

    def of_query_heads(x: Tensor, heads: Tensor) -> Tensor:
        return of_heads(torch.unflatten(x, 1, (layout.heads, -1)), heads).flatten(1, 2)

    for each, part, where in zip(layout.parts, slots.parts, layout.head_slices, strict=True):
        heads, sink = slots.order[:, where], site.sink_logit
        if sink is not None:
            sink = of_query_heads(sink.expand(heads.shape[0], -1, -1, -1), heads)
        own = dataclasses.replace(site, sink_logit=sink)
        rows = of_heads(key, heads), of_heads(value, heads)
        yield _ClassCall(each, own, part, of_query_heads(query, heads), *rows)


def _in_model_order(layout: Layout, slots: ClassedSlots, attended: list[Attended]) -> Attended:
    """Join the results of all classes, with the heads in the model's order."""

    def joined(results: list[Tensor]) -> Tensor:
        by_head = [torch.unflatten(x, 1, (part.heads, -1)) for x, part in zip(results, layout.parts, strict=True)]
        return of_heads(torch.cat(by_head, 1), slots.inverse).flatten(1, 2)

    sums = [each.lse for each in attended if each.lse is not None]
    masks = tuple(mask for each in attended for mask in each.masks)
    return Attended(joined([each.output for each in attended]), masks, joined(sums) if sums else None)


def decode_step(
    layout: Layout,
    site: Site,
    slots: AnySlots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    compact: bool = False,
) -> Attended:
    """Write one token to the free slot, attend, let the policy observe, and free the next slot.

    Args:
        slots: overwritten in place.
        query: [B, Hq, 1, D]; key: [B, Hkv, 1, D], as stored; value: [B, Hkv, 1, Dv].
        valid: bool [B], false for a row whose token is padding.
        compact: build the graph that compacts, which the host runs when `Policy.tick` says so.
    """
    if isinstance(slots, ClassedSlots):
        calls = _class_calls(layout, site, slots, query, key, value)
        steps = [decode_step(x.layout, x.site, x.slots, x.query, x.key, x.value, valid, compact) for x in calls]
        return _in_model_order(layout, slots, steps)
    policy = layout.policy
    new = (Rows.of(layout.key_format, key), Rows.of(layout.value_format, value))
    tokens, index = _with_new_token(layout, slots, new, valid)
    _write(
        slots, new, slots.free if site.write_index is None else site.write_index, valid if policy.overwrites else None
    )
    view = _QueryView.of(layout, site, slots, tokens, index, query, valid)
    attended, probs, logits = view.attend(with_logits=bool(policy.statistics))
    attention = _single_query_statistics(layout, probs, valid)
    if "logits" in policy.statistics and (compact or "older_peak" in policy.statistics):
        assert logits is not None
        seen_logits = logits if view.policy_bias is None else view.logits()  # without the policy's own bias
        seen_logits = regrouped(seen_logits, layout.heads)[..., 0, :].float().clamp_min(LOWEST)
        attention = dataclasses.replace(attention, logits=seen_logits)
    tokens, victim = (_compact if compact else _evict)(layout, site, slots, tokens, attention)
    if policy.aligns == ("compact" if compact else "step"):
        tokens = _realign(layout, site, slots, tokens)
    _commit(slots, tokens, index, victim)
    return attended


def read_step(
    layout: Layout, site: Site, slots: AnySlots, query: Tensor, key: Tensor, value: Tensor, valid: Tensor
) -> Attended:
    """Attend to the tokens of an earlier `decode_step`, for a layer that shares its cache.

    Args:
        slots: K and V after the step, and all other tensors as before it.
        query: [B, Hq, 1, D]; key, value: the step's, [B, Hkv, 1, D] and [B, Hkv, 1, Dv]; valid: bool [B].
    """
    if isinstance(slots, ClassedSlots):
        calls = _class_calls(layout, site, slots, query, key, value)
        steps = [read_step(x.layout, x.site, x.slots, x.query, x.key, x.value, valid) for x in calls]
        return _in_model_order(layout, slots, steps)
    new = (Rows.of(layout.key_format, key), Rows.of(layout.value_format, value))
    tokens, index = _with_new_token(layout, slots, new, valid)
    return _QueryView.of(layout, site, slots, tokens, index, query, valid).attend(with_logits=False)[0]


@dataclasses.dataclass(frozen=True)
class _QueryView:
    """The slots as one query attends to them.

    Attributes:
        query: [B, Ha, ., 1, D], by the heads of the keys; key, value: rows [B, Ha, C, D] and [B, Ha, C, Dv].
        mask, bias: broadcastable to [B, Ha, ., 1, C]; the bias is the model's.
        policy_bias: the policy's bias, broadcastable likewise.
    """

    site: Site
    query: Tensor
    key: Rows
    value: Rows
    mask: Tensor
    bias: Tensor | None
    policy_bias: Tensor | None
    rotate: Rotation | None
    rope: Rope | None
    unknown_queries: UnknownQueries | None

    @staticmethod
    def of(
        layout: Layout, site: Site, slots: Slots, tokens: Tokens, index: Tensor, query: Tensor, valid: Tensor
    ) -> _QueryView:
        grouped = query.view(query.shape[0], layout.heads, -1, *query.shape[2:])  # [B, Hkv, G, 1, D]
        grouped = with_logit_scale(layout.policy, grouped, tokens.live.sum(-1)[:, :1])
        live = tokens.live[:, :, None, None]  # [B, H', 1, 1, C]
        key, value, facts = _attended_rows(layout, site, *_stored_rows(layout, site, slots, tokens))
        mask, bias = with_mask(live, site.mask(index, tokens.position, facts) if site.mask else None, site.hidden)
        policy_bias = layout.policy.bias(tokens, grouped.shape[2])
        policy_bias = None if policy_bias is None else policy_bias[..., None, :]
        heads = key.shape[1]
        if heads != layout.heads:  # keys are computed from stored rows
            grouped, mask = regrouped(grouped, heads), _for_heads(mask, heads)
            bias, policy_bias = (None if b is None else _for_heads(b, heads) for b in (bias, policy_bias))
        rope = None if site.rope is None else dataclasses.replace(site.rope, rank=tokens.rank)
        unknown = site.unknown_queries(slots, valid[:, None], None if bias is None else bias.dtype)
        return _QueryView(site, grouped, key, value, mask, bias, policy_bias, _rotation(site, tokens), rope, unknown)

    def attend(self, with_logits: bool) -> tuple[Attended, Tensor | None, Tensor | None]:
        """Attend with the query; `with_logits` adds probabilities and logits, [B, Ha, ., 1, C] in the dtype of
        `upcast`.
        """
        site = self.site
        with_logits = with_logits or site.lse
        options: dict[str, Any] = dict(
            scale=site.scale, mask=self.mask, rotate=self.rotate, cap=site.cap, with_logits=with_logits
        )
        options |= dict(
            bias=added(self.bias, self.policy_bias),
            sink_logit=site.sink_logits(self.key.shape[1]),
            rope=self.rope,
            blank=self.unknown_queries,
        )
        output, probs, logits = attend(self.query, self.key, self.value, **options)
        output = output.flatten(1, 2)  # not later: the compiler moves a product to its first user
        return Attended(output, ((self.mask, self.bias),), _log_sum_exp(site, logits)), probs, logits

    def logits(self) -> Tensor:
        """Return the logits of the keys before the softmax, [B, Ha, ., 1, C] in the dtype of `upcast`."""
        logits = capped(scores(self.query, self.key, scale=self.site.scale, rotate=self.rotate), self.site.cap)
        return torch.where(self.mask, logits if self.bias is None else logits + self.bias.to(logits.dtype), -torch.inf)


def _log_sum_exp(site: Site, logits: Tensor | None) -> Tensor | None:
    """Return the log-sum-exp [B, Hq, q] of logits [B, Ha, ., q, N], if the model reads it."""
    return logits.logsumexp(-1).flatten(1, 2) if site.lse and logits is not None else None


def _for_heads(mask: Tensor, heads: int) -> Tensor:
    """Regroup a mask or bias [B, Hkv or 1, G or 1, ...] for another number of KV heads."""
    return mask if mask.shape[1] * mask.shape[2] == 1 else regrouped(mask, heads)


def _with_new_token(layout: Layout, slots: Slots, new: tuple[Rows, Rows], valid: Tensor) -> tuple[Tokens, Tensor]:
    """Return the metadata with the new token in the free slot, and the indices [B, H', C] with it."""
    is_new = _one_hot(slots.free, layout.capacity) & valid[:, None, None]  # [B, H', C]
    position = torch.where(is_new, slots.seen[:, None, None], slots.position)
    index = torch.where(is_new, slots.length[:, None, None], slots.index)
    initial, state = first_values(layout.policy, *new), dict(slots.state)
    for name in layout.policy.state():
        state[name] = torch.where(is_new, initial.get(name, torch.zeros_like(state[name])), state[name])
    rank = None
    if layout.tracks_rank:
        rank = _ranks_without(slots.rank, is_new & (slots.position >= 0)) if layout.policy.overwrites else slots.rank
        rank = torch.where(is_new, (position >= 0).sum(-1, keepdim=True) - 1, rank)
    seen = (slots.seen + valid)[:, None, None]
    budget = layout.budget_in(state)
    return Tokens(position, seen, state, budget, layout.capacity, rank, layout.spread), index


def _one_hot(slot: Tensor, capacity: int) -> Tensor:
    """Return bool [B, H', C], true at `slot` [B, H']."""
    return torch.arange(capacity, device=slot.device) == slot[..., None]


def _ranks_without(rank: Tensor, evicted: Tensor) -> Tensor:
    """Return ranks [B, H', C] without the token at `evicted`, at most one per head."""
    evicted_rank = torch.where(evicted, rank, LATE).amin(-1, keepdim=True)
    return torch.where(rank > evicted_rank, rank - 1, rank)


def _write(slots: Slots, new: tuple[Rows, Rows], index: Tensor, selection: Tensor | None) -> None:
    """Write one row of K and of V at slot `index` [B, H'] of each head, in the rows `only` [B]."""
    indices = rows_at(index, new[0].shape[1])
    selected = None if selection is None else selection[:, None, None]
    slots.key.put(indices, new[0], selected)
    slots.value.put(indices, new[1], selected)


def with_logit_scale(policy: Policy, query: Tensor, count: Tensor) -> Tensor:
    """Scale queries [B, ...] by the policy's factor on their logits for `count` [B, 1] tokens."""
    factor = policy.logit_scale(count)
    return query if factor is None else (query * factor.view(-1, *[1] * (query.ndim - 1))).to(query.dtype)


def _rotation(site: Site, tokens: Tokens) -> Rotation | None:
    rotate, rank = site.rotate, tokens.rank
    if rotate is None or rank is None:
        return None
    return lambda keys: rotate(keys, rank)


def with_mask(live: Tensor, mask: Tensor | None, hidden: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the bool mask and the additive bias that `live` and the model's own mask give together.

    A free slot is left out.  A key that the model hides by a finite number stays: a query without other keys attends to
    it.
    """
    if mask is None or mask.dtype != torch.bool:
        return live, mask
    if hidden is None or hidden == -torch.inf:
        return live & mask, None
    return live, torch.where(mask, 0.0, FILLED)


def added(bias: Tensor | None, policy_bias: Tensor | None) -> Tensor | None:
    """Add the model's bias [B, ., ., q, N] and the policy's [B, ., ., 1, N]."""
    if policy_bias is None:
        return bias
    return policy_bias if bias is None else upcast(bias) + policy_bias


def _single_query_statistics(layout: Layout, probs: Tensor | None, valid: Tensor) -> Attention:
    """Return the statistics of one query from its probabilities."""
    if probs is None:
        return Attention(queries=valid.long()[:, None, None], spread=layout.spread)
    row = regrouped(probs, layout.heads)[..., 0, :].float() * valid[:, None, None, None]  # [B, Hkv, G, C]
    return Attention(row, row.square(), row, row, queries=valid.long()[:, None, None], spread=layout.spread)


def _evict(layout: Layout, site: Site, slots: Slots, tokens: Tokens, attention: Attention) -> tuple[Tokens, Tensor]:
    """Let the policy observe and evict one token; return the other tokens and the next slot to write [B, H']."""
    policy = layout.policy
    tokens = tokens.updated(policy.observe(tokens, attention))
    if policy.interval == 1:
        tokens = rescored(layout, tokens, slots.key, slots.value, site.weights)
    victim = layout.eviction.victim(tokens)
    if policy.overwrites or not policy.evicts:
        return tokens, victim
    evicted = _one_hot(victim, layout.capacity)
    rest = dataclasses.replace(
        tokens,
        position=torch.where(evicted, FREE, tokens.position),
        rank=None if tokens.rank is None else _ranks_without(tokens.rank, evicted & tokens.live),
    )
    if policy.merges:
        rest = rest.updated(_merge_victim(layout, slots, rest, victim, (evicted & tokens.live).any(-1, keepdim=True)))
    return rest, victim


def _merge_victim(layout: Layout, slots: Slots, rest: Tokens, victim: Tensor, valid: Tensor) -> State:
    """Merge the victim's K and V into one row of each head; return the changes to the state."""
    heads, eviction = slots.key.shape[1], layout.eviction
    evicted = rows_at(victim, heads)
    assert isinstance(eviction, Merging)
    merge = eviction.merge_evicted(rest, slots.key.read(), slots.key.at(evicted)[:, :, None], valid)
    into = rows_at(merge.into[..., 0], heads)
    for rows in (slots.key, slots.value):
        merged = merge.own * upcast(rows.at(into)) + merge.weight * upcast(rows.at(evicted))
        stored = Rows.of(rows.format, (merged / (merge.own + merge.share))[:, :, None])
        rows.put(into, stored, merge.share > 0)
    return merge.state


def _compact(layout: Layout, site: Site, slots: Slots, tokens: Tokens, attention: Attention) -> tuple[Tokens, Tensor]:
    """Let the policy observe and compact; return the remaining tokens and the next slot to write [B, H']."""
    policy = layout.policy
    observe = policy.observe_chunk if policy.interval == 1 else policy.observe  # with an interval a step like any other
    tokens = rescored(layout, tokens.updated(observe(tokens, attention)), slots.key, slots.value, site.weights)
    keep, changes = layout.eviction.compact(tokens)
    position = torch.where(keep, tokens.position, FREE)
    rank = rank_of(position) if layout.tracks_rank else None
    rest = dataclasses.replace(tokens.updated(changes), position=position, rank=rank)
    return rest, layout.eviction.victim(rest)


def _stored_rows(layout: Layout, site: Site, slots: Slots, tokens: Tokens) -> tuple[Rows, Rows]:
    """Return the stored keys and values, aligned if the policy aligns them at read."""
    if layout.policy.aligns != "read":
        return slots.key, slots.value
    weights = site.weights or layout.policy.weights()
    stored = slots.key.read_as(layout.dtype), slots.value.read_as(layout.dtype)
    assert isinstance(layout.policy, Aligning)
    key, value, _ = layout.policy.align(tokens, *stored, layout.layer, weights, 0)
    return plain(key), plain(value)


def _attended_rows(layout: Layout, site: Site, key: Rows, value: Rows) -> tuple[Rows, Rows, list[Tensor]]:
    """Return the keys, values and facts that attention and its mask read, from stored rows."""
    if site.compute_keys is None:
        return key, value, []
    keys, values, facts = site.compute_keys(key.read_as(layout.dtype), value.read_as(layout.dtype))
    return plain(keys), plain(values), facts


def _with_computed_keys(site: Site, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the keys, values and facts that attention reads, from cached rows and a chunk's."""
    return (key, value, []) if site.compute_keys is None else site.compute_keys(key, value)


def _realign(layout: Layout, site: Site, slots: Slots, tokens: Tokens) -> Tokens:
    """Store the rows that the policy aligns, in place, and return the tokens with its state."""
    weights = site.weights or layout.policy.weights()
    return tokens.updated(align(layout, slots, tokens, weights, 1))


def _commit(slots: Slots, tokens: Tokens, index: Tensor, victim: Tensor) -> None:
    if tokens.rank is not None:
        slots.rank.copy_(tokens.rank)
    slots.position.copy_(tokens.position)
    slots.index.copy_(torch.where(tokens.live, index, FREE))
    slots.free.copy_(victim)
    slots.seen.copy_(tokens.seen[:, 0, 0])
    slots.length.add_(1)
    for name, buffer in slots.state.items():
        if name not in STEADY:
            buffer.copy_(tokens.state[name])


def extend_step(
    layout: Layout, site: Site, slots: AnySlots, query: Tensor, key: Tensor, value: Tensor, valid: Tensor
) -> tuple[Attended, list[Tensor]]:
    """Attend with a chunk of queries to [slots, chunk], under the model's own mask.

    Args:
        slots: the slots, which stay unchanged.
        query: [B, Hq, q, D]; key: [B, Hkv, q, D], as attention reads it; value: [B, Hkv, q, Dv].
        valid: bool [B, q], false for padding.

    Returns:
        The results of attention, and the `kvpass.cache.statistics` of the chunk, with columns [slots, chunk].  These
        leave out the policy's own bias.  If the layout crops, their inputs follow: the query, keys, mask and sink of
        `kvpass.cache.statistics.StatisticsSpec`.  Slots in classes have these of every class.
    """
    if isinstance(slots, ClassedSlots):
        calls = _class_calls(layout, site, slots, query, key, value)
        steps = [extend_step(x.layout, x.site, x.slots, x.query, x.key, x.value, valid) for x in calls]
        return _in_model_order(layout, slots, [step for step, _ in steps]), [x for _, more in steps for x in more]
    policy, chunk = layout.policy, query.shape[2]
    held, rotate = slots.tokens(layout), site.rotate
    query = with_logit_scale(policy, query, held.live.sum(-1)[:, :1] + valid.sum(-1, keepdim=True))
    stored, rows = (part.read_as(layout.dtype) for part in _stored_rows(layout, site, slots, held))
    rotated = stored if rotate is None else torch.cat(rotate(Sections((stored,)), slots.rank), -1)
    keys = torch.cat([rotated, key.to(rotated.dtype)], 2)
    keys, values, facts = _with_computed_keys(site, keys, torch.cat([rows, value.to(rows.dtype)], 2))
    mask, bias = _chunk_mask(layout, site, slots, valid, facts)
    dtype = _dtype_of_bias(site, bias, query.dtype)
    full_mask = _per_head(_combined_mask(mask, bias, dtype), query, keys, layout.heads)
    common = (site.sink_logit, False, site.scale, site.cap, layout.heads, layout.spread)
    spec = StatisticsSpec(query, keys, full_mask, *common)
    policy_bias = policy.bias(held, query.shape[1] // layout.heads)
    by_library = site.cap is None and site.sink_logit is None and not site.lse
    if policy_bias is None and by_library and in_one_operator(policy, query, keys, values):
        output, *computed = statistics(policy, spec, valid, held.budget, values)
        attended = Attended(_with_unknown_outputs(site, slots, output, (full_mask, bias), valid), ((mask, bias),))
        return attended, [*computed, *_statistics_inputs(layout, spec)]
    attention_mask = full_mask
    if policy_bias is not None:
        policy_bias = torch.nn.functional.pad(policy_bias, (0, chunk))[..., None, :]  # [B, ., ., 1, C + q]
        attention_mask = _per_head(_combined_mask(mask, added(bias, policy_bias), dtype), query, keys, layout.heads)
    output, lse = _attend_chunk(site, query, keys, values, attention_mask)
    attended = Attended(_with_unknown_outputs(site, slots, output, (full_mask, bias), valid), ((mask, bias),), lse)
    if not policy.statistics:
        return attended, []
    return attended, [*statistics(policy, spec, valid, held.budget), *_statistics_inputs(layout, spec)]


def _statistics_inputs(layout: Layout, spec: StatisticsSpec) -> list[Tensor]:
    """Return the inputs of the statistics for a layout that crops, else []."""
    tensors = (spec.query, spec.key, spec.mask, spec.sink_logit)
    return [tensor for tensor in tensors if tensor is not None] if layout.crops else []


def _attend_chunk(
    site: Site, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Attend with a chunk; `mask` is bool or additive [B, Hq, Ha or 1, q, N].

    Returns:
        The output [B, Hq, q, Dv], and the log-sum-exp if the model reads it.
    """
    heads = keys.shape[1]
    grouped = torch.unflatten(query, 1, (heads, -1))
    if site.cap is None and site.sink_logit is None and not site.lse and not by_kernel(grouped):
        return _library_attention(site.scale, grouped, keys, values, mask), None
    heads_mask = mask[:, :, None] if mask.shape[1] == 1 else torch.unflatten(mask, 1, (heads, -1))
    allowed, bias = (heads_mask, None) if heads_mask.dtype == torch.bool else (heads_mask != -torch.inf, heads_mask)
    options: dict[str, Any] = dict(
        mask=allowed, bias=bias, cap=site.cap, sink_logit=site.sink_logits(heads), with_logits=site.lse
    )
    output, _, logits = attend(grouped, plain(keys), plain(values), scale=site.scale, **options)
    return output.flatten(1, 2), _log_sum_exp(site, logits)


def _library_attention(scale: float, grouped: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend with queries [B, Ha, G, q, D] by scaled_dot_product_attention; returns [B, Hq, q, Dv].

    A mask per KV head is not repeated for its query heads; each KV head becomes a row of the batch instead.
    """
    function, query = torch.nn.functional.scaled_dot_product_attention, grouped.flatten(1, 2)
    options: dict[str, Any] = dict(scale=scale, enable_gqa=True)
    if mask.shape[1] in (1, query.shape[1]):
        return function(query, keys, values, attn_mask=mask, **options)
    keys, values, mask = (x.flatten(0, 1)[:, None] for x in (keys, values, mask.expand(keys.shape[0], -1, -1, -1)))
    return function(grouped.flatten(0, 1), keys, values, attn_mask=mask, **options).reshape(*query.shape[:3], -1)


def _chunk_mask(
    layout: Layout, site: Site, slots: Slots, valid: Tensor, facts: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return the mask [B, H', 1 or G, q, C + q] and the bias of a chunk on [slots, chunk]."""
    count = valid.shape[1]
    new = valid[:, None, None, None].expand(-1, layout.groups, -1, -1, -1)  # [B, H', 1, 1, q]
    new_index = slots.length[:, None] + torch.arange(count, device=valid.device)
    index = torch.cat([slots.index, new_index[:, None].expand(-1, layout.groups, -1)], -1)
    mask = torch.cat([(slots.position >= 0)[:, :, None, None], new], -1)  # the same for all queries
    new_position = slots.seen[:, None] + valid.cumsum(-1) - 1
    position = torch.cat([slots.position, new_position[:, None].expand(-1, layout.groups, -1)], -1)
    mask, bias = with_mask(mask, site.mask(index, position, facts) if site.mask else None, site.hidden)
    return mask.expand(-1, -1, -1, count, -1), bias


def _combined_mask(mask: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Combine a mask and a bias to one mask, bool or additive."""
    return mask if bias is None else torch.where(mask, bias.to(dtype), -torch.inf)


def _dtype_of_bias(site: Site, bias: Tensor | None, dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that can hold the numbers that hide, the queries' if possible."""
    too_narrow = dtype == torch.float16 and bias is not None and (site.decomposed or bias.dtype != dtype)
    return torch.float32 if too_narrow else dtype


def _with_unknown_outputs(
    site: Site, slots: Slots, output: Tensor, masks: tuple[Tensor, Tensor | None], valid: Tensor
) -> Tensor:
    """Return a chunk's output [B, Hq, q, Dv] with NaN for the queries whose output is unknown.

    Args:
        masks: the mask with all biases, and the model's own bias.
    """
    mask, bias = masks
    unknown_queries = site.unknown_queries(slots, valid, None if bias is None else bias.dtype)
    if unknown_queries is None:
        return output
    highest = torch.where(mask.any(-1), 0.0, -torch.inf) if mask.dtype == torch.bool else mask.amax(-1)
    unknown = unknown_queries.of(highest[:, :, None, :, None]).flatten(1, 2)  # [B, 1, Ha or Hq, q, 1]
    return torch.where(unknown.repeat_interleave(output.shape[1] // unknown.shape[1], 1), torch.nan, output)


def _per_head(mask: Tensor, query: Tensor, keys: Tensor, heads: int) -> Tensor:
    """Expand a mask [B, H', 1 or G, q, N] to [B, Hq, Ha or 1, q, N], or for GPU kernels to [B, Hq or 1, q, N]."""
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask[:, 0]
    if mask.shape[2] == 1 and keys.shape[1] == heads and query.device.type == "cpu":
        return mask.expand(-1, heads, -1, -1, -1)[:, :, 0]
    return mask.expand(-1, heads, query.shape[1] // heads, -1, -1).flatten(1, 2)
