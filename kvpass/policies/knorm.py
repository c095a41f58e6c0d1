"""Keep the keys of smallest L2 norm.

K-norm (Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression").
https://arxiv.org/abs/2406.11430

Keys of small norm tend to get much attention, so the key of largest norm is evicted, for each KV head separately.  The
policy reads no attention, and recent tokens may be evicted.  A rotary embedding preserves norms, so keys may be stored
before or after it.  A chunk is treated like a prompt.

Norms are compared in float16.  A word that occurs twice has the same key in the first layer up to its rotation, whose
rounding would otherwise decide between the two: of equal norms the earlier token stays.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.types import State, Tokens


@dataclasses.dataclass(frozen=True)
class KNorm(Policy):
    name = "knorm"
    shardable = "heads"
    heads = "kv"

    def state(self) -> dict[str, torch.dtype]:
        return {"norm": torch.float16}

    def init_token_state(self, key: Tensor, value: Tensor) -> State:
        return {"norm": key.float().square().sum(-1).sqrt().half()}  # [B, Hkv, n]

    def score(self, tokens: Tokens) -> Tensor:
        return -tokens.state["norm"]
