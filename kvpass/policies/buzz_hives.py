"""Select the best token of each hive, for `buzz`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.ranking import LATE


def best_of_hives(score: Tensor, in_hive: Tensor, hive: Tensor, index: Tensor) -> Tensor:
    """Return bool [B, H', N]: whether the token has the highest score in its hive; of equals the first.

    Args:
        score: [B, H', N].
        in_hive: bool [B, H', N], whether the token is in a hive; the result is undefined for other tokens.
        hive, index: int64 [B, H', N], the hive of each token, and the token's index.
    """
    no_hive = score.shape[-1]  # there are fewer hives than tokens: this one is for tokens outside of hives
    hive_index = torch.where(in_hive, hive, no_hive)
    score = torch.where(in_hive, score, -torch.inf)
    shape = (*score.shape[:2], no_hive + 1)
    maximum = score.new_full(shape, -torch.inf).scatter_reduce(-1, hive_index, score, "amax").gather(-1, hive_index)
    index = torch.where(score == maximum, index, LATE)
    return index == index.new_full(shape, LATE).scatter_reduce(-1, hive_index, index, "amin").gather(-1, hive_index)
