"""Simulate a policy on one attention layer without a model, to see which tokens the policy keeps."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpass.arguments import Condition, check_arguments, short_text
from kvpass.backend import Backend, backend
from kvpass.cache.admission import TokensToAdmit, admit
from kvpass.cache.cached_attention import CachedAttention, NewTokens, RotateToRanks
from kvpass.cache.layout import Layout
from kvpass.cache.slots import FREE, AnySlots, Slots, next_rank
from kvpass.cache.step import decode_step, with_logit_scale
from kvpass.errors import BudgetError, KVPassError, PolicyError
from kvpass.lowering.attention_statistics import StatisticsOperands
from kvpass.lowering.formats import EncodedVectors, KVDtype
from kvpass.policies.base import Policy
from kvpass.policies.budgets import Plan, window_starts
from kvpass.policies.ranking import slots_by_position
from kvpass.policies.types import Attention
from kvpass.reference import ReferenceLayer, reference_of
from kvpass.reference.layer import attend
from kvpass.runtime.backend_base import Positions
from kvpass.runtime.clocks import clock_of, next_clock
from kvpass.user_budget import Budget, slots_for

Heads = Annotated[
    Tensor,
    Condition(
        holds=lambda x: x.ndim == 4 and x.numel() > 0 and x.is_floating_point() and not x.is_meta,
        message="must be a floating-point tensor [rows, heads, tokens, features] that is not empty",
    ),
]


@dataclasses.dataclass(frozen=True)
class Trace:
    """Record of the tokens that a simulated layer kept, and of its output.

    Attributes:
        positions: int64 [T - prompt + 1, B, Hkv, C], sorted, -1 after the last: the tokens cached after the
            prompt and after each step.
        output: [B, Hq, T, Dv].
        keys, values: [B, Hkv, C, D] and [B, Hkv, C, Dv], the final rows in the order of `positions[-1]`,
            zero after the last; keys as stored (before RoPE with `positions="cache"`).
    """

    positions: Tensor
    output: Tensor
    keys: Tensor
    values: Tensor


@check_arguments
def simulate(
    policy: str | Policy | Backend,
    q: Heads,
    k: Heads,
    v: Heads,
    *,
    prompt: int,
    budget: Budget = None,
    positions: Positions | None = None,
    rope_theta: Annotated[float, Condition("above 0", lambda base: 0 < base < math.inf)] | None = None,
    scale: Annotated[float, Condition("that is finite", math.isfinite)] | None = None,
    kv_dtype: KVDtype | None = None,
    compiled: bool = False,
    **policy_options: Any,
) -> Trace:
    """Run one attention layer under a policy: first the prompt, then one token at a time.

    >>> trace = kvpass.simulate("h2o", q, k, v, prompt=64, budget=32)
    >>> trace.positions[-1]              # int64 [B, Hkv, C], the tokens cached at the end

    Args:
        policy: a name, a policy object, or a `kvpass.backend(...)`, which supplies budget, positions and kv_dtype.
            A policy with weights for each layer of a model gets the weights of the first layer.
        q: [B, Hq, T, D], before RoPE.
        k: [B, Hkv, T, D], before RoPE.
        v: [B, Hkv, T, Dv].
        prompt: the number of first tokens that are processed together.
        budget: tokens kept between steps, see `kvpass.backend`.
        positions: "absolute" or "cache", see `kvpass.backend`.
        rope_theta: the base of a standard rotary embedding (halves rotated), or None for no rotary embedding.
        scale: multiplies the logits; 1/sqrt(D) by default.
        kv_dtype: see `kvpass.backend`.
        compiled: False runs the eager reference, True the operations that are lowered in a model.
        policy_options: options of the policy, by name.

    Returns:
        The cached tokens after each step, the output of the layer, and the final rows.

    Raises:
        PolicyError: see `kvpass.backend`, or a setting in addition to a backend, which has its own settings.
        BudgetError: see `kvpass.backend`, or a budget below all tokens for a policy that keeps every token.
        KVPassError: shapes that do not fit together.
    """
    settings = dict(budget=budget, positions=positions, kv_dtype=kv_dtype, **policy_options)
    _check_shapes(q, k, v, prompt, rope_theta)
    given = [name for name, value in settings.items() if value is not None]
    if isinstance(policy, Backend) and given:
        raise PolicyError(f"{', '.join(given)}: must be set in the backend {policy}, and not in addition to it")
    chosen = policy if isinstance(policy, Backend) else backend(policy, **settings)
    layer = _Layer(chosen, q, k, v, prompt, rope_theta, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return _run_compiled(layer) if compiled else _run_reference(layer)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, prompt: int, theta: float | None) -> None:
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        raise KVPassError(
            f"q {short_text(q)}, k {short_text(k)}, v {short_text(v)} must have one dtype and be on one device"
        )
    if theta is not None and q.shape[3] % 2:
        raise KVPassError(f"rope_theta={theta}: heads of {q.shape[3]} features have no halves to rotate")
    if k.shape[:3] != v.shape[:3] or q.shape[2:] != k.shape[2:]:
        raise KVPassError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not make one attention layer")
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise KVPassError(f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads")
    if not 1 <= prompt <= q.shape[2]:
        raise KVPassError(f"prompt={prompt} must be between 1 and the number of tokens, {q.shape[2]}")


def rotary(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Apply a standard rotary embedding, halves rotated, to x [B, H, N, D] at positions [B, 1 or H, N]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position[..., None].float() * frequency  # [B, 1 or H, N, D/2]
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    rotated = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


@dataclasses.dataclass
class _Layer:
    backend: Backend
    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int
    theta: float | None
    scale: float

    @property
    def policy(self) -> Policy:
        return self.backend.policy

    @property
    def stores_unrotated_keys(self) -> bool:
        return self.theta is not None and self.backend.prefers_cache_positions

    @property
    def budget(self) -> int:
        """Tokens to keep between steps; all tokens for a policy that never evicts."""
        budget, tokens = self.backend.budget, self.k.shape[2]
        kept = tokens if budget is None else slots_for(self.policy, budget, self.prompt)
        if not self.policy.evicts and kept < tokens:
            raise BudgetError(f"budget={budget}: {self.policy.name!r} cannot keep {tokens} tokens")
        return kept

    def layout(self, plan: Plan) -> Layout:
        batch, heads, _, dim = self.k.shape
        return Layout(
            policy=self.policy,
            budget=self.budget,
            capacity=plan.capacity,
            batch=batch,
            heads=heads,
            key_dim=dim,
            value_dim=self.v.shape[-1],
            dtype=self.k.dtype,
            device=self.k.device,
            stores_unrotated_keys=self.stores_unrotated_keys,
            kv_dtype=self.backend.kv_dtype,
            row_budgets=plan.differs(self.budget),
        ).with_head_classes()

    def rotated(self, x: Tensor, position: Tensor) -> Tensor:
        return x if self.theta is None else rotary(x, position, self.theta)

    def tokens(self, chosen: slice, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys at positions first, first + 1, ... (`first` is [B, 1, 1 or n]), and values."""
        q, k = self.q[:, :, chosen], self.k[:, :, chosen]
        position = first + torch.arange(q.shape[2], device=q.device).expand(q.shape[0], 1, -1)
        return self.rotated(q, position), self.rotated(k, position), self.v[:, :, chosen]

    def step(self, t: int, rank: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query, attended key, value and stored key of token t, whose cache position is `rank` [B, 1, 1]."""
        counted = self.stores_unrotated_keys or self.policy.renumbers
        q, k, v = self.tokens(slice(t, t + 1), rank if counted else torch.full_like(rank, t))
        return q, k, v, self.k[:, :, t : t + 1] if self.stores_unrotated_keys else k

    def valid(self, count: int) -> Tensor:
        return torch.ones(self.q.shape[0], count, dtype=torch.bool, device=self.q.device)


def _prompt(layer: _Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, attended keys, values and stored keys of the prompt."""
    q, k, v = layer.tokens(slice(0, layer.prompt), -_window_starts(layer)[:, None])
    return q, k, v, layer.k[:, :, : layer.prompt] if layer.stores_unrotated_keys else k


def _window_starts(layer: _Layer) -> Tensor:
    """Return the start of each prompt token's window, int64 [B, P]; 0 if the policy does not renumber."""
    valid = layer.valid(layer.prompt)
    return window_starts(valid, layer.budget) if layer.policy.renumbers else torch.zeros_like(valid, dtype=torch.int64)


def _prompt_mask(layer: _Layer) -> Tensor:
    """Return the attention mask of the prompt, bool [B, 1, P, P]."""
    starts, index = _window_starts(layer), torch.arange(layer.prompt, device=layer.q.device)
    return ((starts[:, :, None] == starts[:, None]) & (index <= index[:, None]))[:, None]


def _run_compiled(layer: _Layer) -> Trace:
    policy, valid = layer.policy, layer.valid(layer.prompt)
    q, k, v, stored = _prompt(layer)
    q = with_logit_scale(policy, q, valid.sum(-1, keepdim=True))
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=_prompt_mask(layer), scale=layer.scale, enable_gqa=True
    )
    operands = StatisticsOperands(q, k, None, True, layer.scale, heads=k.shape[1], sharding=None)
    attention = operands.attention(policy, valid, layer.budget)
    plan = policy.plan([attention], valid, layer.budget)[0]
    layout = layer.layout(plan)
    slots = admit(layout, None, TokensToAdmit(stored, v, valid, attention), plan.budgets_of_rows(len(q)))
    clock = clock_of(layout, (), layer.prompt, plan.budget)
    outputs, positions = [output], [_positions(layout, slots)]
    for t in range(layer.prompt, layer.q.shape[2]):
        compact, clock = next_clock(layout, clock, plan.budget)
        outputs.append(_compiled_step(layer, layout, slots, t, compact))
        positions.append(_positions(layout, slots))
    whole = slots.joined_classes(layout)
    return _trace(layer, positions, outputs, [_in_order(whole, rows) for rows in (whole.key, whole.value)])


