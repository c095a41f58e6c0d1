"""Rank tokens by position and by score; of equal scores the earlier token stays."""

from __future__ import annotations

import torch
from torch import Tensor

INT64_MAX = torch.iinfo(torch.int64).max


def lowest_value(dtype: torch.dtype) -> float | int:
    """Return the least value of a dtype."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest_value(dtype: torch.dtype) -> float | int:
    """Return the greatest value of a dtype."""
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def latest_of_least(score: Tensor, position: Tensor) -> Tensor:
    """Return the slot [B, H'] of lowest score; of equal scores a free slot, else the latest token's."""
    least = score == score.amin(-1, keepdim=True)
    age = torch.where(position >= 0, position, INT64_MAX)
    return torch.where(least, age, -1).argmax(-1)


def rank_of(position: Tensor) -> Tensor:
    """Return each token's rank among the live tokens of `position` [..., N]; free slots come last."""
    by_position = torch.where(position < 0, INT64_MAX, position).argsort(dim=-1, stable=True)
    return _inverse(by_position)


def slots_by_position(position: Tensor) -> Tensor:
    """Return the slots of `position` [..., N] sorted by position, free ones last."""
    return torch.where(position < 0, INT64_MAX, position).argsort(-1)


def keep_highest(score: Tensor, position: Tensor, count: int | Tensor) -> Tensor:
    """Return bool [..., N]: the `count` live tokens of highest score; of equal scores, the earlier ones."""
    order = slots_by_position(position)
    score = torch.where(position < 0, lowest_value(score.dtype), score).gather(-1, order)
    order = order.gather(-1, score.argsort(dim=-1, descending=True, stable=True))
    dead = (position < 0).gather(-1, order)
    order = order.gather(-1, dead.int().argsort(dim=-1, stable=True))
    return (_inverse(order) < count) & (position >= 0)


def _inverse(order: Tensor) -> Tensor:
    indices = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, indices)
