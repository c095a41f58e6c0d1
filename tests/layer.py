"""Drive one attention layer like a model, with padding and chunks, on slots and on the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpass.cache.admission import TokensToAdmit, admit, attention_of_chunk, split_by_class
from kvpass.cache.cached_attention import CachedAttention, Mask, NewTokens
from kvpass.cache.chunk_step import chunk_step
from kvpass.cache.layout import Layout
from kvpass.cache.slots import Slots, next_rank
from kvpass.cache.step import decode_step, with_logit_scale
from kvpass.diagnostics.simulate import rotary
from kvpass.lowering.attention_statistics import StatisticsOperands, statistics
from kvpass.lowering.formats import KVDtype
from kvpass.policies import Policy
from kvpass.policies.budgets import window_starts
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Attention
from kvpass.reference import ReferenceLayer, reference_of
from kvpass.reference.layer import attend
from kvpass.runtime.clocks import clock_of, next_clock

Step = Callable[..., Tensor]


@dataclasses.dataclass
class CallTokens:
    """Tokens of one call: q [B, Hq, n, D], k, v [B, Hkv, n, D] before RoPE, valid [B, n]."""

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor
    pins: Pins | None = None


def layout_for(
    policy: Policy,
    budget: int,
    tokens: CallTokens,
    ranked: bool,
    spare: int = 0,
    kv_dtype: KVDtype | None = None,
    limits: Sequence[int] = (),
) -> Layout:
    """Return the layout of a layer, with slots for the largest budget; `limits` are budgets of rows, if they differ."""
    rows, heads, count, dim = tokens.k.shape
    capacity = max(policy.capacity(largest, count) for largest in (budget, *limits)) + spare
    sizes = (policy, budget, capacity, rows, heads, dim, dim)
    storage = dict(kv_dtype=kv_dtype, row_budgets=bool(limits))
    return Layout(*sizes, tokens.k.dtype, tokens.k.device, ranked, **storage).with_head_classes()


def positions_of(first: Tensor, valid: Tensor) -> Tensor:
    """Return positions [B, 1, n] that count the real tokens from `first` on."""
    return (first + (valid.long().cumsum(-1) - 1)[:, None]).clamp(min=0)


class LayerOnSlots:
    """Run a layer with the operations that kvpass splices into graphs."""

    def __init__(self, layout: Layout, theta: float, limits: Sequence[int] = (), step: Step = decode_step) -> None:
        self.layout, self.theta, self.limits, self.step = layout, theta, limits, step
        self.knows_padding = True  # in steps: the host knows it except on a GPU
        self.scale = layout.key_dim**-0.5
        self.slots: Slots | None = None
        self.clocks = [()] * layout.batch

    def rotate(self, keys: Tensor, position: Tensor) -> Tensor:
        return rotary(keys, position, self.theta)

    def feed(self, tokens: CallTokens) -> Tensor:
        policy, slots, ranked = self.layout.policy, self.slots, self.layout.stores_unrotated_keys
        limits = tuple(self.limits) or (self.layout.budget,) * self.layout.batch
        budget = torch.tensor(limits)[:, None]
        call = CachedAttention(
            self.scale, None, (lambda keys, rank: [self.rotate(keys.join(), rank)]) if ranked else None
        )
        if slots is None:
            first = torch.zeros(len(tokens.q), 1, 1, dtype=torch.int64)
        else:
            first = slots.seen[:, None, None]
            if ranked or policy.renumbers:
                decodes = tokens.valid.shape[1] == 1
                first = next_rank(slots.position, slots.free, decodes)[:, None, None]
        position = positions_for(policy, budget, first, tokens.valid, slots is None)
        q, k = self.rotate(tokens.q, position), self.rotate(tokens.k, position)
        to_admit = TokensToAdmit(tokens.k if ranked else k, tokens.v, tokens.valid, Attention(), tokens.pins)
        if slots is not None and tokens.valid.shape[1] == 1 and slots.capacity == self.layout.capacity:
            counted = tokens.valid[:, 0].tolist() if self.knows_padding else [True] * len(limits)
            if tokens.pins is not None:
                self.limits = limits = to_admit.raised_budgets(policy, limits)
            rows = zip(self.clocks, limits, counted, strict=True)
            ticks = [next_clock(self.layout, clock, limit) if real else (False, clock) for clock, limit, real in rows]
            self.clocks = [clock for _, clock in ticks]
            compact = any(due for due, _ in ticks)
            if tokens.pins is not None:
                slots.pin_next(tokens.pins)
            return self.step(
                self.layout, call, slots, NewTokens(q, to_admit.key, tokens.v, tokens.valid[:, 0]), compact
            ).output
        if slots is None:
            q = with_logit_scale(policy, q, tokens.valid.sum(-1, keepdim=True))
            mask = prompt_mask(tokens.valid, policy, budget)
            output = torch.nn.functional.scaled_dot_product_attention(
                q, k, tokens.v, attn_mask=mask, scale=self.scale, enable_gqa=True
            )
            sums: Sequence[Tensor] = []
            if policy.statistics:
                spec = StatisticsOperands(q, k, mask, False, self.scale, heads=k.shape[1], sharding=None)
                scanned = budget[..., None] if self.limits else self.layout.budget
                sums = statistics(policy, spec, tokens.valid, scanned)
        else:
            call = dataclasses.replace(call, mask=causal(slots, tokens.valid.shape[1]))
            output, *_, sums = chunk_step(self.layout, call, slots, NewTokens(q, k, tokens.v, tokens.valid))
        attention = attention_of_chunk(
            self.layout, [sums] if slots is None else split_by_class(self.layout, sums), tokens.valid
        )
        self.slots = admit(self.layout, slots, dataclasses.replace(to_admit, attention=attention), self.limits)
        self.limits = limits = to_admit.raised_budgets(policy, limits)
        counts = tokens.valid.sum(-1).tolist()
        rows = zip(self.clocks, counts, limits, strict=True)
        self.clocks = [clock_of(self.layout, *row) for row in rows]
        return output

    def positions(self) -> list[list[list[int]]]:
        assert self.slots is not None
        position = self.slots.joined_classes(self.layout).position.tolist()
        return [[sorted(p for p in head if p >= 0) for head in row] for row in position]


class LayerOnReference:
    """Run a layer with the eager reference."""

    def __init__(self, layout: Layout, theta: float, limits: Sequence[int] = ()) -> None:
        self.layout, self.theta = layout, theta
        self.layer = ReferenceLayer(layout, reference_of(layout.policy), limits)
        self.scale = layout.key_dim**-0.5

    def feed(self, tokens: CallTokens) -> Tensor:
        layer, ranked = self.layer, self.layout.stores_unrotated_keys
        layer.evict_before_step(tokens.valid)
        none = torch.zeros(len(tokens.q), self.layout.metadata_heads, 0, dtype=torch.int64)
        position = layer.positions() if layer.length else none
        live = position >= 0
        seen = torch.tensor([[[row[0].seen]] for row in layer.streams])
        policy, budget = self.layout.policy, torch.tensor([[row[0].budget] for row in layer.streams])
        counted = ranked or policy.renumbers
        first = live.sum(-1)[:, :1, None] if counted else seen
        position = positions_for(policy, budget, first, tokens.valid, not layer.length)
        q = rotary(tokens.q, position, self.theta) * layer.logit_scale(tokens.valid)
        k = rotary(tokens.k, position, self.theta)
        original, values, bias = tokens.k if ranked else k, tokens.v, None
        if layer.attends_to_stored(tokens.valid.shape[1]):
            stored_keys, values = layer.stored(original), layer.stored(values, key=False)
            k = rotary(stored_keys, position, self.theta) if ranked else stored_keys
        keys = k
        if layer.length:
            rows = layer.cached_vectors("key")
            keys = torch.cat([rotary(rows, layer.ranks().clamp(min=0), self.theta) if ranked else rows, k], 2)
            values = torch.cat([layer.cached_vectors("value"), values], 2)
            bias = layer.bias(q.shape[1] // k.shape[1])
        groups = q.shape[1] // self.layout.metadata_heads
        count = tokens.valid.shape[1]
        past_mask = live[:, :, None].expand(-1, -1, count, -1).repeat_interleave(groups, 1)
        new_mask = prompt_mask(tokens.valid) if layer.length else prompt_mask(tokens.valid, policy, budget)
        mask = torch.cat([past_mask, new_mask.expand(-1, q.shape[1], -1, -1)], -1)
        attended = attend(q, keys, values, mask, self.scale, policy_bias=bias)
        new = TokensToAdmit(original, tokens.v, tokens.valid, Attention(), tokens.pins)
        layer.take(new, attended.probabilities, attended.logits)
        return attended.output

    def positions(self) -> list[list[list[int]]]:
        return [[[token.position for token in stream.tokens] for stream in row] for row in self.layer.streams]


def causal(slots: Slots, count: int) -> Mask:
    """Return a causal mask function for `count` new tokens."""
    column = slots.length[:, None] + torch.arange(count)

    def mask(index: Tensor, position: Tensor, key_features: list[Tensor]) -> Tensor:
        return index[:, :, None, None] <= column[:, None, None, :, None]  # [B, H', 1, q, N]

    return mask


def positions_for(policy: Policy, budget: Tensor, first: Tensor, valid: Tensor, prompt: bool) -> Tensor:
    """Return the positions [B, 1, n] that a model gives new tokens; the budget is [B, 1]."""
    position = positions_of(first, valid)
    if not policy.renumbers:
        return position
    if prompt:
        return (position - window_starts(valid, budget)[:, None]).clamp(min=0)
    return position.clamp(max=policy.last_position())


def prompt_mask(valid: Tensor, policy: Policy | None = None, budget: int | Tensor = 0) -> Tensor:
    """Return a causal mask bool [B, 1, n, n] without padding; a policy that renumbers sees only its own window."""
    count = valid.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril() & valid[:, None]
    if policy is not None and policy.renumbers:
        starts = window_starts(valid, budget)
        mask = mask & (starts[:, :, None] == starts[:, None])
    return mask[:, None]
