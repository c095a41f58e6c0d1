"""What one attention layer does with new tokens: write, attend, observe, evict.

`decode_step` takes one token and is static: the rewrite traces it and splices it into the decode graph.
`extend_step` takes a chunk on live slots and leaves them alone; `kvpass.cache.slots.admit` then takes the chunk in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvpass.cache.slots import FREE, Layout, Slots, align, first_values, rows_at
from kvpass.cache.statistics import StatisticsSpec, in_one_operator, statistics
from kvpass.fx.precision import FILLED, upcast
from kvpass.lowering.attend import LOWEST, Rotation, UnknownQueries, attend, by_kernel, capped, scores
from kvpass.lowering.attention_statistics import regrouped
from kvpass.lowering.formats import Rows, Sections, plain
from kvpass.lowering.rope import Rope
from kvpass.policies.base import LATE, ROW_BUDGET, Attention, Policy, State, Tokens, rank_of


class Mask(Protocol):
    """The model's own mask, asked about keys at any place of the padded sequence."""

    def __call__(self, index: Tensor, position: Tensor, facts: list[Tensor]) -> Tensor:
        """Places in the padded sequence and among the real tokens, int64 [B, H', N] each, and facts of each key.

        Returns: bool or additive [B, Hkv or 1, G or 1, q, N].
        """


Rotate = Callable[[Sections, Tensor], list[Tensor]]
"""The model's own rotary embedding: keys [B, Hkv, N, D] at positions int64 [B, H', N], in sections of D."""


ComputeKeys = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, list[Tensor]]]
"""What the model makes of its cache: stored [B, Hkv, N, D'] twice, to keys and values [B, Ha, N, D] for attention and
facts [N, ...] that its mask reads."""


@dataclasses.dataclass(frozen=True)
class Site:
    """What the graph says about one attention call.

    Attributes:
        scale: multiplies the products of queries and keys.
        mask: the model's mask on slots, or None.
        rotate: the model's rotary embedding, or None when stored keys are attended to as they are.
        rope: the same as kernels can apply it, without ranks, if they can.
        cap, sink_logit: see `kvpass.capture.canonical.attention`; the latter is [B or 1, Hq, q or 1, 1].
        weights: the policy's own, as inputs of the graph; empty where they may be taken from the policy.
        compute_keys: makes keys and values from what is stored, or None when they are stored as they are.
        lse: whether the model wants the log-sum-exp of the logits as well.
        write_index: the slots to write to, [B, H'], where they are not to be read from `slots.free`.
        hidden: the logit of what a bool mask hides; None for what is left out as if it were not there.
        decomposed: whether the model spells a softmax out, which gives NaN where it finds nothing.
        knows_padding: whether padding is known, and not held.
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

    def blank(self, slots: Slots, valid: Tensor, bias: torch.dtype | None) -> UnknownQueries | None:
        """The queries whose answer may be unknown; `valid` is bool [B, q], and a mask is a bias of a dtype or none.

        A model that adds a bias in half precision rounds logits away, or in part, where they meet numbers that hide.
        Here sums are wider.  That matters to no query that sees a key.
        """
        if (
            self.mask is None
            or self.sink_logit is not None
            or not (self.decomposed or (self.knows_padding and bias is not None))
        ):
            return None
        real = valid[:, None, None, :, None]  # padding is not asked about: its answer must be a number
        padded = real & (slots.length != slots.seen)[:, None, None, None, None]
        none = torch.zeros_like(real)
        rounded = self.decomposed and bias in (torch.float16, torch.bfloat16)
        return UnknownQueries(
            real if self.decomposed else none, padded if self.knows_padding else none, real if rounded else None
        )

    def sink_logits(self, heads: int) -> Tensor | None:
        """The sink's logits [B or 1, Hkv, G, q or 1, 1]."""
        return None if self.sink_logit is None else torch.unflatten(self.sink_logit, 1, (heads, -1))


class Attended(NamedTuple):
    """The results of attention, and the mask that it ran under.

    Attributes:
        output: [B, Hq, q, Dv].
        mask, bias: the keys that are seen, and the model's bias; bool and a number [B, Ha or 1, ., q, N].
        lse: where wanted the log-sum-exp, [B, Hq, q] as `upcast` has it.
    """

    output: Tensor
    mask: Tensor
    bias: Tensor | None
    lse: Tensor | None = None


