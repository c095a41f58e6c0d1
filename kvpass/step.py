"""What one attention layer does with new tokens: write, attend, observe, evict.

`decode_step` takes one token and is static: the rewrite traces it and splices it into the decode graph.
`extend_step` takes a chunk on live slots and leaves them alone; `kvpass.slots.admit` then takes the chunk in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvpass.lowering.attend import attend
from kvpass.lowering.column_scores import column_scores
from kvpass.policies.base import Attention, Policy, Tokens
from kvpass.slots import FREE, Layout, Slots


class Mask(Protocol):
    """The model's own mask, asked about keys at any place of the padded sequence."""

    def __call__(self, index: Tensor) -> Tensor:
        """index int64 [B, H', N] -> bool or additive [B, Hkv or 1, G or 1, q, N]."""


Rotate = Callable[[Tensor, Tensor], list[Tensor]]
"""The model's own rotary embedding: keys [B, Hkv, N, D] at positions int64 [B, H', N], in pieces of D."""


@dataclasses.dataclass(frozen=True)
class Site:
    """What the graph says about one attention call.

    Attributes:
        scale: multiplies the logits.
        mask: the model's mask on slots, or None.
        rotate: the model's rotary embedding, or None when stored keys are attended to as they are.
    """

    scale: float
    mask: Mask | None = None
    rotate: Rotate | None = None


def decode_step(
    layout: Layout, site: Site, slots: Slots, query: Tensor, key: Tensor, value: Tensor, real: Tensor
) -> Tensor:
    """Write one token to the free slot, attend, let the policy observe and free the next slot.

    Args:
        slots: overwritten in place.
        query: [B, Hq, 1, D]; key: [B, Hkv, 1, D], as it is stored; value: [B, Hkv, 1, Dv].
        real: bool [B], false for a row whose token is padding.

    Returns:
        The attention output [B, Hq, 1, Dv].
    """
    fresh = _here(slots.free, layout.capacity) & real[:, None, None]  # [B, H', C]
    position = torch.where(fresh, slots.seen[:, None, None], slots.position)
    index = torch.where(fresh, slots.length[:, None, None], slots.index)
    rank = torch.where(fresh, slots.position.ge(0).sum(-1, keepdim=True), slots.rank) if layout.ranked else slots.rank
    state = {name: torch.where(fresh, torch.zeros_like(old), old) for name, old in slots.state.items()}
    _write(slots, key, value)
    grouped = query.unflatten(1, (layout.heads, -1))  # [B, Hkv, G, 1, D]
    output, probabilities = _attend(site, slots, grouped, position, index, rank)
    seen = slots.seen + real
    tokens = Tokens(position, seen[:, None, None], state, layout.budget)
    tokens = dataclasses.replace(tokens, state=layout.policy.observe(tokens, _one_query(probabilities, real)))
    victim = first_to_go(layout.policy, tokens)  # [B, H']
    _commit(layout, slots, tokens, index, rank, victim, seen)
    return output.flatten(1, 2)


def _here(slot: Tensor, capacity: int) -> Tensor:
    """bool [B, H', C]: true at `slot` [B, H']."""
    return torch.arange(capacity, device=slot.device) == slot[..., None]


def _write(slots: Slots, key: Tensor, value: Tensor) -> None:
    """One row of K and one of V, in place, at the free slot of each head."""
    rows, heads = key.shape[:2]
    row = torch.arange(rows, device=key.device)[:, None]
    head = torch.arange(heads, device=key.device)[None]
    where = (row, head, slots.free.expand(-1, heads))
    slots.key.index_put_(where, key[:, :, 0].to(slots.key.dtype))
    slots.value.index_put_(where, value[:, :, 0].to(slots.value.dtype))


