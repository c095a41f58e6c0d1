"""Divide the kept tokens among spans of the text by their lengths, for policies with `spans`.

The pitfalls of KV cache compression (https://arxiv.org/abs/2510.00231): a policy that ranks all tokens together can
evict most of one instruction and none of another.  Here tokens compete within their span alone.  The spans cover the
text: one begins at each of the positions in `spans`, and one at its start.  If n of T seen tokens stay, the span
from a to b gets floor(n b / T) - floor(n a / T), so that they add up to n.  If a span has fewer tokens than this, other
spans get the rest.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from kvpass.policies.base import Policy
from kvpass.policies.ranking import INT64_MAX
from kvpass.policies.types import State, Tokens


@dataclasses.dataclass(frozen=True)
class FairSpans:
    """The hooks by which a policy evicts, applied to one span after the other at prompts, chunks and compactions.

    Between these events, single tokens are evicted by the policy's own rule.
    """

    policy: Policy

    def victim(self, tokens: Tokens) -> Tensor:
        return self.policy.victim(tokens)

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        exceeds, keep = tokens.live.sum(-1, keepdim=True) > tokens.budget, torch.zeros_like(tokens.live)
        for start, stop in itertools.pairwise((0, *self.policy.spans, INT64_MAX)):
            inside = (tokens.position >= start) & (tokens.position < stop)
            keep = keep | self._keep_latest(tokens, inside, _share(tokens, stop) - _share(tokens, start))
        # The rest of the budget of spans with too few tokens; equal for all heads.
        missing = tokens.budget - keep.sum(-1, keepdim=True)
        return torch.where(exceeds, keep | self._keep_latest(tokens, ~keep, missing), tokens.live), {}

    def _keep_latest(self, tokens: Tokens, among: Tensor, count: Tensor) -> Tensor:
        """Return which `count` of some tokens stay, bool [B, H', N]; the count is int64 [B, H', 1]."""
        position = torch.where(among, tokens.position, -1)
        return self.policy.compact(dataclasses.replace(tokens, position=position, budget=count, rank=None))[0]


def _share(tokens: Tokens, position: int) -> Tensor:
    """Return how many of the kept tokens are from before a position, int64 [B, H', 1]."""
    seen = tokens.seen.expand(-1, tokens.position.shape[1], -1)
    return tokens.budget * seen.clamp(max=position) // seen.clamp(min=1)