def decode_step(
    layout: Layout,
    site: Site,
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    compact: bool = False,
) -> Attended:
    """Write one token to the free slot, attend, let the policy observe and free the next slot.

    Args:
        slots: overwritten in place.
        query: [B, Hq, 1, D]; key: [B, Hkv, 1, D], as it is stored; value: [B, Hkv, 1, Dv].
        valid: bool [B], false for a row whose token is padding.
        compact: the other decode graph, which the host runs when `Policy.tick` says so.
    """
    policy = layout.policy
    new = (Rows.of(layout.key_format, key), Rows.of(layout.value_format, value))
    tokens, index = _arrived(layout, slots, new, valid)
    _write(
        slots, new, slots.free if site.write_index is None else site.write_index, valid if policy.overwrites else None
    )
    here = _QueryView.of(layout, site, slots, tokens, index, query, valid)
    attended, probabilities, logits = here.attend(with_logits=bool(policy.statistics))
    attention = _one_query(layout, probabilities, valid)
    if compact and "logits" in policy.statistics:
        assert logits is not None
        seen = logits if here.policy_bias is None else here.logits()  # the policy sees them without its own bias
        seen = regrouped(seen, layout.heads)[..., 0, :].float().clamp_min(LOWEST)
        attention = dataclasses.replace(attention, logits=seen)
    tokens, victim = _compacted(layout, tokens, attention) if compact else _stepped(layout, slots, tokens, attention)
    if policy.aligns == ("compact" if compact else "step"):
        tokens = _realign(layout, site, slots, tokens)
    _commit(layout, slots, tokens, index, victim)
    return attended


def read_step(
    layout: Layout, site: Site, slots: Slots, query: Tensor, key: Tensor, value: Tensor, valid: Tensor
) -> Attended:
    """Attend once more after a `decode_step`, to what that attended to: the query of a layer that shares its cache.

    Args:
        slots: K and V as they are now, all else as it was before the step.
        query: [B, Hq, 1, D]; key, value: [B, Hkv, 1, D] and [B, Hkv, 1, Dv], the step's; valid: bool [B].
    """
    new = (Rows.of(layout.key_format, key), Rows.of(layout.value_format, value))
    tokens, index = _arrived(layout, slots, new, valid)
    return _QueryView.of(layout, site, slots, tokens, index, query, valid).attend(with_logits=False)[0]


