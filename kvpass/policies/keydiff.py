"""Keep the keys that differ most from the mean key.

KeyDiff ("KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments"). https://arxiv.org/abs/2504.15364

    score_j = -cos(k_j, mean_i k_i / |k_i|)

for each KV head, over the stored keys of all cached tokens, safe ones included.  No attention and no value is
read.  The mean changes with the tokens, so each compaction computes all scores again, in one pass over the keys.  A
chunk is compacted like a prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive
from kvpass.policies.base import Policy
from kvpass.policies.types import State, Tokens

MIN_NORM = 1e-12


@dataclasses.dataclass(frozen=True)
class KeyDiff(Policy):
    """The KeyDiff policy.

    Attributes:
        sinks, recent: the first and the last tokens that always stay.
    """

    interval: Positive = dataclasses.field(default=128, kw_only=True)
    sinks: Natural = 4
    recent: Natural = 0
    name = "keydiff"
    shardable = "heads"
    heads = "kv"

    def minimum_budget(self) -> int:
        return self.sinks + self.recent + 1

    def rescore(self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor]) -> State:
        unit = unit_keys(key, tokens.live)
        count = tokens.live.sum(-1, keepdim=True).clamp(min=1)
        anchor = unit.sum(2, keepdim=True) / count[..., None]  # [B, Hkv, 1, D]
        cosine = (unit * anchor).sum(-1) / anchor.square().sum(-1).sqrt().clamp(min=MIN_NORM)
        return {"score": -cosine}

    def score(self, tokens: Tokens) -> Tensor:
        stays = (tokens.position < self.sinks) | tokens.newest(self.recent)
        return torch.where(stays, torch.inf, tokens.state["score"])


def unit_keys(key: Tensor, live: Tensor) -> Tensor:
    """Normalize keys [B, Hkv, N, D] in float32; free slots and zero keys become zero."""
    key = torch.where(live[..., None], key.float(), 0.0)
    return key / key.square().sum(-1, keepdim=True).sqrt().clamp(min=MIN_NORM)
