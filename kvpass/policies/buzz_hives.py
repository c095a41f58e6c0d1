"""The best of each hive, for `buzz`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.base import LATE


def best_of_hives(score: Tensor, fresh: Tensor, hive: Tensor, index: Tensor) -> Tensor:
    """bool [B, H', N]: the token of highest score in its hive, of equals the first.

    Args:
        score: [B, H', N].
        fresh: bool, likewise: in a hive at all; what is said of the others means nothing.
        hive, place: int64, likewise: the number of the hive, and where the token stands.
    """
    last = score.shape[-1]  # there are fewer hives than tokens: this one is for tokens that are not fresh
    where = torch.where(fresh, hive, last)
    score = torch.where(fresh, score, -torch.inf)
    hives = (*score.shape[:2], last + 1)
    most = score.new_full(hives, -torch.inf).scatter_reduce(-1, where, score, "amax").gather(-1, where)
    index = torch.where(score == most, index, LATE)
    return index == index.new_full(hives, LATE).scatter_reduce(-1, where, index, "amin").gather(-1, where)