def _compiled_step(layer: _Layer, layout: Layout, slots: AnySlots, t: int, compact: bool) -> Tensor:
    rotate: RotateToRanks | None = (
        (lambda keys, rank: [layer.rotated(keys.join(), rank)]) if layer.stores_unrotated_keys else None
    )
    attention, valid = CachedAttention(layer.scale, None, rotate), layer.valid(1)
    joined = slots.joined_classes(layout)
    q, _, v, stored = layer.step(t, next_rank(joined.position, joined.free, decodes=True)[:, None, None])
    return decode_step(layout, attention, slots, NewTokens(q, stored, v, valid[:, 0]), compact).output


def _positions(layout: Layout, slots: AnySlots) -> Tensor:
    """Return the positions of cached tokens, [B, H', C], sorted, -1 after the last."""
    position = slots.joined_classes(layout).position
    return position.gather(-1, slots_by_position(position))


def _in_order(slots: Slots, rows: EncodedVectors) -> Tensor:
    """Return the cached vectors [B, Hkv, C, D] in their decoded form, sorted by position, zero after the last."""
    order = slots_by_position(slots.position)
    live = (slots.position.gather(-1, order) >= 0)[..., None]
    return torch.where(live, rows.gather(order).read(), 0)


def _run_reference(layer: _Layer) -> Trace:
    q, k, v, stored = _prompt(layer)
    valid, rule = layer.valid(layer.prompt), reference_of(layer.policy)
    attended = attend(q * rule.logit_scale(layer.prompt), k, v, _prompt_mask(layer), layer.scale)
    total = torch.unflatten(attended.probabilities.sum(2), 1, (k.shape[1], -1))  # [B, Hkv, G, P]
    plan = layer.policy.plan([Attention(total=total)], valid, layer.budget)[0]
    reference = ReferenceLayer(layer.layout(plan), rule, plan.budgets_of_rows(len(q)))
    reference.take(TokensToAdmit(stored, v, valid, Attention()), attended.probabilities, attended.logits)
    outputs, positions = [attended.output], [reference.positions()]
    for t in range(layer.prompt, layer.q.shape[2]):
        outputs.append(_reference_step(layer, reference, t))
        positions.append(reference.positions())
    return _trace(layer, positions, outputs, [reference.cached_vectors(name, stored=True) for name in ("key", "value")])


