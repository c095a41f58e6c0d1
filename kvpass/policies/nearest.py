"""Nearest neighbours of keys by their cosine."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.base import LATE, rows_in_order
from kvpass.torch_private.inductor import materialized

BLOCK = 64  # keys compared with all others at a time: their cosines stay in caches
LEAST = 1e-12  # of a norm


def nearest(key: Tensor, held: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """For each key its most similar slot that holds a token; of equals the one of lower position.

    Args:
        key: [B, Hkv, E, D]; held: [B, Hkv, C, D].
        position: int64 [B, Hkv, C], negative for free slots.

    Returns:
        The cosines, float32 [B, Hkv, E], and the slots, int64 [B, Hkv, E].
    """
    if key.shape[2] != 1:
        return _nearest_of_many(key, held, position)
    cosine = _nearest_of_one(key, held) if key.device.type == "cpu" else _at_once(key, held)  # [B, Hkv, 1, C]
    cosine = torch.where(position[:, :, None] < 0, -torch.inf, cosine)
    best = cosine.amax(-1, keepdim=True)
    return best[..., 0], torch.where(cosine == best, position[:, :, None], LATE).argmin(-1)


def _nearest_of_many(key: Tensor, held: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """`nearest` of the keys that a prompt or a chunk drops, which nothing compiles: one product and one pass a block.

    Slots are put in order of position, free ones last, as of equals the first is found.
    """
    batch, heads, count, _ = key.shape
    order = rows_in_order(position)[..., : max(1, int((position >= 0).sum(-1).max()))]
    rows = held.gather(2, order[..., None].expand(*order.shape, held.shape[3]))
    slots = _unit(rows).flatten(0, 1).transpose(1, 2)  # [B * Hkv, D, n]
    hidden = torch.where(position.gather(-1, order) < 0, -torch.inf, 0.0).flatten(0, 1)[:, None]
    blocks = [_unit(block).flatten(0, 1) for block in torch.split(key, BLOCK, 2)]
    found = [torch.baddbmm(hidden, block, slots).max(-1) for block in blocks]
    cosine, index = (torch.cat(each, 1).view(batch, heads, count) for each in zip(*found, strict=True))
    return cosine, order.gather(-1, index)


def _unit(key: Tensor) -> Tensor:
    """Keys of length one, in float32."""
    return key.float() / _norm(key)[..., None]


def _at_once(key: Tensor, held: Tensor) -> Tensor:
    """Cosines [B, Hkv, 1, C] in a step on a GPU: no converted copy of the slots, and one launch with the norms."""
    product = (key[..., None, :].float() * held[:, :, None].float()).sum(-1)
    return product / (_norm(key)[..., None] * _norm(held)[:, :, None])


def _nearest_of_one(key: Tensor, held: Tensor) -> Tensor:
    """Cosines [B, Hkv, 1, C] of a decode step's key, in one pass over the slots and with no converted copy of them.

    On a CPU products and norms go through the slots together if both read something of the head: a compiler walks
    through norms alone as one long row of slots, in a loop of its own.  On a GPU that would be two launches more.
    """
    shrink = materialized(1 / _norm(key)[..., None])  # [B, Hkv, 1, 1]
    slots = held.float() * shrink
    product = (slots * materialized(key.float() * shrink)).sum(-1)  # [B, Hkv, C]
    length = torch.maximum(slots.square().sum(-1).sqrt(), LEAST * shrink[..., 0])
    return (product / length)[:, :, None]


def _norm(key: Tensor) -> Tensor:
    return key.float().square().sum(-1).sqrt().clamp(min=LEAST)
