"""Define what one attention layer does with new tokens: write, attend, observe, evict.

`decode_step` takes one token and is static; the rewrite traces it and splices it into the decode graph.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.cache.admission import align, rescore
from kvpass.cache.cached_attention import AttentionOutput, CachedAttention, NewTokens, class_by_class
from kvpass.cache.layout import Layout
from kvpass.cache.slots import FREE, READ_ONLY_STATE, Slots, row_indices
from kvpass.fx.precision import FILLED, upcast
from kvpass.lowering.attend import LOWEST, Rope, RotateKeys, UnknownQueries, attend, capped, query_key_logits
from kvpass.lowering.attention_blocks import regrouped
from kvpass.lowering.formats import EncodedVectors, plain
from kvpass.policies.base import Policy
from kvpass.policies.ranking import INT64_MAX, rank_of
from kvpass.policies.types import Attention, State, Tokens


@class_by_class
def decode_step(
    layout: Layout, attention: CachedAttention, slots: Slots, new: NewTokens, compact: bool = False
) -> AttentionOutput:
    """Write one token to the free slot, attend, let the policy observe, and free the next slot.

    Args:
        slots: overwritten in place.
        new: one token of each row.
        compact: whether to compact the slots instead of evicting one token.
    """
    policy, valid = layout.policy, new.valid
    vectors = (EncodedVectors.of(layout.key_format, new.key), EncodedVectors.of(layout.value_format, new.value))
    tokens, index = _with_new_token(layout, slots, vectors, valid)
    written = row_indices(slots.free if attention.write_slots is None else attention.write_slots, layout.heads)
    only = valid[:, None, None] if policy.overwrites else None
    for buffer, vector in zip((slots.key, slots.value), vectors, strict=True):
        buffer.write_vector(written, vector, only)
    view = _QueryView.of(layout, attention, slots, tokens, index, new)
    attended, probs, logits = view.attend(with_logits=bool(policy.statistics))
    statistics = _single_query_statistics(layout, probs, valid)
    if "logits" in policy.statistics and (compact or "older_peak" in policy.statistics):
        assert logits is not None
        unbiased = logits if view.policy_bias is None else view.logits()  # without the policy's own bias
        unbiased = regrouped(unbiased, layout.heads)[..., 0, :].float().clamp_min(LOWEST)
        statistics = dataclasses.replace(statistics, logits=unbiased)
    tokens, victim = (_compact if compact else _evict)(layout, attention, slots, tokens, statistics)
    if policy.aligns == ("compact" if compact else "step"):
        tokens = tokens.with_state(align(layout, slots, tokens, attention.policy_weights or layout.policy_weights, 1))
    _commit(slots, tokens, index, victim)
    return attended


@class_by_class
def read_step(layout: Layout, attention: CachedAttention, slots: Slots, new: NewTokens) -> AttentionOutput:
    """Attend to the tokens of an earlier `decode_step`, for a layer that shares its cache.

    Args:
        slots: K and V after the step, all other tensors before it.
        new: this layer's query, and the key and value of the step.
    """
    vectors = (EncodedVectors.of(layout.key_format, new.key), EncodedVectors.of(layout.value_format, new.value))
    tokens, index = _with_new_token(layout, slots, vectors, new.valid)
    return _QueryView.of(layout, attention, slots, tokens, index, new).attend(with_logits=False)[0]


@dataclasses.dataclass(frozen=True)
class _QueryView:
    """The slots as one query attends to them.

    Attributes:
        query: [B, Ha, ., 1, D], by the heads of the keys; key, value: vectors [B, Ha, C, D] and [B, Ha, C, Dv].
        mask, bias: broadcastable to [B, Ha, ., 1, C]; the bias is the model's.
        policy_bias: the policy's bias, broadcastable to the same shape.
    """

    attention: CachedAttention
    query: Tensor
    key: EncodedVectors
    value: EncodedVectors
    mask: Tensor
    bias: Tensor | None
    policy_bias: Tensor | None
    rotate: RotateKeys | None
    rope: Rope | None
    unknown_queries: UnknownQueries | None

    @staticmethod
    def of(
        layout: Layout, attention: CachedAttention, slots: Slots, tokens: Tokens, index: Tensor, new: NewTokens
    ) -> _QueryView:
        query = new.query
        grouped = query.view(query.shape[0], layout.heads, -1, *query.shape[2:])  # [B, Hkv, G, 1, D]
        grouped = with_logit_scale(layout.policy, grouped, tokens.live.sum(-1)[:, :1])
        live = tokens.live[:, :, None, None]  # [B, H', 1, 1, C]
        key, value = stored_vectors(layout, attention, slots, tokens)
        key_features: list[Tensor] = []
        if attention.compute_keys is not None:
            keys, values, key_features = attention.compute_keys(key.read_as(layout.dtype), value.read_as(layout.dtype))
            key, value = plain(keys), plain(values)
        mask = attention.mask(index, tokens.position, key_features) if attention.mask else None
        mask, bias = with_mask(live, mask, attention.hidden_logit)
        policy_bias = logit_bias(layout.policy, tokens, grouped.shape[2])
        policy_bias = None if policy_bias is None else policy_bias[..., None, :]
        heads = key.shape[1]
        if heads != layout.heads:  # keys are computed from stored vectors
            grouped, mask = regrouped(grouped, heads), _regroup_mask(mask, heads)
            bias, policy_bias = (None if b is None else _regroup_mask(b, heads) for b in (bias, policy_bias))
        rope = None if attention.rope is None else dataclasses.replace(attention.rope, rank=tokens.rank)
        unknown = attention.unknown_queries(slots, new.valid[:, None], None if bias is None else bias.dtype)
        rotation = _rotation(attention, tokens)
        return _QueryView(attention, grouped, key, value, mask, bias, policy_bias, rotation, rope, unknown)

    def attend(self, with_logits: bool) -> tuple[AttentionOutput, Tensor | None, Tensor | None]:
        """Attend with the query; return also probabilities and logits if `with_logits` or the model needs them.

        Probabilities and logits are [B, Ha, ., 1, C] in the dtype of `upcast`.
        """
        attention = self.attention
        output, probs, logits = attend(
            self.query,
            self.key,
            self.value,
            scale=attention.scale,
            mask=self.mask,
            bias=add_biases(self.bias, self.policy_bias),
            rotate=self.rotate,
            cap=attention.cap,
            sink_logit=attention.sink_logits(self.key.shape[1]),
            with_logits=with_logits or attention.lse,
            rope=self.rope,
            unknown_queries=self.unknown_queries,
        )
        output = output.flatten(1, 2)  # not later: the compiler moves a product to its first user
        return AttentionOutput(output, ((self.mask, self.bias),), log_sum_exp(attention, logits)), probs, logits

    def logits(self) -> Tensor:
        """Return the logits of the keys before the softmax, [B, Ha, ., 1, C] in the dtype of `upcast`."""
        logits = capped(
            query_key_logits(self.query, self.key, scale=self.attention.scale, rotate=self.rotate), self.attention.cap
        )
        return torch.where(self.mask, logits if self.bias is None else logits + self.bias.to(logits.dtype), -torch.inf)


def log_sum_exp(attention: CachedAttention, logits: Tensor | None) -> Tensor | None:
    """Return the log-sum-exp [B, Hq, q] of logits [B, Ha, ., q, N], if the model reads it."""
    return logits.logsumexp(-1).flatten(1, 2) if attention.lse and logits is not None else None


def _regroup_mask(mask: Tensor, heads: int) -> Tensor:
    """Regroup a mask or bias [B, Hkv or 1, G or 1, ...] for another number of KV heads."""
    return mask if mask.shape[1] * mask.shape[2] == 1 else regrouped(mask, heads)


def _with_new_token(
    layout: Layout, slots: Slots, new: tuple[EncodedVectors, EncodedVectors], valid: Tensor
) -> tuple[Tokens, Tensor]:
    """Return the metadata with the new token in the free slot, and the indices [B, H', C] with it."""
    is_new = _one_hot(slots.free, layout.capacity) & valid[:, None, None]  # [B, H', C]
    position = torch.where(is_new, slots.seen[:, None, None], slots.position)
    index = torch.where(is_new, slots.length[:, None, None], slots.index)
    policy, state = layout.policy, dict(slots.state)
    initial = policy.init_token_state(*(vectors.read() for vectors in new)) if policy.reads_new_keys else {}
    for name in policy.state():
        state[name] = torch.where(is_new, initial.get(name, torch.zeros_like(state[name])), state[name])
    rank = None
    if layout.tracks_rank:
        rank = _ranks_without(slots.rank, is_new & (slots.position >= 0)) if policy.overwrites else slots.rank
        rank = torch.where(is_new, (position >= 0).sum(-1, keepdim=True) - 1, rank)
    seen = (slots.seen + valid)[:, None, None]
    budget = layout.budget_in(state)
    return Tokens(position, seen, state, budget, layout.capacity, rank, layout.sharding), index


def _one_hot(slot: Tensor, capacity: int) -> Tensor:
    """Return bool [B, H', C], true at `slot` [B, H']."""
    return torch.arange(capacity, device=slot.device) == slot[..., None]


def _ranks_without(rank: Tensor, evicted: Tensor) -> Tensor:
    """Return ranks [B, H', C] without the token at `evicted`, at most one per head."""
    evicted_rank = torch.where(evicted, rank, INT64_MAX).amin(-1, keepdim=True)
    return torch.where(rank > evicted_rank, rank - 1, rank)


def with_logit_scale(policy: Policy, query: Tensor, count: Tensor) -> Tensor:
    """Scale queries [B, ...] by `Policy.logit_scale` for `count` [B, 1] tokens."""
    factor = policy.logit_scale(count)
    return query if factor is None else (query * factor.view(-1, *[1] * (query.ndim - 1))).to(query.dtype)


def logit_bias(policy: Policy, tokens: Tokens, groups: int) -> Tensor | None:
    """Return the policy's bias with an entry for each token, [., ., ., N], or None."""
    bias = policy.bias(tokens, groups)
    if bias is None:
        return None
    leading = bias.shape[:-1]
    return bias.expand(*[1] * (3 - len(leading)), *leading, tokens.position.shape[-1])


def _rotation(attention: CachedAttention, tokens: Tokens) -> RotateKeys | None:
    rotate, rank = attention.rotate, tokens.rank
    if rotate is None or rank is None:
        return None
    return lambda keys: rotate(keys, rank)


def with_mask(live: Tensor, mask: Tensor | None, hidden_logit: float | None) -> tuple[Tensor, Tensor | None]:
    """Combine `live` and the model's own mask to a bool mask and an additive bias.

    The mask hides free slots.  A key that the model hides by a finite number gets a bias instead, because a query
    without other keys attends to it.
    """
    if mask is None or mask.dtype != torch.bool:
        return live, mask
    if hidden_logit is None or hidden_logit == -torch.inf:
        return live & mask, None
    return live, torch.where(mask, 0.0, FILLED)


def add_biases(bias: Tensor | None, policy_bias: Tensor | None) -> Tensor | None:
    """Add the model's bias [B, ., ., q, N] and the policy's [B, ., ., 1, N]."""
    if policy_bias is None:
        return bias
    return policy_bias if bias is None else upcast(bias) + policy_bias


def _single_query_statistics(layout: Layout, probs: Tensor | None, valid: Tensor) -> Attention:
    """Return the statistics of one query from its probabilities."""
    if probs is None:
        return Attention(queries=valid.long()[:, None, None], sharding=layout.sharding)
    sums = regrouped(probs, layout.heads)[..., 0, :].float() * valid[:, None, None, None]  # [B, Hkv, G, C]
    return Attention(sums, sums.square(), sums, sums, queries=valid.long()[:, None, None], sharding=layout.sharding)


def _evict(
    layout: Layout, attention: CachedAttention, slots: Slots, tokens: Tokens, statistics: Attention
) -> tuple[Tokens, Tensor]:
    """Let the policy observe and evict one token; return the other tokens and the next slot to write [B, H']."""
    policy = layout.policy
    tokens = tokens.with_state(policy.observe(tokens, statistics))
    if policy.interval == 1:
        tokens = rescore(layout, tokens, slots.key, slots.value, attention.policy_weights)
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
        valid = (evicted & tokens.live).any(-1, keepdim=True)
        rest = rest.with_state(_merge_victim(layout, slots, rest, victim, valid))
    return rest, victim


def _merge_victim(layout: Layout, slots: Slots, rest: Tokens, victim: Tensor, valid: Tensor) -> State:
    """Merge the victim's K and V into one slot of each head; return the changes to the state."""
    heads, merging = slots.key.shape[1], layout.pinned_tokens or layout.policy
    evicted = row_indices(victim, heads)
    merge = merging.merge_evicted(rest, slots.key.read(), slots.key.vector_at(evicted)[:, :, None], valid)
    into = row_indices(merge.into[..., 0], heads)
    for vectors in (slots.key, slots.value):
        merged = merge.own * upcast(vectors.vector_at(into)) + merge.weight * upcast(vectors.vector_at(evicted))
        stored = EncodedVectors.of(vectors.format, (merged / (merge.own + merge.share))[:, :, None])
        vectors.write_vector(into, stored, merge.share > 0)
    return merge.state


def _compact(
    layout: Layout, attention: CachedAttention, slots: Slots, tokens: Tokens, statistics: Attention
) -> tuple[Tokens, Tensor]:
    """Let the policy observe and compact; return the remaining tokens and the next slot to write [B, H']."""
    policy = layout.policy
    observe = policy.observe_chunk if policy.interval == 1 else policy.observe  # with an interval, as in other steps
    tokens = rescore(
        layout, tokens.with_state(observe(tokens, statistics)), slots.key, slots.value, attention.policy_weights
    )
    keep, changes = layout.eviction.compact(tokens)
    position = torch.where(keep, tokens.position, FREE)
    rank = rank_of(position) if layout.tracks_rank else None
    rest = dataclasses.replace(tokens.with_state(changes), position=position, rank=rank)
    return rest, layout.eviction.victim(rest)


def stored_vectors(
    layout: Layout, attention: CachedAttention, slots: Slots, tokens: Tokens
) -> tuple[EncodedVectors, EncodedVectors]:
    """Return the stored keys and values, aligned if the policy aligns them at read."""
    if layout.policy.aligns != "read":
        return slots.key, slots.value
    policy_weights = attention.policy_weights or layout.policy_weights
    stored = slots.key.read_as(layout.dtype), slots.value.read_as(layout.dtype)
    key, value, _ = layout.policy.align(tokens, *stored, policy_weights, 0)
    return plain(key), plain(value)


def _commit(slots: Slots, tokens: Tokens, index: Tensor, victim: Tensor) -> None:
    if tokens.rank is not None:
        slots.rank.copy_(tokens.rank)
    slots.position.copy_(tokens.position)
    slots.index.copy_(torch.where(tokens.live, index, FREE))
    slots.free.copy_(victim)
    slots.seen.copy_(tokens.seen[:, 0, 0])
    slots.length.add_(1)
    for name, buffer in slots.state.items():
        if name not in READ_ONLY_STATE:
            buffer.copy_(tokens.state[name])
