"""Keep the latest tokens, up to the budget.

The plain sliding window that papers on attention sinks compare with.  A chunk keeps its last tokens.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.types import Tokens


@dataclasses.dataclass(frozen=True)
class Window(Policy):
    name = "window"
    shardable = "always"

    def score(self, tokens: Tokens) -> Tensor:
        return tokens.position
