"""Keep sinks and a cascade of sub-caches in which old tokens thin out by score.

Cascading KV cache ("Training-Free Exponential Extension of Sliding Window Context with Cascading KV Cache").
https://arxiv.org/abs/2406.17808

Besides the sinks there are N sub-caches of W slots.  Sub-cache i accepts every f_i-th token (f_i = 2^i).  A token that
it accepts pushes its oldest token to the next sub-cache.  Of a token that it does not accept and its own newest, the
one with the higher score mu stays.  So old tokens thin out, and the better ones stay.  With sbar_j the attention to
token j, reduced over the query heads, after every token

    mu_j = gamma mu_j + (1 - gamma) sbar_j,    gamma = exp(-ln(100) / W).

No token ever moves: ordered by age, sub-cache i is the ranks [iW, (i+1)W) from the newest.  For token number n (sinks
not counted) let b be the first i >= 1 whose sub-cache is not empty and for which n mod f_i is not zero.  Of the ranks
bW - 1 and bW the one of lower score is evicted (the newer one, if it is strictly lower), and the new token takes its
slot.  If there is no such b the oldest is evicted, once the cache is full.  b depends on counts alone, and a step costs
a few passes over the metadata.  Without selection rank bW - 1 is evicted for any scores.

A prompt attends as the model does, and its rows are then inserted one token at a time, as in decoding.  A chunk of q
queries attends to [sinks, cache, chunk]; mu_j = gamma^q mu_j + (1 - gamma) sum_r gamma^(q-1-r) sbar_rj, and then its
tokens are inserted one at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive, Share
from kvpass.errors import BudgetError
from kvpass.policies.base import Policy
from kvpass.policies.cascade_line import CascadeRule, approximate_context, intervals, moving_averages
from kvpass.policies.heads import HeadSharding, reduced
from kvpass.policies.types import Attention, State, Statistic, Tokens

__all__ = ["Cascade", "approximate_context"]


@dataclasses.dataclass(frozen=True)
class Cascade(Policy):
    """The Cascading KV cache policy.

    Attributes:
        cascades, sinks: N, and the first tokens that always stay; (budget - sinks) must divide by cascades.
        growth: of f_i: "pow2", "pow3", "pow4", or "linear" for i + 1.
        reduce: over the query heads: "mean", "max" or "median" (the lower one for an even number).
        gamma: the decay of the scores; None for exp(-ln(100) / W).  With 1 all scores stay zero.
        order: "write_first" as in the paper, or "attend_first", which needs one more slot.
        eager_fill: every sub-cache accepts while t <= |C| + sinks.
        heads: "shared", or "kv" for a choice of each KV head by its own query heads.
        select: False for no token selection (Table 3): a sub-cache drops the tokens that it does not accept.
    """

    cascades: Positive = 4
    sinks: Natural = 4
    growth: Literal["pow2", "pow3", "pow4", "linear"] = "pow2"
    reduce: Literal["mean", "max", "median"] = "mean"
    gamma: Share | None = None
    order: Literal["write_first", "attend_first"] = "write_first"
    eager_fill: bool = False
    heads: Literal["shared", "kv"] = "shared"  # type: ignore[misc]
    select: bool = True
    name: ClassVar[str] = "cascade"
    prompt_must_compete: ClassVar[str] = (
        "its sub-caches have fixed sizes, and prompt tokens pass through them like all others"
    )
    spreads: ClassVar[Literal["never", "heads", "always"]] = "heads"
    positions: ClassVar[Literal["absolute", "cache"]] = "cache"
    statistics: ClassVar[frozenset[Statistic]] = frozenset({"scan"})
    ranks: ClassVar[bool] = True

    @property
    def overwrites(self) -> bool:
        return self.order == "write_first"

    def minimum_budget(self) -> int:
        return self.sinks + self.cascades

    def fitting_budget(self, budget: int) -> int:
        return self.sinks + max(1, (budget - self.sinks) // self.cascades) * self.cascades

    def check_budget(self, budget: int) -> None:
        super().check_budget(budget)
        if (budget - self.sinks) % self.cascades:
            below = self.fitting_budget(budget)
            nearest = min(below, below + self.cascades, key=lambda fits: abs(fits - budget))
            why = f"without its {self.sinks} sinks it does not divide by cascades={self.cascades}"
            raise BudgetError(f"budget={budget}: {why}; the nearest that does is {nearest}")

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32}

    def row_state(self) -> dict[str, int | float]:
        return {"arrived": 0}  # real tokens of the last step

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        assert attention.last is not None
        assert attention.queries is not None
        probs = self._reduced(attention.last[..., None, :], attention.spread)[:, :, 0]
        decay, rest = self._decays(tokens.budget)
        score = decay * tokens.state["score"] + rest * probs
        scored = (attention.queries > 0) & tokens.live & (tokens.position >= self.sinks)
        arrived = attention.queries.expand_as(tokens.state["arrived"])
        return {"score": torch.where(scored, score, tokens.state["score"]), "arrived": arrived}

    def _decay(self, budget: Any) -> float:
        return math.exp(-math.log(100) * self.cascades / (budget - self.sinks)) if self.gamma is None else self.gamma

    def _decays(self, budget: int | Tensor) -> tuple[float | Tensor, float | Tensor]:
        """Return the decay and one minus the decay: numbers, or float32 [B, H', 1] with the same rounding."""
        if self.gamma is None and isinstance(budget, Tensor):
            decays = (-math.log(100) * self.cascades / (budget - self.sinks).double()).exp()
            return decays.float(), (1 - decays).float()
        decay = self._decay(budget)
        return decay, 1 - decay

    def _reduced(self, rows: Tensor, spread: HeadSharding | None) -> Tensor:
        """Reduce over the query heads: [B, Hkv, G, n, N] to [B, H', n, N]."""
        if self.heads == "shared":
            return reduced(rows, self.reduce, spread)
        if self.reduce == "median":
            return rows.median(2).values
        return rows.mean(2) if self.reduce == "mean" else rows.amax(2)

    def victim(self, tokens: Tokens) -> Tensor:
        # The next token is inserted, or the newest one if it attended first and is no padding.
        late = torch.zeros_like(tokens.state["arrived"]) if self.overwrites else tokens.state["arrived"]
        scored = tokens.live & (tokens.position >= self.sinks)
        age = tokens.live.sum(-1, keepdim=True) - 1 - tokens.order - late  # [B, H', C]

        def score_at(rank: Tensor) -> Tensor:
            return torch.where(scored & (age == rank), tokens.state["score"], 0).sum(-1, keepdim=True)

        count = scored.sum(-1, keepdim=True) - late  # [B, H', 1]
        victim_rank = self._rule(tokens.budget).victim_rank(tokens.seen - self.sinks - late, count, score_at)
        evicted = scored & (age == victim_rank) & (self.overwrites | (late > 0))
        return torch.where(evicted.any(-1, keepdim=True), evicted, ~tokens.live).int().argmax(-1)

    def _rule(self, budget: int | Tensor) -> CascadeRule:
        return CascadeRule(budget - self.sinks, intervals(self.cascades, self.growth), self.eager_fill, self.select)

    def scan(
        self, rows: Iterable[Tensor], valid: Tensor, held: int, budget: int, spread: HeadSharding | None = None
    ) -> Tensor:
        """Return the scores at the end of a prompt, DROPPED for dropped tokens; for a chunk what its rows add."""
        probs = (self._reduced(block, spread) for block in rows)
        blocks = moving_averages(probs, valid, self._decay(budget))
        if held:
            return [scores[:, :, -1] for scores in blocks][-1]
        number = torch.where(valid, valid.cumsum(-1) - 1 - self.sinks, -1)  # [B, q]
        score = self._rule(budget).insert_prompt(blocks, number, self.overwrites)
        return torch.where(number[:, None] < 0, 0, score)

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        assert attention.scan is not None
        assert attention.queries is not None
        score = attention.scan
        if tokens.held:
            score = score + self._decays(tokens.budget)[0] ** attention.queries * tokens.state["score"]
            number = tokens.position - self.sinks  # negative for sinks and padding
            score = torch.where(number < 0, 0, self._insert_chunk(tokens, number, score))
        return {"score": score, "arrived": torch.zeros_like(tokens.state["arrived"])}

    def _insert_chunk(self, tokens: Tokens, number: Tensor, score: Tensor) -> Tensor:
        """Return `CascadeRule.insert_chunk` with the budget of each row."""
        if not isinstance(tokens.budget, Tensor):
            return self._rule(tokens.budget).insert_chunk(number, tokens.held, score)
        rows = zip(tokens.budget[:, 0, 0].tolist(), torch.split(number, 1), torch.split(score, 1), strict=True)
        return torch.cat([self._rule(budget).insert_chunk(n, tokens.held, row_score) for budget, n, row_score in rows])

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        return tokens.live & (tokens.state["score"] >= 0), {}
