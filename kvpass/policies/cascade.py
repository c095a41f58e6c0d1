"""Keep sinks and a cascade of sub-caches in which old tokens thin out by score.

Cascading KV cache ("Training-Free Exponential Extension of Sliding Window Context with Cascading KV Cache").
https://arxiv.org/abs/2406.17808

Besides the sinks there are N sub-caches of W slots.  Sub-cache i accepts every f_i-th token (f_i = 2^i).  A token that
it accepts pushes its oldest token to the next sub-cache.  Of a token that it does not accept and its newest one, the
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive, Share
from kvpass.errors import BudgetError
from kvpass.policies.base import Policy
from kvpass.policies.budgets import Count, clamp_min
from kvpass.policies.heads import HeadSharding, reduce_heads
from kvpass.policies.types import Attention, State, Tokens

BASES = {"pow2": 2, "pow3": 3, "pow4": 4}
NO_VICTIM = -2
DROPPED = -1.0  # the score of a dropped token; scores are never negative


@dataclasses.dataclass(frozen=True)
class Cascade(Policy):
    """The Cascading KV cache policy.

    Attributes:
        cascades, sinks: N, and the first tokens that always stay; cascades must divide budget - sinks.
        growth: the growth of f_i: "pow2", "pow3", "pow4", or "linear" for i + 1.
        reduce: the reduction over the query heads: "mean", "max" or "median" (the lower one for an even number).
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
    name = "cascade"
    interval_refusal = "each new token pushes one token through its sub-caches"
    keep_prompt_refusal = "its sub-caches have fixed sizes, and prompt tokens pass through them like all others"
    shardable = "heads"
    positions = "cache"
    statistics = frozenset({"scan"})
    reads_rank = True

    @property
    def overwrites(self) -> bool:
        return self.order == "write_first"

    @property
    def scans_means(self) -> bool:
        return self.heads == "shared" and self.reduce == "mean"

    def minimum_budget(self) -> int:
        return self.sinks + self.cascades

    def fitting_budget(self, budget: Count) -> Count:
        tokens = clamp_min((budget - self.sinks) // self.cascades, 1)
        return self.sinks + tokens * self.cascades  # type: ignore[return-value]

    def check_budget(self, budget: int) -> None:
        super().check_budget(budget)
        if (budget - self.sinks) % self.cascades:
            below = self.fitting_budget(budget)
            nearest = min(below, below + self.cascades, key=lambda fits: abs(fits - budget))
            why = f"without its {self.sinks} sinks it is not divisible by cascades={self.cascades}"
            raise BudgetError(f"budget={budget}: {why}; the nearest divisible budget is {nearest}")

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32}

    def row_state(self) -> dict[str, int | float]:
        return {"arrived": 0}  # real tokens of the last step

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        probs = self._reduce(attention.last[..., None, :], attention.sharding)[:, :, 0]
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

    def _reduce(self, probs: Tensor, sharding: HeadSharding | None) -> Tensor:
        """Reduce over the query heads: [B, Hkv, G, n, N] to [B, H', n, N]."""
        if self.heads == "shared":
            return reduce_heads(probs, self.reduce, sharding)
        if self.reduce == "median":
            return probs.median(2).values
        return probs.mean(2) if self.reduce == "mean" else probs.amax(2)

    def victim(self, tokens: Tokens) -> Tensor:
        # The next token is inserted, or the newest one if it attended first and is not padding.
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
        self, probs: Iterable[Tensor], valid: Tensor, cached_columns: int, budget: int, sharding: HeadSharding | None
    ) -> Tensor:
        """Return the scores at the end of a prompt, DROPPED for dropped tokens; for a chunk its queries' additions."""
        reduced = (self._reduce(block, sharding) for block in probs)
        blocks = moving_averages(reduced, valid, self._decay(budget))
        if cached_columns:
            return [scores[:, :, -1] for scores in blocks][-1]
        number = torch.where(valid, valid.cumsum(-1) - 1 - self.sinks, -1)  # [B, q]
        score = self._rule(budget).insert_prompt(blocks, number, self.overwrites)
        return torch.where(number[:, None] < 0, 0, score)

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        score = attention.scan
        if tokens.cached_columns:
            score = score + self._decays(tokens.budget)[0] ** attention.queries * tokens.state["score"]
            number = tokens.position - self.sinks  # negative for sinks and padding
            score = torch.where(number < 0, 0, self._insert_chunk(tokens, number, score))
        return {"score": score, "arrived": torch.zeros_like(tokens.state["arrived"])}

    def _insert_chunk(self, tokens: Tokens, number: Tensor, score: Tensor) -> Tensor:
        """Return `CascadeRule.insert_chunk` with the budget of each row."""
        if not isinstance(tokens.budget, Tensor):
            return self._rule(tokens.budget).insert_chunk(number, tokens.cached_columns, score)
        rows = zip(tokens.budget[:, 0, 0].tolist(), torch.split(number, 1), torch.split(score, 1), strict=True)
        return torch.cat(
            [self._rule(budget).insert_chunk(n, tokens.cached_columns, row_score) for budget, n, row_score in rows]
        )

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        return tokens.live & (tokens.state["score"] >= 0), {}


