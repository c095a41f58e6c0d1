"""Keep every token: the cache that every other policy is compared with.

Without a budget the slots double when they are full, and the decode graph is compiled again for the larger layout. With
a budget, the first token beyond it raises a BudgetError.  A chunk is kept whole.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.types import Tokens


@dataclasses.dataclass(frozen=True)
class Full(Policy):
    name = "full"
    interval_refusal = "it evicts no token"
    keep_prompt_refusal = "it evicts no token"
    shardable = "always"
    evicts = False

    def score(self, tokens: Tokens) -> Tensor:
        return tokens.position
