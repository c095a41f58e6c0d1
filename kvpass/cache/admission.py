"""Admit a prompt or a chunk to slots, uncompiled: the policy selects which tokens stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.layout import ROW_BUDGET, Layout
from kvpass.cache.slots import FREE, ClassedSlots, Slots, next_free, select_heads
from kvpass.fx.precision import upcast
from kvpass.lowering.attention_statistics import StatisticsOperands, as_attention
from kvpass.lowering.formats import EncodedVectors
from kvpass.policies.base import Policy
from kvpass.policies.pinned_tokens import PINNED, Pins
from kvpass.policies.ranking import rank_of, slots_by_position
from kvpass.policies.types import Attention, Merge, State, Tokens

MERGE_BLOCK = 1024  # evicted tokens that are merged at a time


def rescore(
    layout: Layout, tokens: Tokens, key: EncodedVectors, value: EncodedVectors, policy_weights: Sequence[Tensor] = ()
) -> Tokens:
    """Apply the policy's `rescore`, if it has one, to vectors [B, Hkv, N, D]; () for the policy's own weights."""
    policy = layout.policy
    if not policy.rescores:
        return tokens
    weights = policy_weights or layout.policy_weights
    return tokens.with_state(policy.rescore(tokens, key.read(), value.read(), weights))


def admit(layout: Layout, before: Any, to_admit: TokensToAdmit, budgets: Sequence[int] = (), into: Any = None) -> Any:
    """Admit a prompt or chunk: the policy selects which cached and new tokens stay.

    The tokens that stay are written to slots 0, 1, ... in the order of their positions.

    Args:
        before: the `Slots` before the chunk, `ClassedSlots` if the layout has classes; None for a prompt.  They are
            overwritten in place if `into` is None.
        to_admit: the tokens of the prompt or chunk.
        budgets: the budget of each row of a prompt, without tokens pinned on top of it; () for the layout's.  The slots
            store them if the layout has `row_budgets`.
        into: other slots of the layout's capacity to write to.

    Returns:
        Slots of the layout's capacity, of the kind of `before`.

    Raises:
        BudgetError: pinned tokens leave less of the budget than the policy needs.
    """
    if layout.classes and before is None:
        return _admit_prompt_by_class(layout, to_admit)
    if layout.classes:
        return _admit_by_class(layout, before, to_admit, into)
    budgets = tuple(budgets) or (layout.budget,) * layout.batch
    past = Slots.empty(layout) if before is None else before
    if before is None and layout.row_budgets:
        past.state[ROW_BUDGET].copy_(torch.tensor(budgets).view(-1, 1, 1))
    candidates = _score_candidates(layout, past, to_admit, budgets, before is None)
    slots = into or past
    _select_and_store(layout, slots, candidates)
    if before is not None and layout.policy.aligns in ("step", "compact"):
        changes = align(layout, slots, slots.tokens(layout), layout.policy_weights, to_admit.valid.shape[1])
        for name, changed in changes.items():
            slots.state[name].copy_(changed)
    return slots


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """Cached and new tokens, N = C + q (N = q for a prompt), among which the policy selects.

    Attributes:
        tokens: their metadata, with the policy's scores.
        index: int64 [B, H', N], their indices in the padded sequence.
        key, value: their vectors.
    """

    tokens: Tokens
    index: Tensor
    key: EncodedVectors
    value: EncodedVectors

    def of_heads(self, heads: Tensor, layout: Layout) -> _Candidates:
        """Return the tokens of some heads, int64 [B, h], with the budget of their layout."""
        state = {name: select_heads(entry, heads) for name, entry in self.tokens.state.items()}
        position = select_heads(self.tokens.position, heads)
        tokens = dataclasses.replace(self.tokens, position=position, state=state, budget=layout.budget, rank=None)
        vectors = (x.map_tensors(lambda part: select_heads(part, heads)) for x in (self.key, self.value))
        return _Candidates(tokens, select_heads(self.index, heads), *vectors)


def _score_candidates(
    layout: Layout, past: Slots, to_admit: TokensToAdmit, budgets: Sequence[int], is_prompt: bool
) -> _Candidates:
    """Let the policy observe a prompt or chunk, and score its tokens and the cached ones."""
    assert isinstance(to_admit.attention, Attention)
    key = EncodedVectors.of(layout.key_format, to_admit.key)
    value = EncodedVectors.of(layout.value_format, to_admit.value)
    tokens, index = _join_candidates(layout, past, to_admit, key, value, is_prompt)
    if not layout.row_budgets:
        tokens = dataclasses.replace(tokens, budget=max(budgets))
    if layout.pinned_tokens is not None:
        layout.pinned_tokens.check(tokens)
    tokens = tokens.with_state(layout.policy.observe_chunk(tokens, to_admit.attention))
    if not is_prompt:
        key, value = past.key.concatenate(key), past.value.concatenate(value)
    tokens = rescore(layout, tokens, key, value)
    if layout.policy.projects:
        tokens = tokens.with_state(layout.policy.project(tokens, value.read(), to_admit.output_projection))
    return _Candidates(tokens, index, key, value)


def _select_and_store(layout: Layout, slots: Slots, candidates: _Candidates) -> None:
    """Let the policy select among tokens, and write those that stay to slots."""
    keep, changes = layout.eviction.compact(candidates.tokens)
    candidates = dataclasses.replace(candidates, tokens=candidates.tokens.with_state(changes))
    _fill(layout, slots, candidates, keep)
    slots.seen.copy_(candidates.tokens.seen[:, 0, 0])
    slots.length.copy_(candidates.index[:, 0, -1] + 1)
    if layout.policy.merges:
        _merge_evicted(layout, slots, candidates, candidates.tokens.live & ~keep)
    slots.free.copy_(next_free(layout, slots))


def _admit_prompt_by_class(layout: Layout, prompt: TokensToAdmit) -> ClassedSlots:
    """Admit a prompt: the policy orders the heads, and each class of them selects among its tokens."""
    whole = dataclasses.replace(layout, classes=(), capacity=1)
    candidates = _score_candidates(whole, Slots.empty(whole), prompt, (layout.budget,), True)
    counts = layout.policy.head_counts(candidates.tokens, layout.layer)
    slots = ClassedSlots.empty(layout, counts.argsort(dim=-1, descending=True, stable=True))
    for class_layout, class_slots, heads in zip(layout.by_class, slots.by_class, layout.head_slices, strict=True):
        _select_and_store(class_layout, class_slots, candidates.of_heads(slots.order[:, heads], class_layout))
    return slots


def _admit_by_class(
    layout: Layout, classed: ClassedSlots, chunk: TokensToAdmit, into: ClassedSlots | None
) -> ClassedSlots:
    """Admit a chunk on slots in classes: heads stay in their classes."""
    targets = [None] * len(classed.by_class) if into is None else into.by_class
    classes = zip(layout.by_class, classed.by_class, layout.head_slices, targets, strict=True)
    by_class = []
    for index, (class_layout, class_slots, heads, target) in enumerate(classes):
        attention = chunk.attention[index] if isinstance(chunk.attention, tuple) else chunk.attention
        class_chunk = chunk.of_heads(classed.order[:, heads], attention)
        by_class.append(admit(class_layout, class_slots, class_chunk, (), target))
    if into is None:
        return dataclasses.replace(classed, by_class=tuple(by_class))
    into.order.copy_(classed.order)
    into.inverse.copy_(classed.inverse)
    return into


def align(layout: Layout, slots: Slots, tokens: Tokens, policy_weights: Sequence[Tensor], evicted: int) -> State:
    """Store the vectors that the policy aligns, in place, and return the changes to its state."""
    key, value = slots.key.read_as(layout.dtype), slots.value.read_as(layout.dtype)
    new_key, new_value, changes = layout.policy.align(tokens, key, value, policy_weights, evicted)
    slots.key.replace(new_key, (new_key != key).any(-1))
    slots.value.replace(new_value, (new_value != value).any(-1))
    return changes


def _join_candidates(
    layout: Layout, past: Slots, to_admit: TokensToAdmit, key: EncodedVectors, value: EncodedVectors, is_prompt: bool
) -> tuple[Tokens, Tensor]:
    """Return the tokens of [slots, new], and their indices; `key` and `value` are the new tokens' vectors."""
    policy, valid = layout.policy, to_admit.valid
    count = valid.cumsum(-1)  # [B, q]
    new_position = past.seen[:, None] + count - 1
    new_index = past.length[:, None] + torch.arange(valid.shape[1], device=layout.device)

    def join(cached: Tensor, new: Tensor) -> Tensor:
        new = new.expand(-1, layout.metadata_heads, -1)
        return new if is_prompt else torch.cat([cached, new], -1)

    initial = policy.init_token_state(key.read(), value.read()) if policy.reads_new_keys else {}
    state = dict(past.state)
    initial[PINNED] = to_admit.pinned_of(policy)[:, None]
    if layout.row_budgets:
        state[ROW_BUDGET] = state[ROW_BUDGET] + to_admit.pins_on_top(policy)[:, None, None]
    for name, dtype in layout.state().items():
        state[name] = join(past.state[name], initial.get(name, torch.zeros_like(new_position, dtype=dtype)[:, None]))
    position = join(past.position, new_position.masked_fill(~valid, FREE)[:, None])
    tokens = Tokens(
        position=position,
        seen=(past.seen + count[:, -1])[:, None, None],
        state=state,
        budget=layout.budget_in(state),
        cached_columns=0 if is_prompt else past.capacity,
        rank=rank_of(position) if policy.reads_rank else None,
        sharding=layout.sharding,
    )
    return tokens, join(past.index, new_index[:, None])


def _fill(layout: Layout, slots: Slots, candidates: _Candidates, keep: Tensor) -> None:
    """Write the tokens that stay to the first slots, and free the others."""
    tokens, index = candidates.tokens, candidates.index
    position = torch.where(keep, tokens.position, FREE)
    kept = slots_by_position(position)[..., : slots.capacity]  # [B, H', n]
    count = kept.shape[-1]
    slots.key.fill(candidates.key.gather(kept))
    slots.value.fill(candidates.value.gather(kept))
    for buffer, values in ((slots.position, position), (slots.index, index.masked_fill(~keep, FREE))):
        compacted = values.gather(-1, kept)
        buffer.fill_(FREE)
        buffer[..., :count] = compacted
    for name in layout.state():
        compacted = tokens.state[name].gather(-1, kept)
        slots.state[name].zero_()
        slots.state[name][..., :count] = compacted
    for name in layout.row_state():
        slots.state[name].copy_(tokens.state[name])
    slots.rank.copy_((slots.position >= 0).cumsum(-1) - 1)


def _merge_evicted(layout: Layout, slots: Slots, candidates: _Candidates, evicted: Tensor) -> None:
    """Let the policy merge evicted tokens into the filled slots."""
    count = int(evicted.sum(-1).max())
    by_position = slots_by_position(torch.where(evicted, candidates.tokens.position, FREE))
    evicted_indices = by_position[..., :count]  # [B, H', E]
    cached_keys, evicted_keys = slots.key.read(), candidates.key.gather(evicted_indices).read()
    merging = layout.pinned_tokens or layout.policy
    merge = merging.merge_evicted(slots.tokens(layout), cached_keys, evicted_keys, evicted.gather(-1, evicted_indices))
    for buffer, vectors in ((slots.key, candidates.key), (slots.value, candidates.value)):
        _merge_into(buffer, vectors, evicted_indices, merge)
    for name, changed in merge.state.items():
        slots.state[name].copy_(changed)


def _merge_into(buffer: EncodedVectors, vectors: EncodedVectors, evicted_indices: Tensor, merge: Merge) -> None:
    """Merge the vectors at `evicted_indices` [B, H', E] of [B, Hkv, N, D] into a buffer [B, Hkv, C, D]."""
    heads, cached = buffer.shape[1], upcast(buffer.read())
    into = merge.into.expand(-1, heads, -1)
    share = merge.share.new_zeros(buffer.shape[:3])
    share = share.scatter_add(-1, into, merge.share.expand(-1, heads, -1))[..., None]
    total = merge.own * cached
    for start in range(0, evicted_indices.shape[-1], MERGE_BLOCK):
        block = slice(start, start + MERGE_BLOCK)
        weighted = upcast(vectors.gather(evicted_indices[..., block]).read()) * merge.weight[..., block, None]
        total.scatter_add_(2, into[..., block, None].expand_as(weighted), weighted)
    buffer.replace(torch.where(share > 0, total / (merge.own + share), cached), share[..., 0] > 0)


def attention_of_chunk(layout: Layout, results: list[list[Tensor]], valid: Tensor) -> Attention | tuple[Attention, ...]:
    """Return `TokensToAdmit.attention` from the results of `split_by_class`; valid is bool [B, q]."""
    policy, count = layout.policy, len(layout.policy.statistics)
    found = [as_attention(policy, each[:count], valid, layout.sharding) for each in results if count]
    return attention_of_classes(found)


def attention_of_classes(attention: list[Attention]) -> Attention | tuple[Attention, ...]:
    """Return `TokensToAdmit.attention` from the attention of each class of heads."""
    return tuple(attention) if len(attention) > 1 else attention[0] if attention else Attention()


def split_by_class(layout: Layout, results: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide the statistics that `kvpass.cache.chunk_step.chunk_step` returned among the classes of heads."""
    count = len(results) // len(layout.by_class)
    return [list(results[i * count : (i + 1) * count]) for i in range(len(layout.by_class))]


@dataclasses.dataclass(frozen=True)
class TokensToAdmit:
    """The tokens of a prompt or chunk in their stored form, with the statistics that the policy reads.

    Attributes:
        key, value: [B, Hkv, q, D] and [B, Hkv, q, Dv]; the keys as they are stored.
        valid: bool [B, q], false for padding.
        attention: the statistics of the queries over [slots, chunk], N = C + q (N = q for a prompt); for slots in
            classes one for each class.
        pins: the tokens that the caller pins, or None.
        output_projection: the output projection's weight by head, [B or 1, Hkv, G, Dv, E], for policies that read it.
        operands: the operands of the statistics for each class of heads, if a crop may need them; else ().
    """

    key: Tensor
    value: Tensor
    valid: Tensor
    attention: Attention | tuple[Attention, ...]
    pins: Pins | None = None
    output_projection: Tensor | None = None
    operands: tuple[StatisticsOperands, ...] = ()

    def of_heads(self, heads: Tensor, attention: Attention) -> TokensToAdmit:
        """Return the keys and values of some heads, int64 [B, h], with their statistics and weights."""
        key, value, output = select_heads(self.key, heads), select_heads(self.value, heads), self.output_projection
        output = None if output is None else select_heads(output.expand(len(heads), -1, -1, -1, -1), heads)
        return dataclasses.replace(self, key=key, value=value, attention=attention, output_projection=output)

    def first_tokens(self, count: int) -> TokensToAdmit:
        """Return the first `count` tokens, without statistics."""
        key, value, valid = self.key[:, :, :count], self.value[:, :, :count], self.valid[:, :count]
        pins, cropped = self.pins and self.pins.first_tokens(count), self.valid.shape[1] - count
        operands = tuple(each.first_tokens(each.query.shape[2] - cropped) for each in self.operands)
        return TokensToAdmit(key, value, valid, Attention(), pins, self.output_projection, operands)

    def pinned_of(self, policy: Policy) -> Tensor:
        """Return bool [B, q]: the tokens to pin."""
        if policy.keep_prompt:
            return self.valid
        return torch.zeros_like(self.valid) if self.pins is None else self.pins.mask & self.valid

    def pins_on_top(self, policy: Policy) -> Tensor:
        """Return int64 [B]: the pinned tokens on top of the budget."""
        on_top = self.pins is not None and self.pins.on_top
        return self.pinned_of(policy).sum(-1) * on_top

    def raised_budgets(self, policy: Policy, budgets: Sequence[int]) -> tuple[int, ...]:
        """Return the budgets of the rows after the tokens are admitted."""
        if self.pins is None or not self.pins.on_top:
            return tuple(budgets)
        return tuple(budget + more for budget, more in zip(budgets, self.pins_on_top(policy).tolist(), strict=True))
