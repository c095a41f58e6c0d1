"""Keep recent tokens, and the tokens of largest mean attention.

Robust cache omission (Ren and Zhu, "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language
Model Inference"). https://arxiv.org/abs/2402.06262

A token's score is the mean attention to it: the sum over all queries that saw it, and over the G query heads of its KV
head, divided by their number.  Unlike the sum of `h2o`, a mean does not favour older tokens.  The most recent half of
the budget always stays.  So do the older tokens whose attention varied most (standard deviation over the same queries),
a quarter of the budget.  Of the rest the lowest mean is evicted, for each KV head separately.  The queries of a chunk
are counted before anything is evicted.  A step costs one top-k over the slots.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.types import Attention, State, Tokens


@dataclasses.dataclass(frozen=True)
class RoCo(Policy):
    name = "roco"
    shardable = "heads"
    heads = "kv"
    statistics = frozenset({"total", "squares"})

    def minimum_budget(self) -> int:
        return 2

    def state(self) -> dict[str, torch.dtype]:
        return {"total": torch.float32, "squares": torch.float32}

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        return {
            "total": tokens.state["total"] + attention.total.mean(2),  # [B, Hkv, N]
            "squares": tokens.state["squares"] + attention.squares.mean(2),
        }

    def score(self, tokens: Tokens) -> Tensor:
        query_count = tokens.seen - tokens.position  # queries since the token's own, which is included
        mean = tokens.state["total"] / query_count
        variance = tokens.state["squares"] / query_count - mean.square()
        safe = tokens.newest(tokens.budget - tokens.budget // 2)
        older = torch.where(tokens.live & ~safe, variance, -torch.inf)
        return torch.where(safe | keep_highest_with_ties(older, tokens.budget // 4), torch.inf, mean)


def keep_highest_with_ties(score: Tensor, count: int | Tensor) -> Tensor:
    """Mark the `count` highest scores of each head, ties included: bool [B, H', N].

    A number as `count` costs a top-k, int64 [B, H', 1] a sort.
    """
    if isinstance(count, Tensor):
        index = (count - 1).clamp(min=0, max=score.shape[-1] - 1).expand(*score.shape[:-1], 1)
        return (score >= score.sort(-1, descending=True).values.gather(-1, index)) & (count > 0)
    count = min(count, score.shape[-1])
    return score >= (score.topk(count, -1).values[..., -1:] if count else torch.inf)