def _reference_step(layer: _Layer, reference: ReferenceLayer, t: int) -> Tensor:
    valid = layer.valid(1)
    reference.evict_before_step(valid)
    position, ranks = reference.positions(), reference.ranks()
    rank = ranks.amax(-1)[:, :1, None] + 1
    q, k, v, stored = layer.step(t, rank)
    if reference.attends_to_stored(1):
        kept, v = reference.stored(stored), reference.stored(v, key=False)
        k = layer.rotated(kept, rank) if layer.stores_unrotated_keys else kept
    q = q * reference.logit_scale(valid)
    keys, values = (reference.cached_vectors(name) for name in ("key", "value"))
    keys = torch.cat([layer.rotated(keys, ranks) if layer.stores_unrotated_keys else keys, k], 2)
    live = torch.nn.functional.pad(position >= 0, (0, 1), value=True)[:, :, None]
    mask = live.repeat_interleave(q.shape[1] // live.shape[1], 1)
    bias = reference.bias(q.shape[1] // k.shape[1])
    attended = attend(q, keys, torch.cat([values, v], 2), mask, layer.scale, policy_bias=bias)
    new = TokensToAdmit(stored, layer.v[:, :, t : t + 1], valid, Attention())
    reference.take(new, attended.probabilities, attended.logits)
    return attended.output.to(layer.q.dtype)


def _trace(layer: _Layer, positions: list[Tensor], outputs: list[Tensor], rows: list[Tensor]) -> Trace:
    """Return the trace for positions [B, H', n] after each step and final rows, cut or padded to equal lengths."""
    width, pad = max(layer.budget, *(int((p >= 0).sum(-1).max()) for p in positions)), torch.nn.functional.pad
    fitted = [pad(p, (0, width - p.shape[-1]), value=FREE).expand(-1, layer.k.shape[1], -1) for p in positions]
    keys, values = (pad(x, (0, 0, 0, width - x.shape[2])) for x in rows)
    return Trace(torch.stack(fitted), torch.cat(outputs, 2), keys, values)
