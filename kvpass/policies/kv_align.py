"""Keep sinks and a recent window, and repair keys and values that carry absolute positions.

KV-Align ("Rectifying absolute position data in KV caches for streaming LLMs").

The model's position ids count cached tokens: the query of the next token gets min(t, M).  A row that was computed at
position p is at rank r < p after an earlier token was evicted, and a small network repairs it:

    (k, v) <- (k, v) + (E(r) - E(p)) S + f(k, v; E(p), E(r))     recipe "direct", from the model's own row
    k <- k + f_K([k; E(r); E_layer; E_head]), v likewise         recipe "paper" (its section on alignment)

"direct" leaves the slots unchanged and repairs at read.  "paper" stores repaired vectors and repairs them again after
the next eviction.  Sinks, and vectors at the positions at which they were computed, are never changed.

A prompt longer than the budget M restarts its positions for its last M tokens: they are numbered 0..M-1 and attend to
no earlier token, as if they were the whole prompt.  So they need no repair, and the first of them are the sinks of the
conversation.  The tokens before them are predicted in separate windows of M, and not cached.  A chunk attends to all
cached tokens and causally to itself at the following positions, none above the aligner's window.  Then all tokens
beyond the budget are evicted.

`every=n` evicts n tokens together, when M + 1 are cached.  Rows are then repaired and stored in the steps that evict, n
times less often: a row is repaired about M/n times.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvpass.arguments import Positive, require
from kvpass.errors import BudgetError
from kvpass.policies.aligners.aligner import Aligner
from kvpass.policies.budgets import Count, clamp_max
from kvpass.policies.ranking import INT64_MAX
from kvpass.policies.types import Attention, Clock, State, Tokens
from kvpass.policies.weights import PolicyWithWeights

UNKNOWN = -1  # the position of a new token's row, until its first step ends


@dataclasses.dataclass(frozen=True)
class KVAlign(PolicyWithWeights[Aligner]):
    """The KV-Align policy.

    Attributes:
        aligner: a `kvpass.policies.aligners.Aligner`, or the path of a saved one.
        every: how many tokens are evicted together.
    """

    aligner: Aligner | str | os.PathLike[str] | None = None
    every: Positive = 1
    name = "kv_align"
    weights_class = Aligner
    interval_refusal = "it repairs vectors on its own schedule, `every`"
    keep_prompt_refusal = "a prompt longer than the budget restarts its positions for its last tokens"
    cache_positions_refusal = "kv_align numbers tokens itself"
    renumbers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        trained = self.loaded.scope.every
        require(
            self.loaded.recipe != "paper" or self.every == trained,
            "every",
            self.every,
            f"this aligner of recipe 'paper' was trained for every={trained}",
        )

    @property
    def sinks(self) -> int:
        return self.loaded.scope.sinks

    # Budgets.

    def minimum_budget(self) -> int:
        return self.sinks + self.every

    def fitting_budget(self, budget: Count) -> Count:
        return clamp_max(super().fitting_budget(budget), self.loaded.scope.window)

    def check_budget(self, budget: int) -> None:
        super().check_budget(budget)
        window = self.loaded.scope.window
        if budget > window:
            raise BudgetError(
                f"budget={budget} is a window that this aligner was not trained for: it knows positions up to "
                f"{window}; take a smaller budget, or train an aligner with --window {budget}"
            )

    def last_position(self) -> int:
        return self.loaded.scope.window

    # The host's count of cached tokens, for `every` above one.

    def clock(self, clock: Clock, new: int, budget: int) -> Clock:
        if self.every == 1:
            return ()
        return (min((clock[0] if clock else 0) + new, budget),)

    def tick(self, clock: Clock, budget: int) -> tuple[bool, Clock]:
        if self.every == 1:
            return False, clock
        cached = clock[0] + 1
        due = cached > budget
        return due, (cached - self.every if due else cached,)

    # State.

    def state(self) -> dict[str, torch.dtype]:
        return {"made": torch.int64}  # the position at which the vector was computed, or for which it was repaired

    def row_state(self) -> dict[str, int | float]:
        return {"start": 0}  # the position of the first sink, where the window starts

    def init_token_state(self, key: Tensor, value: Tensor) -> State:
        self.loaded.check(heads=key.shape[1], key_dim=key.shape[3])
        unknown = torch.full((key.shape[0], 1, key.shape[2]), UNKNOWN, dtype=torch.int64, device=key.device)
        return {"made": unknown}

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        return {"made": _row_positions(tokens)}

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        count = tokens.position.shape[-1]
        if tokens.cached_columns == count:
            return self.observe(tokens, attention)
        if tokens.cached_columns == 0:
            start = (tokens.seen - tokens.budget).clamp(min=0)
            return {"made": tokens.position - start, "start": start.expand_as(tokens.state["start"])}
        is_new = torch.arange(count, device=tokens.position.device) >= tokens.cached_columns
        cached = (tokens.live & ~is_new).sum(-1, keepdim=True)
        rank = cached + (is_new & tokens.live).long().cumsum(-1) - 1
        return {"made": torch.where(is_new, rank.clamp(max=self.last_position()), tokens.state["made"])}

    # Eviction.

    def score(self, tokens: Tokens) -> Tensor:
        return torch.where(self._is_sink(tokens), INT64_MAX, tokens.position)

    def _is_sink(self, tokens: Tokens) -> Tensor:
        start = tokens.state["start"]
        return (tokens.position >= start) & (tokens.position < start + self.sinks)

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        if tokens.cached_columns < tokens.position.shape[-1]:
            return super().compact(tokens)
        full = tokens.live.sum(-1, keepdim=True) > tokens.budget
        evictable = ~self._is_sink(tokens) & (self._rank(tokens) < self.sinks + self.every)
        return tokens.live & ~(full & evictable), {}

    def _rank(self, tokens: Tokens) -> Tensor:
        """Return the ranks of the cached tokens, sinks and a gapless recent window: int64 [B, H', N]."""
        cached = tokens.live.sum(-1, keepdim=True)
        recent = tokens.position - tokens.seen + cached
        return torch.where(self._is_sink(tokens), tokens.position - tokens.state["start"], recent)

    # Repair.

    @property
    def aligns(self) -> Literal["never", "read", "step", "compact"]:
        if self.loaded.recipe == "nothing":
            return "never"
        if self.every > 1:
            return "compact"
        return "read" if self.loaded.recipe == "direct" else "step"

    def layer_weights(self, layer: int) -> list[Tensor]:
        return self.loaded.layer_weights(layer)

    def align(
        self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor], evicted: int
    ) -> tuple[Tensor, Tensor, State]:
        position, rank = _row_positions(tokens), self._rank(tokens)
        moves = -(-evicted // self.every) if self.loaded.recipe == "paper" else 1
        for move in reversed(range(moves)):
            target = rank + move * self.every  # "paper" repairs in several moves, the last of which reaches the rank
            moving = tokens.live & ~self._is_sink(tokens) & (position > target)
            by_row = (position[:, 0], target[:, 0], moving[:, 0])
            key, value = self.loaded.repair(weights, key, value, *by_row)
            position = torch.where(moving, target, position)
        return key, value, {"made": position}


def _row_positions(tokens: Tokens) -> Tensor:
    """Return the positions of the stored vectors; a new token's is the number of tokens before it."""
    made = tokens.state["made"]
    return torch.where(made == UNKNOWN, tokens.live.sum(-1, keepdim=True) - 1, made)