def _attend(site: Site, slots: Slots, query: Tensor, position: Tensor, index: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    mask = (position >= 0)[:, :, None, None]  # [B, H', 1, 1, C]
    mask, bias = with_mask(mask, site.mask(index) if site.mask else None)
    rotate = site.rotate
    rotated = None if rotate is None else lambda keys: rotate(keys, rank)
    return attend(query, slots.key, slots.value, scale=site.scale, mask=mask, bias=bias, rotate=rotated)


def with_mask(live: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The boolean mask and the additive bias that `live` and the model's own mask make together."""
    if mask is None:
        return live, None
    return (live & mask, None) if mask.dtype == torch.bool else (live, mask)


def _one_query(probabilities: Tensor, real: Tensor) -> Attention:
    row = probabilities[..., 0, :] * real[:, None, None, None]  # [B, Hkv, G, C]
    return Attention(row, row.square(), row, row, real.long()[:, None, None])


def first_to_go(policy: Policy, tokens: Tokens) -> Tensor:
    """The slot [B, H'] to be overwritten next: a free one, else that of the token worth least.

    Of tokens of equal worth the latest goes.
    """
    if policy.evicts:
        worth = policy.worth(tokens)
        lowest = -torch.inf if worth.is_floating_point() else torch.iinfo(worth.dtype).min
        worth = torch.where(tokens.live, worth, lowest)
        least = worth == worth.amin(-1, keepdim=True)
    else:
        least = ~tokens.live
    age = torch.where(tokens.live, tokens.position, torch.iinfo(torch.int64).max)
    return torch.where(least, age, FREE).argmax(-1)


def _commit(layout: Layout, slots: Slots, tokens: Tokens, index: Tensor, rank: Tensor, victim: Tensor, seen: Tensor) -> None:
    """Store the metadata, with the victim's slot freed."""
    gone = _here(victim, layout.capacity)
    gone = gone if layout.policy.evicts else torch.zeros_like(gone)
    if layout.ranked:
        left = torch.where(gone & tokens.live, rank, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
        slots.rank.copy_(torch.where(rank > left, rank - 1, rank))
    slots.position.copy_(torch.where(gone, FREE, tokens.position))
    slots.index.copy_(torch.where(gone, FREE, index))
    slots.free.copy_(victim)
    slots.seen.copy_(seen)
    slots.length.add_(1)
    for name, old in slots.state.items():
        old.copy_(tokens.state[name])


def extend_step(
    layout: Layout, site: Site, slots: Slots, query: Tensor, key: Tensor, value: Tensor, real: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Attend with a chunk of queries to [held slots, chunk], causally within the chunk.

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, q, D], as it is attended to; value: [B, Hkv, q, Dv].
        real: bool [B, q].

    Returns:
        The attention output [B, Hq, q, Dv] and the column statistics [B, Hkv, G, C + q], an empty list
        if the policy asks for none.
    """
    count = query.shape[2]
    step = torch.arange(count, device=query.device)
    causal = (step <= step[:, None])[None, None, None] & real[:, None, None, None]  # [B, 1, 1, q, q]
    running = slots.length[:, None] + step
    index = torch.cat([slots.index, running[:, None].expand(-1, layout.groups, -1)], -1)
    live = (slots.position >= 0)[:, :, None, None].expand(-1, -1, -1, count, -1)
    mask = torch.cat([live, causal.expand(-1, layout.groups, -1, -1, -1)], -1)  # [B, H', 1, q, C + q]
    mask, bias = with_mask(mask, site.mask(index) if site.mask else None)
    held = slots.key if site.rotate is None else torch.cat(site.rotate(slots.key, slots.rank), -1)
    keys = torch.cat([held, key.to(held.dtype)], 2)
    values = torch.cat([slots.value, value.to(held.dtype)], 2)
    full = _per_query_head(mask, bias, query.shape[1], layout.heads, query.dtype)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=full, scale=site.scale, enable_gqa=True
    )
    if not layout.policy.statistics:
        return output, []
    return output, column_scores(query, keys, full, real, False, site.scale, layout.policy.window)


def _per_query_head(mask: Tensor, bias: Tensor | None, query_heads: int, heads: int, dtype: torch.dtype) -> Tensor:
    """The mask as [B, Hq or 1, q, N], boolean or additive."""
    if bias is not None:
        mask = torch.where(mask, bias.to(dtype), torch.finfo(dtype).min)
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask[:, 0]
    return mask.expand(-1, heads, query_heads // heads, -1, -1).flatten(1, 2)
