"""Find nearest neighbours of keys by cosine similarity."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.ranking import LATE, rows_in_order
from kvpass.torch_private.inductor import materialized

BLOCK = 64  # keys compared with all others at a time: their cosines stay in the CPU's caches
MIN_NORM = 1e-12


def nearest(key: Tensor, held: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each key its most similar live slot; of equals the one of lowest position.

    Args:
        key: [B, Hkv, E, D]; held: [B, Hkv, C, D].
        position: int64 [B, Hkv, C], negative for free slots.

    Returns:
        The cosines, float32 [B, Hkv, E], and the slots, int64 [B, Hkv, E].
    """
    if key.shape[2] != 1:
        return _nearest_of_many(key, held, position)
    cosine = _cosines_on_cpu(key, held) if key.device.type == "cpu" else _cosines_on_gpu(key, held)  # [B, Hkv, 1, C]
    cosine = torch.where(position[:, :, None] < 0, -torch.inf, cosine)
    best = cosine.amax(-1, keepdim=True)
    return best[..., 0], torch.where(cosine == best, position[:, :, None], LATE).argmin(-1)


def _nearest_of_many(key: Tensor, held: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return `nearest` for evicted keys of prompts and chunks, in blocks and uncompiled."""
    batch, heads, count, _ = key.shape
    # Slots are sorted by position, free ones last, because `max` finds the first of equals.
    order = rows_in_order(position)[..., : max(1, int((position >= 0).sum(-1).max()))]
    sorted_rows = held.gather(2, order[..., None].expand(*order.shape, held.shape[3]))
    unit_slots = _unit(sorted_rows).flatten(0, 1).transpose(1, 2)  # [B * Hkv, D, n]
    hidden = torch.where(position.gather(-1, order) < 0, -torch.inf, 0.0).flatten(0, 1)[:, None]
    blocks = [_unit(block).flatten(0, 1) for block in torch.split(key, BLOCK, 2)]
    best = [torch.baddbmm(hidden, block, unit_slots).max(-1) for block in blocks]
    cosine, index = (torch.cat(each, 1).view(batch, heads, count) for each in zip(*best, strict=True))
    return cosine, order.gather(-1, index)


def _unit(key: Tensor) -> Tensor:
    return key.float() / _norm(key)[..., None]


def _cosines_on_gpu(key: Tensor, held: Tensor) -> Tensor:
    """Return cosines [B, Hkv, 1, C] on a GPU, in one launch with the norms and without a converted copy."""
    product = (key[..., None, :].float() * held[:, :, None].float()).sum(-1)
    return product / (_norm(key)[..., None] * _norm(held)[:, :, None])


def _cosines_on_cpu(key: Tensor, held: Tensor) -> Tensor:
    """Return cosines [B, Hkv, 1, C] on a CPU, in one pass over the slots and without a converted copy.

    On a CPU, products and norms share one loop over the slots only if both read values of the head.  A compiler would
    run norms alone in a loop of their own, over all slots as one long row.  On a GPU this would cost two more launches.
    """
    inverse_norm = materialized(1 / _norm(key)[..., None])  # [B, Hkv, 1, 1]
    slots = held.float() * inverse_norm
    product = (slots * materialized(key.float() * inverse_norm)).sum(-1)  # [B, Hkv, C]
    norm = torch.maximum(slots.square().sum(-1).sqrt(), MIN_NORM * inverse_norm[..., 0])
    return (product / norm)[:, :, None]


def _norm(key: Tensor) -> Tensor:
    return key.float().square().sum(-1).sqrt().clamp(min=MIN_NORM)