def intervals(cascades: int, growth: str) -> list[int]:
    """Return f_i: how often each sub-cache accepts a token."""
    return [i + 1 if growth == "linear" else BASES[growth] ** i for i in range(cascades)]


@dataclasses.dataclass(frozen=True)
class CascadeRule:
    """Decide which token is evicted for a new one.

    Attributes:
        size: |C|, the slots of all sub-caches: a number, or for `boundary_ranks` and `victim_rank` also a tensor with
            one for each row.
        accepts: f_i for each sub-cache.
        eager: whether all sub-caches accept while no more than |C| tokens came before.
        select: whether the higher score stays of two competing tokens; otherwise the older token stays.
    """

    size: int | Tensor
    accepts: list[int]
    eager: bool
    select: bool = True

    def boundary_ranks(self, number: Tensor, line_length: Tensor) -> Tensor:
        """Return the rank b W at which token `number` stops pushing; `line_length` if every sub-cache accepts.

        Args:
            number: int64, counted from the first token after the sinks.
            line_length: int64, the number of tokens in the line.
        """
        rank = line_length
        for i in reversed(range(1, len(self.accepts))):
            start = i * self.size // len(self.accepts)
            refuses = (number % self.accepts[i] != 0) & (start < line_length)
            rank = torch.where(refuses & (number > self.size) if self.eager else refuses, start, rank)
        return rank

    def victim_rank(self, number: Tensor, line_length: Tensor, score_at: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rank, from the newest, of the token that is evicted for token `number`, or NO_VICTIM."""
        rank = self.boundary_ranks(number, line_length)
        newer = rank - 1
        loser = torch.where(score_at(newer) >= score_at(rank), rank, newer) if self.select else newer
        return torch.where(rank < line_length, loser, torch.where(line_length < self.size, NO_VICTIM, line_length - 1))

    def insert(self, line: list[int], first: int, numbers: Tensor, scores: Sequence[Sequence[float]]) -> None:
        """Insert consecutive tokens into a line, except those whose numbers are negative.

        Args:
            line: tokens by age, the newest first; modified in place.
            first: the first of the tokens.
            numbers: int64 [n], on the host.
            scores: the scores of every token at the time of each of the n tokens.
        """
        real = (numbers >= 0).nonzero()[:, 0]
        lengths = torch.arange(len(line), len(line) + len(real)).clamp(max=self.slots)
        ranks = self.boundary_ranks(numbers[real], lengths)
        for n, rank in zip(real.tolist(), ranks.tolist(), strict=True):
            if rank < len(line):
                keeps_old = self.select and scores[n][line[rank - 1]] >= scores[n][line[rank]]
                del line[rank if keeps_old else rank - 1]
            elif len(line) == self.slots:
                line.pop()
            line.insert(0, first + n)

    @property
    def slots(self) -> int:
        """`size` as a number."""
        assert not isinstance(self.size, Tensor)
        return self.size

    def insert_prompt(self, blocks: Iterable[Tensor], number: Tensor, early: bool) -> Tensor:
        """Return the scores [B, H', N] after a prompt whose tokens were inserted one by one; DROPPED for dropped ones.

        Each token's slot depends on the previous token's slot.  The host computes this a hundred times faster than
        operations on tensors.

        Args:
            blocks: the scores after each token, [B, H', n, s], at least for all tokens up to the last of the block.
            number: int64 [B, q], negative for sinks and padding.
            early: whether a token is inserted before its own query has changed the scores.
        """
        numbers, lines, last, token = number.cpu(), list[list[list[int]]](), torch.empty(0), 0
        for scores in blocks:
            if token == 0:
                lines = [[[] for _ in range(scores.shape[1])] for _ in numbers]
                last = torch.zeros_like(scores[:, :, 0])
            scores_before, rows_of_scores = last.cpu().numpy(), scores.cpu().numpy()
            end = token + scores.shape[2]
            for row, row_numbers in enumerate(numbers[:, token:end]):
                for line, before, head_scores in zip(lines[row], scores_before[row], rows_of_scores[row], strict=True):
                    self.insert(line, token, row_numbers, [before, *head_scores[:-1]] if early else head_scores)
            last, token = scores[:, :, -1], end
        return mark_survivors(self._as_tensor(lines, last), last)

    def insert_chunk(self, number: Tensor, cached_columns: int, score: Tensor) -> Tensor:
        """Return the scores [B, H', N] after inserting, one by one, the tokens after the cached ones.

        The score of a dropped token is DROPPED.

        Args:
            number: int64 [B, H', N], negative for sinks and free slots.
        """
        by_age = torch.where(number < 0, -1, number)[..., :cached_columns].sort(dim=-1, descending=True)
        ordered = torch.where(by_age.values < 0, -1, by_age.indices)[..., : self.slots].tolist()
        lines = [[[token for token in line if token >= 0] for line in row] for row in ordered]
        scores, numbers = score.cpu().numpy(), number.cpu()[..., cached_columns:]
        for row, row_lines in enumerate(lines):
            for head, line in enumerate(row_lines):
                self.insert(line, cached_columns, numbers[row, head], [scores[row, head]] * numbers.shape[-1])
        return mark_survivors(self._as_tensor(lines, score), score)

    def _as_tensor(self, lines: list[list[list[int]]], like: Tensor) -> Tensor:
        """Return lines as int64 [B, H', |C|], -1 after the last token."""
        filled = [[[*line, *[-1] * (self.slots - len(line))] for line in row] for row in lines]
        return torch.tensor(filled, device=like.device)


def moving_averages(blocks: Iterable[Tensor], valid: Tensor, decay: float) -> Iterator[Tensor]:
    """Yield the moving average mu <- decay mu + (1 - decay) s after each query, instead of s.

    Padding changes nothing.  Averages in new memory take twice as long, most of it for the allocation.

    Args:
        blocks: s for consecutive queries, [B, H', n, N], where N never decreases; s is zero for later keys.
        valid: bool [B, q].
    """
    start, score = 0, None
    for probs in blocks:
        real = valid[:, start : start + probs.shape[2]]
        score = torch.zeros_like(probs[:, :, 0]) if score is None else score
        score = torch.nn.functional.pad(score, (0, probs.shape[-1] - score.shape[-1]))
        for query_probs, query_decay in zip(probs.unbind(2), _decays_of(real, decay, probs.dtype), strict=True):
            score = torch.lerp(query_probs, score, query_decay, out=query_probs)
        start += probs.shape[2]
        yield probs


def _decays_of(real: Tensor, decay: float, dtype: torch.dtype) -> Sequence[Any]:
    """Return the decay of each query: a number, or [B, 1, 1] where rows have padding, which decays nothing."""
    if real.all():  # an operation with a number takes half as long
        return [decay] * real.shape[1]
    decays = torch.full_like(real, decay, dtype=dtype).masked_fill(~real, 1)
    return decays[:, :, None, None].unbind(1)


def mark_survivors(line: Tensor, score: Tensor) -> Tensor:
    """Return the scores [B, H', N] of the tokens in the line, DROPPED for the others."""
    kept = torch.nn.functional.pad(torch.full_like(score, DROPPED), (0, 1))
    index = torch.where(line < 0, score.shape[-1], line)  # free entries write to an extra column
    return kept.scatter(-1, index, score.gather(-1, line.clamp(min=0)))[..., :-1]
