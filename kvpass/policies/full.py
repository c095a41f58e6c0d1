"""Keep every token: the cache that every other policy is compared with.

Without a budget the slots double when they are full, and the decode graph is compiled again for the larger layout. With
a budget, the first token beyond it raises a BudgetError.  A chunk is kept whole.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.types import Tokens


@dataclasses.dataclass(frozen=True)
class Full(Policy):
    name: ClassVar[str] = "full"
    prompt_must_compete: ClassVar[str] = "it evicts no token"
    spreads: ClassVar[Literal["never", "heads", "always"]] = "always"
    evicts: ClassVar[bool] = False

    def score(self, tokens: Tokens) -> Tensor:
        return tokens.position
