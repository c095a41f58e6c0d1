"""Define the values that policies and the cache exchange: attention statistics, metadata of tokens, and merges."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.policies.heads import HeadSharding
from kvpass.policies.ranking import highest_value, latest_of_least, lowest_value, rank_of

Statistic = Literal["total", "squares", "last", "window", "logits", "scan", "older", "older_peak"]
State = dict[str, Tensor]
Clock = tuple[int, ...]
"""Counts that the host keeps for one row; () before the first token."""
_NONE: Any = None
"""The value, typed as Any, of statistics that a policy does not list, so that policies need not check for None."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """Statistics of the newest queries' attention to each token; a field is None unless the policy lists it.

    All fields except `scan` and `older_peak` are float32 [B, Hkv, G, N].  A decode step has a single query,
    so `total`, `last` and `window` are equal.

    Attributes:
        total: probabilities summed over the queries.
        squares: squared probabilities summed over the queries.
        last: the probabilities of the last real query of each row.
        window: probabilities averaged over the last `Policy.observation_window` real queries.
        logits: the scaled logits of the last real query, the model's mask included, the policy's bias not.
        scan: float32 [B, H', N], the result of `Policy.scan` or `Policy.smoothed`; None in a decode step.
        older: the softmax of each of the last `Policy.observation_window` real queries over the tokens before the first
            of these queries, averaged over the queries; None in a decode step.
        older_peak: `older` of the highest logits of the G query heads: float32 [B, Hkv, 1, N].  A policy that lists it
            also gets `logits` in every decode step.
        queries: int64 [B, 1, 1], the number of real queries.
        sharding: the sharding of the layer's heads over processes, None if all are in this process.
    """

    total: Tensor = _NONE
    squares: Tensor = _NONE
    last: Tensor = _NONE
    window: Tensor = _NONE
    logits: Tensor = _NONE
    scan: Tensor = _NONE
    older: Tensor = _NONE
    older_peak: Tensor = _NONE
    queries: Tensor = _NONE
    sharding: HeadSharding | None = None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Metadata of the tokens that a policy chooses among.

    Attributes:
        position: int64 [B, H', N], the token's position among the real tokens of its row; -1 marks a free slot.
        seen: int64 [B, 1, 1], the number of real tokens so far, the newest included.
        state: the policy's values by name: each [B, H', N], or [B, H', 1] for `Policy.row_state`.
        budget: tokens to keep between steps: a number, or int64 [B, H', 1] if rows or layers have different budgets.
        cached_columns: how many of the N entries are slots; the others are new tokens.  It is 0 for a prompt, C for a
            chunk and N for a decode step.
        rank: int64 [B, H', N], the number among the live tokens by position, if it is maintained.
        sharding: see `Attention`.
    """

    position: Tensor
    seen: Tensor
    state: State
    budget: int | Tensor
    cached_columns: int = 0
    rank: Tensor | None = None
    sharding: HeadSharding | None = None

    @property
    def held(self) -> int:
        """The earlier name of `cached_columns`, which policies may use until 0.2."""
        warnings.warn("Tokens.held is called 'cached_columns' now", DeprecationWarning, stacklevel=2)
        return self.cached_columns

    @property
    def live(self) -> Tensor:
        """bool [B, H', N]: whether the slot holds a token."""
        return self.position >= 0

    @property
    def order(self) -> Tensor:
        """int64 [B, H', N]: the rank among the live tokens, 0 for the earliest; undefined for free slots."""
        return rank_of(self.position) if self.rank is None else self.rank

    def newest(self, count: int | Tensor) -> Tensor:
        """Return bool [B, H', N]: whether the token is among the last `count` real tokens."""
        return self.position >= self.seen - count

    def with_state(self, changes: State) -> Tokens:
        """Return these tokens with some entries of the state replaced."""
        return dataclasses.replace(self, state={**self.state, **changes})

    def lowest(self, score: Tensor) -> Tensor:
        """Return the slot [B, H'] to overwrite next: a free slot, else the slot of the token of lowest score.

        If rows have different budgets, a row with more tokens than its budget uses none of its free slots.
        """
        free: float | Tensor = lowest_value(score.dtype)
        if isinstance(self.budget, Tensor):  # a full row has free slots if another row's budget is larger
            full = self.live.sum(-1, keepdim=True) > self.budget
            free = torch.where(full, highest_value(score.dtype), free).to(score.dtype)
        return latest_of_least(torch.where(self.live, score, free), self.position)


@dataclasses.dataclass(frozen=True)
class Merge:
    """The weights with which E evicted tokens are merged into slots, for keys and values alike.

    A slot's vector x becomes (own * x + sum(weight * evicted)) / (own + sum(share)) over the tokens merged into it.

    Attributes:
        into: int64 [B, H', E], the slot that each token is merged into.
        weight, share: float32 [B, H', E]; a share of zero leaves the slot unchanged.
        own: the weight of the slot's own vector.
        state: changes to the policy's state.
    """

    into: Tensor
    weight: Tensor
    share: Tensor
    own: float
    state: State
