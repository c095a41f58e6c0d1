"""Keys of small norm (Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression").
https://arxiv.org/abs/2406.11430

The keys of smallest L2 norm tend to be those that are attended to: the largest goes, for each KV head on
its own.  No attention is looked at, and no token is safe for being recent.  A rotary embedding leaves the
norm alone, so it does not matter whether keys are stored before it.  A chunk is judged like a prompt.

Norms are compared in float16.  A word that comes twice has one key in the first layer, but for its rotation, whose
rounding would else choose between the two: of equal norms the earlier token stays.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpass.policies.base import Policy, State, Tokens


@dataclasses.dataclass(frozen=True)
class KNorm(Policy):
    name: ClassVar[str] = "knorm"
    spreads: ClassVar[Literal["never", "heads", "always"]] = "heads"
    heads: ClassVar[Literal["shared", "kv"]] = "kv"

    def state(self) -> dict[str, torch.dtype]:
        return {"norm": torch.float16}

    def init_token_state(self, key: Tensor, value: Tensor) -> State:
        return {"norm": key.float().square().sum(-1).sqrt().half()}  # [B, Hkv, n]

    def score(self, tokens: Tokens) -> Tensor:
        return -tokens.state["norm"]
