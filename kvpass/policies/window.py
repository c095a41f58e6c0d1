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


def policy_beside_window(policy: Policy, budget: int, window: int | None) -> Policy:
    """Return the policy of a layer that stores its last `window` tokens: `Window` if these fit into the budget.

    Args:
        window: the number of tokens, None for a layer that stores all.
    """
    return policy if window is None or (policy.evicts and budget < window) else Window()
