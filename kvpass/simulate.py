"""Run a policy on one attention layer, without a model: to look at what it keeps, and to test it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpass import budget as budgets
from kvpass import policies
from kvpass.errors import KVPassError
from kvpass.lowering.column_scores import column_scores
from kvpass.policies.base import Attention, Policy
from kvpass.reference import ReferenceLayer, reference_of
from kvpass.reference.base import attention_rows
from kvpass.slots import FREE, Chunk, Layout, Slots, admit
from kvpass.step import Rotate, Site, decode_step

if TYPE_CHECKING:
    from kvpass.backend import Backend


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a layer kept and computed.

    Attributes:
        positions: int64 [T - prompt + 1, B, Hkv, C], sorted, -1 after the last: the tokens held when the
            prompt ends and after each step.
        output: [B, Hq, T, Dv].
        keys, values: [B, Hkv, C, D] and [B, Hkv, C, Dv], the final rows in the order of `positions[-1]`,
            zero after the last; keys as they are stored (before RoPE with `positions="cache"`).
    """

    positions: Tensor
    output: Tensor
    keys: Tensor
    values: Tensor


def simulate(
    policy: str | Policy | Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prompt: int,
    budget: int | float | None = None,
    positions: str | None = None,
    rope_theta: float | None = None,
    scale: float | None = None,
    compiled: bool = False,
    **policy_options: object,
) -> Trace:
    """Run one attention layer: the first `prompt` tokens at once, then one token at a time.

    Args:
        policy: a name, a policy object, or a `kvpass.backend(...)`, which brings budget and positions along.
        q: [B, Hq, T, D]; k: [B, Hkv, T, D]; v: [B, Hkv, T, Dv]; before RoPE.
        rope_theta: the base of a standard rotary embedding (halves rotated), or None for none.
        scale: multiplies the logits; 1/sqrt(D) by default.
        compiled: False runs the eager reference, True the operations that are lowered in a model.

    Raises:
        PolicyError, BudgetError: as `kvpass.backend`.
        KVPassError: shapes that do not fit together.
    """
    # Imported late: the backend draws in the whole compiler.
    from kvpass.backend import Backend, backend

    chosen = policy if isinstance(policy, Backend) else backend(policy, budget=budget, positions=positions, **policy_options)
    _check_shapes(q, k, v, prompt)
    layer = _Layer(chosen, q, k, v, prompt, rope_theta, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return _compiled(layer) if compiled else _reference(layer)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, prompt: int) -> None:
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or q.shape[2:] != k.shape[2:]:
        raise KVPassError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not make one attention layer")
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise KVPassError(f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads")
    if not 1 <= prompt <= q.shape[2]:
        raise KVPassError(f"prompt={prompt} must lie between 1 and the number of tokens, {q.shape[2]}")


def rotary(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Standard RoPE, halves rotated: x [B, H, N, D] at positions [B, 1 or H, N]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position[..., None].float() * frequency  # [B, 1 or H, N, D/2]
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


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
    def ranked(self) -> bool:
        return self.theta is not None and self.backend.prefers_ranks

    @property
    def layout(self) -> Layout:
        policy, (rows, heads, tokens, dim) = self.backend.policy, self.k.shape
        if self.backend.budget is None:
            kept = tokens
        else:
            kept = budgets.slots_for(policy, self.backend.budget, self.prompt)
        return Layout(
            policy, kept, kept + policy.evicts, rows, heads, dim, self.v.shape[-1], self.k.dtype, self.k.device, self.ranked
        )

    def rotated(self, x: Tensor, position: Tensor) -> Tensor:
        return x if self.theta is None else rotary(x, position, self.theta)

    @property
    def rotate(self) -> Rotate | None:
        return (lambda keys, rank: [self.rotated(keys, rank)]) if self.ranked else None

    def tokens(self, chosen: slice, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys at positions first, first + 1, ... [B, 1, n], and values."""
        q, k = self.q[:, :, chosen], self.k[:, :, chosen]
        position = first + torch.arange(q.shape[2], device=q.device).expand(q.shape[0], 1, -1)
        return self.rotated(q, position), self.rotated(k, position), self.v[:, :, chosen]

    def real(self, count: int) -> Tensor:
        return torch.ones(self.q.shape[0], count, dtype=torch.bool, device=self.q.device)


def _prompt(layer: _Layer) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attended and stored keys of the prompt, its queries and values, and its output."""
    q, k, v = layer.tokens(slice(0, layer.prompt), torch.zeros(layer.q.shape[0], 1, 1, dtype=torch.int64, device=layer.q.device))
    stored = layer.k[:, :, : layer.prompt] if layer.ranked else k
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True)
    return q, k, v, stored, output


def _compiled(layer: _Layer) -> Trace:
    layout, policy = layer.layout, layer.backend.policy
    q, k, v, stored, output = _prompt(layer)
    real = layer.real(layer.prompt)
    attention = Attention()
    if policy.statistics:
        sums = column_scores(q, k, None, real, True, layer.scale, policy.window)
        attention = Attention(*sums, queries=real.sum(-1)[:, None, None])
    slots = admit(layout, None, Chunk(stored, v, real, attention))
    outputs, held = [output], [_positions(layout, slots)]
    site = Site(layer.scale, None, layer.rotate)
    for t in range(layer.prompt, layer.q.shape[2]):
        live = (slots.position[:, :1] >= 0).sum(-1, keepdim=True)
        q, k, v = layer.tokens(slice(t, t + 1), live if layer.ranked else slots.length[:, None, None])
        stored = layer.k[:, :, t : t + 1] if layer.ranked else k
        outputs.append(decode_step(layout, site, slots, q, stored, v, layer.real(1)[:, 0]))
        held.append(_positions(layout, slots))
    keys, values = (_in_order(layout, slots, rows) for rows in (slots.key, slots.value))
    return Trace(torch.stack(held), torch.cat(outputs, 2), keys, values)


def _positions(layout: Layout, slots: Slots) -> Tensor:
    """Held positions [B, Hkv, budget], sorted, -1 after the last."""
    late = torch.where(slots.position < 0, torch.iinfo(torch.int64).max, slots.position).sort(-1).values
    late = torch.where(late == torch.iinfo(torch.int64).max, FREE, late)[..., : layout.budget]
    return late.expand(-1, layout.heads, -1).clone()


def _in_order(layout: Layout, slots: Slots, rows: Tensor) -> Tensor:
    """Rows [B, Hkv, budget, D] sorted by position, zero after the last."""
    order = torch.where(slots.position < 0, torch.iinfo(torch.int64).max, slots.position).argsort(-1)[..., : layout.budget]
    live = (slots.position.gather(-1, order) >= 0).expand(-1, layout.heads, -1)[..., None]
    chosen = order.expand(-1, layout.heads, -1)[..., None].expand(-1, -1, -1, rows.shape[-1])
    return torch.where(live, rows.gather(2, chosen), 0)


def _reference(layer: _Layer) -> Trace:
    layout = layer.layout
    reference = ReferenceLayer(layout, reference_of(layer.backend.policy))
    q, k, v, stored, output = _prompt(layer)
    real = layer.real(layer.prompt)
    causal = torch.ones(layer.prompt, layer.prompt, dtype=torch.bool, device=q.device).tril().expand(q.shape[0], 1, -1, -1)
    reference.take(Chunk(stored, v, real, Attention()), attention_rows(q, k, causal, None, layer.scale))
    outputs, held = [output], [reference.positions()]
    for t in range(layer.prompt, layer.q.shape[2]):
        outputs.append(_reference_step(layer, reference, t))
        held.append(reference.positions())
    positions = torch.stack([_widened(p, layout.budget).expand(-1, layout.heads, -1) for p in held])
    keys, values = (_widened(reference.rows(name).transpose(2, 3), layout.budget, 0.0).transpose(2, 3) for name in ("key", "value"))
    return Trace(positions, torch.cat(outputs, 2), keys, values)


def _reference_step(layer: _Layer, reference: ReferenceLayer, t: int) -> Tensor:
    held, ranks = reference.positions(), reference.ranks()
    first = ranks.amax(-1)[:, :1, None] + 1 if layer.ranked else torch.full((layer.q.shape[0], 1, 1), t, device=layer.q.device)
    q, k, v = layer.tokens(slice(t, t + 1), first)
    keys = reference.rows("key")
    attended = torch.cat([layer.rotated(keys, ranks) if layer.ranked else keys, k], 2)
    live = torch.nn.functional.pad(held >= 0, (0, 1), value=True)[:, :, None]
    mask = live.repeat_interleave(q.shape[1] // live.shape[1], 1)
    rows = attention_rows(q, attended, mask, None, layer.scale)  # [B, Hq, 1, N + 1]
    values = torch.cat([reference.rows("value"), v], 2).repeat_interleave(q.shape[1] // v.shape[1], 1)
    stored = layer.k[:, :, t : t + 1] if layer.ranked else k
    reference.take(Chunk(stored, v, layer.real(1), Attention()), rows)
    return rows.to(values.dtype) @ values


def _widened(x: Tensor, width: int, fill: float = FREE) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=fill)