@dataclasses.dataclass(frozen=True)
class _QueryView:
    """One query's view of the slots.

    Attributes:
        query: [B, Ha, ., 1, D], by the heads of the keys; key, value: rows [B, Ha, C, D] and [B, Ha, C, Dv].
        mask, bias: broadcastable to [B, Ha, ., 1, C]; the bias is the model's.
        policy_bias: the policy's, likewise.
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
    blank: UnknownQueries | None

    @staticmethod
    def of(
        layout: Layout, site: Site, slots: Slots, tokens: Tokens, index: Tensor, query: Tensor, valid: Tensor
    ) -> _QueryView:
        grouped = query.view(query.shape[0], layout.heads, -1, *query.shape[2:])  # [B, Hkv, G, 1, D]
        grouped = with_logit_scale(layout.policy, grouped, tokens.live.sum(-1)[:, :1])
        live = tokens.live[:, :, None, None]  # [B, H', 1, 1, C]
        key, value, facts = _attended_rows(layout, site, *_read(layout, site, slots, tokens))
        mask, bias = with_mask(live, site.mask(index, tokens.position, facts) if site.mask else None, site.hidden)
        policy_bias = layout.policy.bias(tokens, grouped.shape[2])
        policy_bias = None if policy_bias is None else policy_bias[..., None, :]
        heads = key.shape[1]
        if heads != layout.heads:  # they are made from what is stored
            grouped, mask = regrouped(grouped, heads), _over(mask, heads)
            bias, policy_bias = (None if x is None else _over(x, heads) for x in (bias, policy_bias))
        rope = None if site.rope is None else dataclasses.replace(site.rope, rank=tokens.rank)
        blank = site.blank(slots, valid[:, None], None if bias is None else bias.dtype)
        return _QueryView(site, grouped, key, value, mask, bias, policy_bias, _rotation(site, tokens), rope, blank)

    def attend(self, with_logits: bool) -> tuple[Attended, Tensor | None, Tensor | None]:
        """For one query, and if `with_logits` probabilities and logits, [B, Ha, ., 1, C] as `upcast` has them."""
        site = self.site
        with_logits = with_logits or site.lse
        given: dict[str, Any] = dict(
            scale=site.scale, mask=self.mask, rotate=self.rotate, cap=site.cap, with_logits=with_logits
        )
        given |= dict(
            bias=added(self.bias, self.policy_bias),
            sink_logit=site.sink_logits(self.key.shape[1]),
            rope=self.rope,
            blank=self.blank,
        )
        output, probabilities, logits = attend(self.query, self.key, self.value, **given)
        output = output.flatten(1, 2)  # here: the compiler moves a product to its first user
        return Attended(output, self.mask, self.bias, _log_sum_exp(site, logits)), probabilities, logits

    def logits(self) -> Tensor:
        """What the model makes of the keys before the softmax, [B, Ha, ., 1, C] as `upcast` has them."""
        logits = capped(scores(self.query, self.key, scale=self.site.scale, rotate=self.rotate), self.site.cap)
        return torch.where(self.mask, logits if self.bias is None else logits + self.bias.to(logits.dtype), -torch.inf)


def _log_sum_exp(site: Site, logits: Tensor | None) -> Tensor | None:
    """Of logits [B, Ha, ., q, N] to [B, Hq, q], where the model wants it."""
    return logits.logsumexp(-1).flatten(1, 2) if site.lse and logits is not None else None


def _over(x: Tensor, heads: int) -> Tensor:
    """A mask or bias [B, Hkv or 1, G or 1, ...] for another number of heads."""
    return x if x.shape[1] * x.shape[2] == 1 else regrouped(x, heads)


def _arrived(layout: Layout, slots: Slots, new: tuple[Rows, Rows], valid: Tensor) -> tuple[Tokens, Tensor]:
    """The slots' metadata with the new token in the free slot, and the indices [B, H', C] with it."""
    fresh = _here(slots.free, layout.capacity) & valid[:, None, None]  # [B, H', C]
    position = torch.where(fresh, slots.seen[:, None, None], slots.position)
    index = torch.where(fresh, slots.length[:, None, None], slots.index)
    arriving, state = first_values(layout.policy, *new), dict(slots.state)
    for name in layout.policy.remembered():
        state[name] = torch.where(fresh, arriving.get(name, torch.zeros_like(state[name])), state[name])
    rank = None
    if layout.tracks_rank:
        rank = _without(slots.rank, fresh & (slots.position >= 0)) if layout.policy.overwrites else slots.rank
        rank = torch.where(fresh, (position >= 0).sum(-1, keepdim=True) - 1, rank)
    seen = (slots.seen + valid)[:, None, None]
    budget = layout.budget_in(state)
    return Tokens(position, seen, state, budget, layout.capacity, rank, layout.spread), index


def _here(slot: Tensor, capacity: int) -> Tensor:
    """bool [B, H', C]: true at `slot` [B, H']."""
    return torch.arange(capacity, device=slot.device) == slot[..., None]


def _without(rank: Tensor, evicted: Tensor) -> Tensor:
    """Ranks [B, H', C] after the token at `evicted`, at most one of each head, has left."""
    left = torch.where(evicted, rank, LATE).amin(-1, keepdim=True)
    return torch.where(rank > left, rank - 1, rank)


def _write(slots: Slots, new: tuple[Rows, Rows], index: Tensor, only: Tensor | None) -> None:
    """Write one row of K and of V in place, at slot `index` [B, H'] of each head; `only` selects rows [B]."""
    where = rows_at(index, new[0].shape[1])
    chosen = None if only is None else only[:, None, None]
    slots.key.put(where, new[0], chosen)
    slots.value.put(where, new[1], chosen)


def with_logit_scale(policy: Policy, query: Tensor, count: Tensor) -> Tensor:
    """Queries [B, ...] with the policy's factor on their logits, as they attend to `count` [B, 1] tokens."""
    factor = policy.logit_scale(count)
    return query if factor is None else (query * factor.view(-1, *[1] * (query.ndim - 1))).to(query.dtype)


def _rotation(site: Site, tokens: Tokens) -> Rotation | None:
    rotate, rank = site.rotate, tokens.rank
    if rotate is None or rank is None:
        return None
    return lambda keys: rotate(keys, rank)


def with_mask(live: Tensor, mask: Tensor | None, hidden: float | None) -> tuple[Tensor, Tensor | None]:
    """The boolean mask and the additive bias that `live` and the model's own mask make together.

    What is not live is not there.  What the model hides by a finite number is: a query that sees nothing attends to it.
    """
    if mask is None or mask.dtype != torch.bool:
        return live, mask
    if hidden is None or hidden == -torch.inf:
        return live & mask, None
    return live, torch.where(mask, 0.0, FILLED)


def added(bias: Tensor | None, policy_bias: Tensor | None) -> Tensor | None:
    """The model's bias [B, ., ., q, N] and the policy's [B, ., ., 1, N]."""
    if policy_bias is None:
        return bias
    return policy_bias if bias is None else upcast(bias) + policy_bias


def _one_query(layout: Layout, probabilities: Tensor | None, valid: Tensor) -> Attention:
    if probabilities is None:
        return Attention(queries=valid.long()[:, None, None], spread=layout.spread)
    row = regrouped(probabilities, layout.heads)[..., 0, :].float() * valid[:, None, None, None]  # [B, Hkv, G, C]
    return Attention(row, row.square(), row, row, queries=valid.long()[:, None, None], spread=layout.spread)


def _stepped(layout: Layout, slots: Slots, tokens: Tokens, attention: Attention) -> tuple[Tokens, Tensor]:
    """The policy's ordinary step: what is left, and the slot [B, H'] that the next token is written to."""
    policy = layout.policy
    tokens = tokens.updated(policy.observe(tokens, attention))
    victim = policy.victim(tokens)
    if policy.overwrites or not policy.evicts:
        return tokens, victim
    evicted = _here(victim, layout.capacity)
    left = dataclasses.replace(
        tokens,
        position=torch.where(evicted, FREE, tokens.position),
        rank=None if tokens.rank is None else _without(tokens.rank, evicted & tokens.live),
    )
    if policy.merges:
        left = left.updated(_merge_victim(policy, slots, left, victim, (evicted & tokens.live).any(-1, keepdim=True)))
    return left, victim


def _merge_victim(policy: Policy, slots: Slots, left: Tokens, victim: Tensor, valid: Tensor) -> State:
    """Merge the victim's K and V into one row of each head, in place; what changes in the state."""
    heads = slots.key.shape[1]
    evicted = rows_at(victim, heads)
    merge = policy.merge_unpinned(left, slots.key.read(), slots.key.at(evicted)[:, :, None], valid)
    into = rows_at(merge.into[..., 0], heads)
    for rows in (slots.key, slots.value):
        mixed = merge.own * upcast(rows.at(into)) + merge.weight * upcast(rows.at(evicted))
        made = Rows.of(rows.format, (mixed / (merge.own + merge.share))[:, :, None])
        rows.put(into, made, merge.share > 0)
    return merge.state


def _compacted(layout: Layout, tokens: Tokens, attention: Attention) -> tuple[Tokens, Tensor]:
    """Observe and compact: what is left, and the slot [B, H'] that the next token is written to."""
    policy = layout.policy
    tokens = tokens.updated(policy.observe_unpinned(tokens, attention))
    stays, changes = policy.keep_mask(tokens)
    position = torch.where(stays, tokens.position, FREE)
    rank = rank_of(position) if layout.tracks_rank else None
    left = dataclasses.replace(tokens.updated(changes), position=position, rank=rank)
    return left, policy.victim(left)


def _read(layout: Layout, site: Site, slots: Slots, tokens: Tokens) -> tuple[Rows, Rows]:
    """The keys and values that are stored, unless the policy aligns them at read."""
    if layout.policy.aligns != "read":
        return slots.key, slots.value
    weights = site.weights or layout.policy.weights()
    stored = slots.key.read_as(layout.dtype), slots.value.read_as(layout.dtype)
    key, value, _ = layout.policy.align(tokens, *stored, layout.layer, weights, 0)
    return plain(key), plain(value)


def _attended_rows(layout: Layout, site: Site, key: Rows, value: Rows) -> tuple[Rows, Rows, list[Tensor]]:
    """What attention and its mask see of stored keys and values."""
    if site.compute_keys is None:
        return key, value, []
    keys, values, facts = site.compute_keys(key.read_as(layout.dtype), value.read_as(layout.dtype))
    return plain(keys), plain(values), facts


def _with_computed_keys(site: Site, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same of the held rows and a chunk's."""
    return (key, value, []) if site.compute_keys is None else site.compute_keys(key, value)


def _realign(layout: Layout, site: Site, slots: Slots, tokens: Tokens) -> Tokens:
    """Store what the policy makes of the rows that are left, in place."""
    weights = site.weights or layout.policy.weights()
    return tokens.updated(align(layout, slots, tokens, weights, 1))


def _commit(layout: Layout, slots: Slots, tokens: Tokens, index: Tensor, victim: Tensor) -> None:
    """Store the metadata."""
    if tokens.rank is not None:
        slots.rank.copy_(tokens.rank)
    slots.position.copy_(tokens.position)
    slots.index.copy_(torch.where(tokens.live, index, FREE))
    slots.free.copy_(victim)
    slots.seen.copy_(tokens.seen[:, 0, 0])
    slots.length.add_(1)
    for name, old in slots.state.items():
        if name != ROW_BUDGET:
            old.copy_(tokens.state[name])


def extend_step(
    layout: Layout, site: Site, slots: Slots, query: Tensor, key: Tensor, value: Tensor, valid: Tensor
) -> tuple[Attended, list[Tensor]]:
    """Attend with a chunk of queries to [held slots, chunk], under the model's own mask.

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, q, D], as it is attended to; value: [B, Hkv, q, Dv].
        valid: bool [B, q].

    Returns:
        What attention gives and the `kvpass.cache.statistics` of the chunk, whose columns are [held slots, chunk].
        They leave the policy's own bias out.  If the layout crops, what they are made of comes behind them: the
        query, keys, mask and sink of `kvpass.cache.statistics.StatisticsSpec`.
    """
    policy, chunk = layout.policy, query.shape[2]
    held, rotate = slots.tokens(layout), site.rotate
    query = with_logit_scale(policy, query, held.live.sum(-1)[:, :1] + valid.sum(-1, keepdim=True))
    stored, rows = (x.read_as(layout.dtype) for x in _read(layout, site, slots, held))
    kept = stored if rotate is None else torch.cat(rotate(Sections((stored,)), slots.rank), -1)
    keys = torch.cat([kept, key.to(kept.dtype)], 2)
    keys, values, facts = _with_computed_keys(site, keys, torch.cat([rows, value.to(rows.dtype)], 2))
    mask, bias = _chunk_mask(layout, site, slots, valid, facts)
    dtype = _dtype_of_bias(site, bias, query.dtype)
    full = _per_head(_joined(mask, bias, dtype), query, keys, layout.heads)
    common = (site.sink_logit, False, site.scale, site.cap, layout.heads, layout.spread)
    spec = StatisticsSpec(query, keys, full, *common)
    policy_bias = policy.bias(held, query.shape[1] // layout.heads)
    by_library = site.cap is None and site.sink_logit is None
    if policy_bias is None and not site.lse and in_one_operator(policy, query, keys, values, by_library):
        output, *made = statistics(policy, spec, valid, held.budget, values)
        attended = Attended(_blanked(site, slots, output, (full, bias), valid), mask, bias)
        return attended, [*made, *_for_crops(layout, spec)]
    seen = full
    if policy_bias is not None:
        policy_bias = torch.nn.functional.pad(policy_bias, (0, chunk))[..., None, :]  # [B, ., ., 1, C + q]
        seen = _per_head(_joined(mask, added(bias, policy_bias), dtype), query, keys, layout.heads)
    output, lse = _attended(site, query, keys, values, seen)
    attended = Attended(_blanked(site, slots, output, (full, bias), valid), mask, bias, lse)
    if not policy.statistics:
        return attended, []
    return attended, [*statistics(policy, spec, valid, held.budget), *_for_crops(layout, spec)]


def _for_crops(layout: Layout, spec: StatisticsSpec) -> list[Tensor]:
    """What the statistics are made of, for a layout that crops."""
    tensors = (spec.query, spec.key, spec.mask, spec.sink_logit)
    return [tensor for tensor in tensors if tensor is not None] if layout.crops else []


def _attended(site: Site, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attention of a chunk, and its log-sum-exp if wanted; mask bool or additive [B, Hq, Ha or 1, q, N]."""
    heads = keys.shape[1]
    grouped = torch.unflatten(query, 1, (heads, -1))
    if site.cap is None and site.sink_logit is None and not site.lse and not by_kernel(grouped):
        return _library_attention(site.scale, grouped, keys, values, mask), None
    apart = mask[:, :, None] if mask.shape[1] == 1 else torch.unflatten(mask, 1, (heads, -1))
    allowed, bias = (apart, None) if apart.dtype == torch.bool else (apart != -torch.inf, apart)
    given: dict[str, Any] = dict(
        mask=allowed, bias=bias, cap=site.cap, sink_logit=site.sink_logits(heads), with_logits=site.lse
    )
    output, _, logits = attend(grouped, plain(keys), plain(values), scale=site.scale, **given)
    return output.flatten(1, 2), _log_sum_exp(site, logits)


def _library_attention(scale: float, grouped: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Queries [B, Ha, G, q, D] to [B, Hq, q, Dv].  A mask for each KV head is not repeated for its query heads: each
    KV head comes as a row of the batch instead."""
    function, query = torch.nn.functional.scaled_dot_product_attention, grouped.flatten(1, 2)
    given: dict[str, Any] = dict(scale=scale, enable_gqa=True)
    if mask.shape[1] in (1, query.shape[1]):
        return function(query, keys, values, attn_mask=mask, **given)
    keys, values, mask = (x.flatten(0, 1)[:, None] for x in (keys, values, mask.expand(len(keys), -1, -1, -1)))
    return function(grouped.flatten(0, 1), keys, values, attn_mask=mask, **given).reshape(*query.shape[:3], -1)


def _chunk_mask(
    layout: Layout, site: Site, slots: Slots, valid: Tensor, facts: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Mask bool [B, H', 1 or G, q, C + q] and bias of a chunk on [held slots, chunk]."""
    count = valid.shape[1]
    new = valid[:, None, None, None].expand(-1, layout.groups, -1, -1, -1)  # [B, H', 1, 1, q]
    running = slots.length[:, None] + torch.arange(count, device=valid.device)
    index = torch.cat([slots.index, running[:, None].expand(-1, layout.groups, -1)], -1)
    mask = torch.cat([(slots.position >= 0)[:, :, None, None], new], -1)  # the same for all queries
    arriving = slots.seen[:, None] + valid.cumsum(-1) - 1
    position = torch.cat([slots.position, arriving[:, None].expand(-1, layout.groups, -1)], -1)
    mask, bias = with_mask(mask, site.mask(index, position, facts) if site.mask else None, site.hidden)
    return mask.expand(-1, -1, -1, count, -1), bias


def _joined(mask: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Both as one, boolean or additive."""
    return mask if bias is None else torch.where(mask, bias.to(dtype), -torch.inf)


def _dtype_of_bias(site: Site, bias: Tensor | None, dtype: torch.dtype) -> torch.dtype:
    """The queries' dtype, if it holds the numbers that hide."""
    narrow = dtype == torch.float16 and bias is not None and (site.decomposed or bias.dtype != dtype)
    return torch.float32 if narrow else dtype


def _blanked(site: Site, slots: Slots, output: Tensor, masks: tuple[Tensor, Tensor | None], valid: Tensor) -> Tensor:
    """Output [B, Hq, q, Dv] of a chunk, with NaN for the queries whose answer is unknown.

    Args:
        masks: all that is hidden or added, and the model's own bias.
    """
    mask, bias = masks
    blank = site.blank(slots, valid, None if bias is None else bias.dtype)
    if blank is None:
        return output
    most = torch.where(mask.any(-1), 0.0, -torch.inf) if mask.dtype == torch.bool else mask.amax(-1)
    unknown = blank.of(most[:, :, None, :, None]).flatten(1, 2)  # [B, 1, Ha or Hq, q, 1]
    return torch.where(unknown.repeat_interleave(output.shape[1] // unknown.shape[1], 1), torch.nan, output)


def _per_head(mask: Tensor, query: Tensor, keys: Tensor, heads: int) -> Tensor:
    """A mask [B, H', 1 or G, q, N] as [B, Hq, Ha or 1, q, N], where kernels want it as [B, Hq or 1, q, N]."""
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask[:, 0]
    if mask.shape[2] == 1 and keys.shape[1] == heads and query.device.type == "cpu":
        return mask.expand(-1, heads, -1, -1, -1)[:, :, 0]
    return mask.expand(-1, heads, query.shape[1] // heads, -1, -1).flatten(1, 2)
