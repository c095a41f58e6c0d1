"""Keep sinks, heavy hitters and recent tokens, and merge evicted tokens into similar ones.

D2O (Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of LLMs").
https://arxiv.org/abs/2406.13035

A token's score is the attention to it, summed over all queries and the G query heads of its KV head.  Sinks, the
highest scores and the most recent tokens stay, N : M = 3 : 1.  An evicted token i is merged into the kept token of most
similar key, u_i = max_j cos(k_i, k_j), unless it is too far from all of them (Eq. 9-11, without the stray sum in the
printed Eq. 11):

    tau_0 = mean_i u_i,   tau_t = beta u + (1 - beta) tau_{t-1},   m_i = [u_i >= tau]
    k_c <- w_c k_c + sum_i w_i k_i,   w_c = e / Z,   w_i = exp(u_i) m_i / Z,   Z = e + sum_i exp(u_i) m_i

and v_c with the same weights.  The score of the kept token does not change.  A step costs one more pass over the keys
and one row of K and V rewritten per head.

`budget` is the mean over the layers: a layer whose prompt attention varies more over the tokens gets less
(`layer_budgets`), in each row of a batch by that row alone.  A chunk is treated like a prompt: its queries are summed,
then all tokens beyond the budget are merged, and tau moves once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvpass.arguments import Natural, Share, at_least
from kvpass.policies.base import Policy
from kvpass.policies.budgets import Plan, share_of
from kvpass.policies.d2o_layers import column_variances, largest_layer_budget, layer_budgets
from kvpass.policies.full import Full
from kvpass.policies.heads import reduced
from kvpass.policies.nearest import nearest
from kvpass.policies.types import Attention, Merge, State, Statistic, Tokens

UNSET = -2.0  # tau before the first merge, below every cosine

__all__ = ["D2O", "layer_budgets"]


@dataclasses.dataclass(frozen=True)
class D2O(Policy):
    """The D2O policy.

    Attributes:
        sinks, heavy: the first tokens that stay, and the share N / (N + M); sinks are part of the N.
        extra_sinks: sinks are not part of the N, which is a share of the rest.
        layers: how layers share the budget: "softmax" over their densities; "gate", alpha times as much for a density
            up to `gate`, scaled so that the mean is the budget; or "paper", the budget or alpha times it.
        beta: how fast tau moves.
        merge: "paper" as above; "average", plain means k_c <- (k_c + sum_i m_i k_i) / (1 + n_c); "none", evicted tokens
            are dropped (both in Table 6); or "official", k_c <- (k_c + sum_i u_i k_i) / (1 + n_c), means of rows that
            are scaled by their u, and one decision for all heads by the mean of their u.
        compress_at: "prompt_end", or "first_decode": a prompt stays whole until the next token has attended.
        skip_layers: layers that keep every token, at any cost; they do not count in the mean.
        calibrate: later prompts get the layer budgets of the first one, and the rows of a batch those of its first.
        density: the operand of variances (Eq. 4): the column sums of a "kv" head, or of each "query" head.
    """

    sinks: Natural = 4
    heavy: Share = 0.75
    layers: Literal["softmax", "gate", "paper"] = "softmax"
    gate: Annotated[float, at_least(0)] = 100.0
    alpha: Annotated[float, at_least(1)] = 3.0
    beta: Share = 0.5
    merge: Literal["paper", "average", "none", "official"] = "paper"
    compress_at: Literal["prompt_end", "first_decode"] = "prompt_end"
    skip_layers: tuple[int, ...] = ()
    calibrate: bool = False
    extra_sinks: bool = False
    density: Literal["kv", "query"] = "kv"
    name: ClassVar[str] = "d2o"
    spreads: ClassVar[Literal["never", "heads", "always"]] = "heads"
    heads: ClassVar[Literal["shared", "kv"]] = "kv"
    statistics: ClassVar[frozenset[Statistic]] = frozenset({"total"})

    @property
    def defers(self) -> bool:
        return self.compress_at == "first_decode"

    @property
    def merges(self) -> bool:
        return self.merge != "none"

    def minimum_budget(self) -> int:
        return self.sinks + 1

    def for_layer(self, layer: int, layers: int) -> Policy:
        return Full() if layer in self.skip_layers or layer - layers in self.skip_layers else self

    def plan(
        self, attention: Sequence[Attention], valid: Tensor, budget: int, earlier: Sequence[Plan] | None = None
    ) -> list[Plan]:
        if self.calibrate and earlier:
            return [Plan(plan.budget, plan.capacity) for plan in earlier]
        spread = attention[0].spread if attention else None
        totals = [layer.total for layer in attention if layer.total is not None]
        rows = column_variances(totals, valid, spread, self.density)
        options = (self.layers, self.gate, self.alpha, self.minimum_budget())
        lengths = valid.sum(-1).tolist()
        budgets = [layer_budgets(row, budget, prompt, *options) for row, prompt in zip(rows, lengths, strict=True)]
        if self.calibrate:
            return [Plan(budget, budget + 1) for budget in budgets[0]]
        max_budget = largest_layer_budget(len(totals), budget, self.layers, self.alpha) + 1
        return [Plan(max(rows), max(rows) + 1, rows, max_budget) for rows in zip(*budgets, strict=True)]

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32}

    def row_state(self) -> dict[str, int | float]:
        return {"threshold": UNSET}  # tau

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        assert attention.total is not None
        return {"score": tokens.state["score"] + attention.total.sum(2)}  # [B, Hkv, N]

    def _recent(self, budget: int | Tensor) -> int | Tensor:
        """Return M, the number of recent tokens."""
        shared = budget - self.sinks if self.extra_sinks else budget
        recent, most = shared - share_of(shared, self.heavy), budget - self.sinks
        if isinstance(recent, Tensor) and isinstance(most, Tensor):
            return torch.minimum(recent, most)
        return min(recent, most)

    def score(self, tokens: Tokens) -> Tensor:
        safe = (tokens.position < self.sinks) | tokens.newest(self._recent(tokens.budget))
        return torch.where(safe, torch.inf, tokens.state["score"])

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        if self.defers and tokens.held == 0:
            return tokens.live, {}
        return super().compact(tokens)

    def merge_evicted(self, tokens: Tokens, held: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        similar, into = nearest(evicted, held, tokens.position)  # [B, Hkv, E]
        official = self.merge == "official"
        similarity = reduced(similar[:, :, None], "mean", tokens.spread) if official else similar
        mean = torch.where(valid, similarity, 0).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
        previous = tokens.state["threshold"]
        updated = torch.where(previous == UNSET, mean, self.beta * mean + (1 - self.beta) * previous)
        threshold = torch.where(valid.any(-1, keepdim=True), updated, previous)
        weight, share, own = self._weights(similar, (valid & (similarity >= threshold)).float())
        return Merge(into, weight, share, own, {"threshold": threshold})

    def _weights(self, similar: Tensor, merged: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return the weights of evicted tokens, their shares of the denominator, and the own weight; see `Merge`."""
        if self.merge == "paper":
            return merged * similar.exp(), merged * similar.exp(), math.e
        return merged * similar if self.merge == "official" else merged, merged, 1.0
