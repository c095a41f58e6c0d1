"""Keep a uniformly random subset of all tokens: the control that every score must beat.

Each token gets a number when it arrives, a hash of its position, its KV head and `seed`; the highest numbers stay.  The
survivors of any prefix are then a uniform sample of it, the newest token included.  Tokens of a chunk are hashed like
the tokens of a prompt.

With `redraw` all cached tokens get new numbers whenever some are evicted, as in Random Attention
(https://arxiv.org/abs/2609.03430).  A token then survives r compactions of K + n tokens to K with probability
(K / (K + n))^r, so old tokens fade.  That paper also keeps the prompt and the last 64 tokens, and evicts 64 together:
`redraw=True, recent=64, keep_prompt=True, interval=64`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from torch import Tensor

from kvpass.arguments import Natural, between
from kvpass.policies import hashing
from kvpass.policies.base import Policy
from kvpass.policies.heads import head_indices
from kvpass.policies.ranking import INT64_MAX
from kvpass.policies.types import Tokens


@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """The random policy.

    Attributes:
        seed: any integer from 0 to 2**31 - 2.
        redraw: draw again among the cached tokens whenever some are evicted.
        recent: the number of last tokens that always stay.
    """

    seed: Annotated[int, between(0, hashing.PRIME - 1)] = 0
    redraw: bool = False
    recent: Natural = 0
    name = "random"
    shardable = "heads"
    heads = "kv"

    def minimum_budget(self) -> int:
        return self.recent + 1

    def score(self, tokens: Tokens) -> Tensor:
        seed = hashing.seed_of_round(self.seed, tokens.seen) if self.redraw else self.seed
        drawn = hashing.draw(tokens.position, head_indices(tokens.position, tokens.sharding), seed)
        return torch.where(tokens.newest(self.recent), INT64_MAX, drawn) if self.recent else drawn
