"""Nearest neighbours of keys by their cosine."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # keys compared with all others at a time
LATE = torch.iinfo(torch.int64).max


def nearest(key: Tensor, held: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """For each key its most similar slot that holds a token; of equals the one of lower position.

    Args:
        key: [B, Hkv, E, D]; held: [B, Hkv, C, D].
        position: int64 [B, Hkv, C], negative for free slots.

    Returns:
        The cosines, float32 [B, Hkv, E], and the slots, int64 [B, Hkv, E].
    """
    norm = _norm(held)[:, :, None]  # [B, Hkv, 1, C]
    found = [_nearest(block, held, norm, position[:, :, None]) for block in torch.split(key, BLOCK, 2)]
    return torch.cat([cosine for cosine, _ in found], 2), torch.cat([slot for _, slot in found], 2)


def _nearest(key: Tensor, held: Tensor, norm: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    cosine = _products(key, held) / (_norm(key)[..., None] * norm)  # [B, Hkv, e, C]
    cosine = torch.where(position < 0, -torch.inf, cosine)
    best = cosine.amax(-1, keepdim=True)
    return best[..., 0], torch.where(cosine == best, position, LATE).argmin(-1)


def _products(key: Tensor, held: Tensor) -> Tensor:
    if key.shape[2] == 1:  # in a decode step: one pass over the slots, and no converted copy of them
        return (key[..., None, :].float() * held[:, :, None].float()).sum(-1)
    return key.float() @ held.float().transpose(-1, -2)


def _norm(key: Tensor) -> Tensor:
    return key.float().square().sum(-1).sqrt().clamp(min=1e-12)
