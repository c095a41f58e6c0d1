"""Keep recent tokens and the tokens of largest summed attention.

Heavy-hitter oracle (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference").
https://arxiv.org/abs/2306.14048

A token's score is the attention to it, summed over every query so far and the G query heads of its KV head.  The most
recent tokens always stay.  Of the others the `heavy` share with the highest scores stays, for each KV head separately.
The score is a sum and not a mean, so an early token that more queries have seen may stay (`roco` averages).  The
queries of a chunk are summed before anything is evicted.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.arguments import Share
from kvpass.policies.base import Policy
from kvpass.policies.budgets import share_of
from kvpass.policies.types import Attention, State, Tokens


@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """The H2O policy.

    Attributes:
        heavy: the share of the budget for heavy hitters; the rest is for recent tokens.
    """

    heavy: Share = 0.5
    name = "h2o"
    shardable = "heads"
    heads = "kv"
    statistics = frozenset({"total"})

    def minimum_budget(self) -> int:
        return 2

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32}

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        return {"score": tokens.state["score"] + attention.total.sum(2)}  # [B, Hkv, N]

    def score(self, tokens: Tokens) -> Tensor:
        recent = tokens.newest(tokens.budget - share_of(tokens.budget, self.heavy))
        return torch.where(recent, torch.inf, tokens.state["score"])
