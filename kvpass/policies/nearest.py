"""Nearest neighbours of keys by their cosine."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # keys compared with all others at a time
LEAST = 1e-12  # of a norm
LATE = torch.iinfo(torch.int64).max


def nearest(key: Tensor, held: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """For each key its most similar slot that holds a token; of equals the one of lower position.

    Args:
        key: [B, Hkv, E, D]; held: [B, Hkv, C, D].
        position: int64 [B, Hkv, C], negative for free slots.

    Returns:
        The cosines, float32 [B, Hkv, E], and the slots, int64 [B, Hkv, E].
    """
    if key.shape[2] == 1 and key.device.type == "cpu":
        return _best(_of_one(key, held), position[:, :, None])
    norm = _norm(held)[:, :, None]  # [B, Hkv, 1, C]
    found = [_best(_of_many(block, held, norm), position[:, :, None]) for block in torch.split(key, BLOCK, 2)]
    return torch.cat([cosine for cosine, _ in found], 2), torch.cat([slot for _, slot in found], 2)


def _best(cosine: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Of cosines [B, Hkv, e, C] with slots the highest, and where it is."""
    cosine = torch.where(position < 0, -torch.inf, cosine)
    best = cosine.amax(-1, keepdim=True)
    return best[..., 0], torch.where(cosine == best, position, LATE).argmin(-1)


def _of_many(key: Tensor, held: Tensor, norm: Tensor) -> Tensor:
    return _products(key, held) / (_norm(key)[..., None] * norm)


def _products(key: Tensor, held: Tensor) -> Tensor:
    if key.shape[2] == 1:  # in a decode step on a GPU: no converted copy of the slots, and one launch with the norms
        return (key[..., None, :].float() * held[:, :, None].float()).sum(-1)
    return key.float() @ held.float().transpose(-1, -2)


def _of_one(key: Tensor, held: Tensor) -> Tensor:
    """Cosines [B, Hkv, 1, C] of a decode step's key, in one pass over the slots and with no converted copy of them.

    On a CPU products and norms go through the slots together if both read something of the head: a compiler walks
    through norms alone as one long row of slots, in a loop of its own.  On a GPU that would be two launches more.
    """
    shrink = 1 / _norm(key)[..., None]  # [B, Hkv, 1, 1]
    slots = held.float() * shrink
    product = (slots * (key.float() * shrink)).sum(-1)  # [B, Hkv, C]
    length = torch.maximum(slots.square().sum(-1).sqrt(), LEAST * shrink[..., 0])
    return (product / length)[:, :, None]


def _norm(key: Tensor) -> Tensor:
    return key.float().square().sum(-1).sqrt().clamp(min=LEAST)
