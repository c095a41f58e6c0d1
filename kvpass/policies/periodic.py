"""Compact a row by several tokens when it exceeds its budget, for policies with a `Policy.interval`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.fair_spans import FairSpans
from kvpass.policies.pinned_tokens import PINNED, PinnedTokens
from kvpass.policies.ranking import INT64_MAX
from kvpass.policies.types import State, Tokens


@dataclasses.dataclass(frozen=True)
class PeriodicEviction:
    """The eviction hooks of a policy, applied to rows that exceed their budget.

    Between two compactions tokens are appended.  A row that does not exceed its budget stays whole when another row of
    the batch is compacted.
    """

    hooks: Policy | PinnedTokens | FairSpans
    policy: Policy

    def victim(self, tokens: Tokens) -> Tensor:
        """Return a free slot [B, H'].

        A row has a free slot unless the host missed a compaction, as it does not wait for a GPU to report which tokens
        are padding.  Then the oldest token that is not pinned is overwritten.
        """
        age = tokens.position
        if PINNED in tokens.state:
            age = torch.where(tokens.state[PINNED] & tokens.live, INT64_MAX, age)
        return age.argmin(-1)

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        exceeds = tokens.live.sum(-1, keepdim=True) > tokens.budget  # [B, H', 1]
        keep, changes = self.hooks.compact(dataclasses.replace(tokens, budget=self.policy.compacted(tokens.budget)))
        changes = {name: torch.where(exceeds, changed, tokens.state[name]) for name, changed in changes.items()}
        return torch.where(exceeds, keep, tokens.live), changes
