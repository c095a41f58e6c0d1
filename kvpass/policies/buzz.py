"""Keep sinks, a window, and the best token of each hive of a middle segment.

BUZZ ("BUZZ: Beehive-structured Sparse KV Cache with Segmented Heavy Hitters for Efficient LLM Inference").
https://arxiv.org/abs/2410.23079

The cache is [k sinks | middle | window of the last w tokens].  Tokens are appended until the middle has more than T;
then it is thinned in one step.  Its first `old` tokens, which survived earlier rounds, are sampled at an interval of s'
= floor((s + 1) / 2) regardless of their scores.  The new ones are divided into hives of s, and the token of highest
score of each hive stays, for each KV head separately.  The score is the attention to the token, summed over all queries
and the G query heads.  A middle of `old` + new shrinks to

    old' = ceil(old / s') + ceil(new / s)

for any data, so the host knows which steps must compact; all other steps only append.  The bound is k + w + T, and
one more during attention.  A prompt or chunk that leaves more than T is sampled at the interval s' until it fits
(Remark 2).

`threshold_for` is the paper's parameter theorem, `window_and_threshold` splits a budget by it.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive, at_least
from kvpass.errors import BudgetError
from kvpass.policies.base import Policy
from kvpass.policies.budgets import Count
from kvpass.policies.ranking import INT64_MAX
from kvpass.policies.types import Attention, Clock, State, Tokens

LOG_BASE = math.log(512)

# Below these a cache would grow without bound.
Stride = Annotated[int, at_least(3)]
OldStride = Annotated[int, at_least(2)]


@dataclasses.dataclass(frozen=True)
class Buzz(Policy):
    """The BUZZ policy.

    Attributes:
        stride, sinks: s, at least 3, and k.
        window, threshold: w and T; a missing one follows from the budget, both by the parameter theorem.
        log_n: multiply the logits by log_512(n), with n tokens attended to.
        variant: "buzz", "fast" (scores are the attention of the last step alone) or "nomax" (the first of each hive
            stays, for any scores).
        iterate_prompt: False samples a prompt once, as the public code does; it then gets a slot for each token left.
        old_stride: s' (Fig. 8a), at least 2; None for floor((s + 1) / 2).
    """

    stride: Stride = 5
    sinks: Natural = 4
    window: Positive | None = None
    threshold: Annotated[int, at_least(2)] | None = None
    log_n: bool = False
    variant: Literal["buzz", "fast", "nomax"] = "buzz"
    iterate_prompt: bool = True
    old_stride: OldStride | None = None
    name = "buzz"
    keep_prompt_refusal = "its hives are counted from the sinks, and thinning depends on counts alone"
    interval_refusal = "it evicts in batches already, by `stride` and `threshold`"
    shardable = "heads"
    heads = "kv"
    positions = "cache"
    statistics = frozenset({"total"})
    reads_rank = True

    @property
    def sampling(self) -> int:
        """s'."""
        return _interval(self.stride, self.old_stride)

    def sizes(self, budget: Count) -> tuple[Count, Count]:
        """Return w and T: numbers, or tensors for budgets by row."""
        rest: Any = budget - self.sinks
        window: Any = self.window
        threshold: Any = self.threshold
        if window is None:
            split = window_and_threshold(rest, self.stride, self.old_stride)
            window = split[0] if threshold is None else rest - threshold
        return window, rest - window if threshold is None else threshold

    def minimum_budget(self) -> int:
        return self.sinks + (self.window or 1) + (self.threshold or 2)

    def capacity(self, budget: int, prompt: int = 0) -> int:
        window, threshold = self.sizes(budget)
        stored, _ = self._counts(prompt, 0, budget, self.iterate_prompt)
        return max(stored, self.sinks + window + threshold) + 1

    # The host counts for each row the stored tokens, and the old ones among the middle.

    def clock(self, clock: Clock, new: int, budget: int) -> Clock:
        stored, old = clock or (0, 0)
        return self._counts(stored + new, old, budget, self.iterate_prompt or bool(clock))

    def tick(self, clock: Clock, budget: int) -> tuple[bool, Clock]:
        counts = self._counts(clock[0] + 1, clock[1], budget, False)
        return counts[0] <= clock[0], counts

    def _counts(self, stored: int, old: int, budget: int, iterate: bool) -> tuple[int, int]:
        """Return the tokens stored and the old ones after a thinning, which is repeated until they fit if `iterate`."""
        window, threshold = self.sizes(budget)
        middle = stored - self.sinks - window
        if middle <= threshold:
            return stored, old
        size = -(-old // self.sampling) - (-(middle - old) // self.stride)  # each of the quotients rounded up
        while iterate and size > threshold:
            size = -(-size // self.sampling)
        return self.sinks + window + size, size

    # The tensors.

    def logit_scale(self, count: Tensor) -> Tensor | None:
        return count.clamp(min=1).float().log() / LOG_BASE if self.log_n else None

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32}

    def row_state(self) -> dict[str, int | float]:
        return {"old": 0}

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        probs, before = attention.total.sum(2), tokens.state["score"]  # [B, Hkv, N]
        return {
            "score": torch.where(attention.queries > 0, probs, before) if self.variant == "fast" else before + probs
        }

    def score(self, tokens: Tokens) -> Tensor:
        """Return scores that keep sinks and a window; they are used only if the host has missed a compacting step."""
        return torch.where(tokens.position < self.sinks, INT64_MAX, tokens.position)

    def victim(self, tokens: Tokens) -> Tensor:
        """Return a free slot if there is one: the next compaction decides when a row is full, not its budget."""
        return super().victim(dataclasses.replace(tokens, budget=0))

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        window, threshold = self.sizes(tokens.budget)
        middle = tokens.live.sum(-1, keepdim=True) - self.sinks - window  # [B, H', 1]
        rank, old, interval = tokens.order - self.sinks, tokens.state["old"], self.sampling
        in_middle = tokens.live & (rank >= 0) & (rank < middle)
        is_new, hive = in_middle & (rank >= old), (rank - old).clamp(min=0) // self.stride
        starts_hive = (rank - old) % self.stride == 0
        best = starts_hive if self.variant == "nomax" else best_of_hives(tokens.state["score"], is_new, hive, rank)
        survives = torch.where(is_new, best, rank % interval == 0)
        old_count = (old + interval - 1) // interval
        new_rank = torch.where(is_new, old_count + hive, rank // interval)  # among the tokens that stay
        size = old_count + (middle - old + self.stride - 1) // self.stride
        more = self._further_interval(tokens, size, interval, threshold)
        due = middle > threshold
        keep = torch.where(due & in_middle, survives & (new_rank % more == 0), tokens.live)
        return keep, {"old": torch.where(due, (size + more - 1) // more, old)}

    def _further_interval(self, tokens: Tokens, size: Tensor, interval: int, threshold: int | Tensor) -> Tensor:
        """Return the product of the intervals of later passes over a prompt's or chunk's middle; 1 for none."""
        product, count = torch.ones_like(size), tokens.position.shape[-1]
        if tokens.cached_columns == count or (tokens.cached_columns == 0 and not self.iterate_prompt):
            return product
        for _ in range(count.bit_length()):
            product = torch.where((size + product - 1) // product > threshold, product * interval, product)
        return product

    def check_budget(self, budget: int) -> None:
        super().check_budget(budget)
        window, threshold = self.sizes(budget)
        if window < 1 or threshold < 2 or self.sinks + window + threshold > budget:
            split = f"sinks={self.sinks}, window={window} and threshold={threshold}"
            raise BudgetError(f"budget={budget} cannot be split into {split}")


def threshold_for(window: int, stride: int = 5, old_stride: int | None = None) -> int:
    """Return the threshold T for a window w, by the paper's parameter theorem.

    T / w = (s^2 + 1) / (s + 1) for an odd stride s, and s - 1 for an even one.

    >>> threshold_for(12, stride=5), threshold_for(12, stride=4), threshold_for(12, stride=5, old_stride=5)
    (52, 36, 60)
    """
    return round(window * _ratio(stride, old_stride))


def window_and_threshold(middle: Count, stride: int, old_stride: int | None) -> tuple[Count, Count]:
    """Return w and T for the budget without sinks, as numbers or int64 tensors like this budget.

    w + T == middle, and T / w is as in `threshold_for` or next to it.

    >>> window_and_threshold(64, 5, None)
    (12, 52)
    """
    parts = 1 + _ratio(stride, old_stride)
    if isinstance(middle, Tensor):  # float64, in which Python divides and rounds
        windows = (middle.double() / parts).round().long().clamp(min=1)
        return windows, middle - windows  # type: ignore[return-value]  # of the type of the budget
    window = max(1, round(middle / parts))
    return window, middle - window  # type: ignore[return-value]


def _interval(stride: int, old_stride: int | None) -> int:
    """Return s', the interval at which tokens that survived a thinning are sampled again."""
    return (stride + 1) // 2 if old_stride is None else old_stride


def _ratio(stride: int, old_stride: int | None) -> float:
    """Return T / w for which each thinning of T tokens, w of them old, leaves w tokens.

    w = w / s' + (T - w) / s, and so T / w = 1 + s - s / s'.  With s' = floor((s + 1) / 2) this is the paper's (s^2 + 1)
    / (s + 1) for an odd s, and s - 1 for an even one.
    """
    return float(1 + stride - Fraction(stride, _interval(stride, old_stride)))


def best_of_hives(score: Tensor, in_hive: Tensor, hive: Tensor, rank: Tensor) -> Tensor:
    """Return bool [B, H', N]: whether the token has the highest score in its hive; of equal scores the first.

    Args:
        score: [B, H', N].
        in_hive: bool [B, H', N], whether the token is in a hive; the result is undefined for other tokens.
        hive, rank: int64 [B, H', N], the hive of each token, and the token's rank.
    """
    no_hive = score.shape[-1]  # there are fewer hives than tokens: this one is for tokens outside of hives
    hive_index = torch.where(in_hive, hive, no_hive)
    score = torch.where(in_hive, score, -torch.inf)
    shape = (*score.shape[:2], no_hive + 1)
    maximum = score.new_full(shape, -torch.inf).scatter_reduce(-1, hive_index, score, "amax").gather(-1, hive_index)
    rank = torch.where(score == maximum, rank, INT64_MAX)
    return rank == rank.new_full(shape, INT64_MAX).scatter_reduce(-1, hive_index, rank, "amin").gather(-1, hive_index)
