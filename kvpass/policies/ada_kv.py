"""Select prompt tokens as SnapKV does, with budgets of KV heads by the concentration of their attention.

AdaKV (Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference").
https://arxiv.org/abs/2407.11550

At the end of a prompt the scores of all KV heads of a layer compete for the selected tokens of the layer, Hkv * (budget
- window).  Each head's best `safeguard` of its equal share are safe.  A head's count is the number of its tokens that
win.  The paper gives each head its count; a cache with a different length for each head would need masks, which save no
memory, or separate code.  Here a layer has up to four classes of heads with equally many slots (`shares`), the same for
every layer and prompt.  The heads with the highest counts get the largest class.  Each head then selects its own
tokens, and keeps a ring of recent ones, as SnapKV does.  Together the heads keep exactly Hkv * budget tokens.

A chunk is selected from like a prompt; heads stay in the classes that the first prompt or chunk gave them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from kvpass.arguments import Condition, Share, require
from kvpass.errors import PolicyError
from kvpass.policies.budgets import HeadClass, share_of
from kvpass.policies.ranking import keep_highest
from kvpass.policies.snapkv import SnapKV
from kvpass.policies.types import Tokens

MAX_CLASSES = 4
MAX_CHANGE = 32  # tokens more or less than its share that a class of heads gets
OF_FEW_HEADS = {2: (1.35, 0.65), 3: (1.45, 1.0, 0.55), 4: (1.55, 1.1, 0.8, 0.55)}
"""Budget shares by number of heads; for three, the means of SmolLM2-135M's counts, for the others, similar numbers."""
LARGE, MIDDLE, SMALL = 4.0, 1.45, 0.22
"""The shares of an eighth, a quarter and the rest of many heads, close to the averages of AdaKV's counts."""

Shares = Annotated[
    tuple[float, ...],
    Condition("of numbers above 0", lambda shares: all(0 < share < math.inf for share in shares)),
]


@dataclasses.dataclass(frozen=True)
class AdaKV(SnapKV):
    """The AdaKV policy.

    Attributes:
        safeguard: the share of a head's equal share of the budget that no other head can win.
        shares: the relative numbers of tokens that the heads of a layer select, one number for each KV head,
            at most four different ones; one number for equal heads; () for the shares of `shares_of`.
    """

    safeguard: Share = 0.2
    shares: Shares = ()
    name = "ada_kv"
    cache_positions_refusal = "heads keep different numbers of tokens, and a query has one position among them"

    def __post_init__(self) -> None:
        super().__post_init__()
        few = len(set(self.shares)) <= MAX_CLASSES
        require(few, "shares", self.shares, f"must have at most {MAX_CLASSES} different numbers")

    def head_classes(self, heads: int, budget: int) -> tuple[HeadClass, ...]:
        if heads == 1:
            raise PolicyError(
                f"{self.name!r} divides the budget of a layer among its KV heads, and this model has one per layer: "
                "use policy='snapkv', which selects the same tokens there"
            )
        shares = self.shares or shares_of(heads)
        if len(shares) == 1:
            return ()
        if len(shares) != heads:
            raise PolicyError(
                f"shares={shares}: {len(shares)} numbers for a model with {heads} KV heads per layer: give one for each"
            )
        return classes_of(shares, heads * budget, self.fitting_budget(0))

    def head_counts(self, tokens: Tokens, layer: int) -> Tensor:
        selected = self.compacted(tokens.budget) - self.window
        assert isinstance(selected, int)  # rows have no budgets of their own
        position = torch.where(self._competes(tokens), tokens.position, -1)
        return count_winners(tokens.state["score"], position, selected, self.safeguard)

    def _competes(self, tokens: Tokens) -> Tensor:
        """Return bool [B, H, N]: the selected tokens before the window."""
        return tokens.live & tokens.state["selected"] & ~tokens.newest(self.window)


def shares_of(heads: int) -> tuple[float, ...]:
    """Return the shares of a layer's heads from the largest to the smallest."""
    if heads in OF_FEW_HEADS:
        return OF_FEW_HEADS[heads]
    large, middle = max(1, heads // 8), max(1, heads // 4)
    return (LARGE,) * large + (MIDDLE,) * middle + (SMALL,) * (heads - large - middle)


def classes_of(shares: tuple[float, ...], total: int, least: int) -> tuple[HeadClass, ...]:
    """Return classes of heads whose budgets are about `least` and their shares of the rest of `total` tokens.

    Budgets are whole and equal within a class, and add up to `total`.  The class of the largest share gets the rest;
    the other budgets change by as few tokens as possible to make it divisible.  Equal budgets give no classes.
    """
    counts = [len([*group]) for _, group in itertools.groupby(sorted(shares, reverse=True))]
    rest, whole = total - least * len(shares), math.fsum(shares)
    others = [least + math.floor(rest * share / whole) for share in sorted(set(shares), reverse=True)[1:]]
    most = min(counts[0], MAX_CHANGE)
    sizes = range((most - 1) * len(others) + 1)
    for change in itertools.chain.from_iterable(_changes(len(others), most - 1, size) for size in sizes):
        budgets = [budget + more for budget, more in zip(others, change, strict=True)]
        left = total - sum(count * budget for count, budget in zip(counts[1:], budgets, strict=True))
        found = [left // counts[0], *budgets]
        if left % counts[0] == 0 and found == sorted(found, reverse=True) and found[-1] >= least:
            return merge_equal_classes(counts, found)
    return ()


def _changes(count: int, most: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield all `count` numbers from -most to most whose absolute values add up to `size`, larger ones first."""
    if not count:
        yield from [()] if not size else []
        return
    largest, least = min(most, size), max(0, size - most * (count - 1))
    for first in (x for x in range(largest, -largest - 1, -1) if abs(x) >= least):
        for others in _changes(count - 1, most, size - abs(first)):
            yield (first, *others)


def merge_equal_classes(counts: list[int], budgets: list[int]) -> tuple[HeadClass, ...]:
    """Return classes of these numbers of heads and budgets, in order; equal budgets are merged, () for one."""
    heads = dict.fromkeys(budgets, 0)
    for count, budget in zip(counts, budgets, strict=True):
        heads[budget] += count
    return tuple(HeadClass(count, budget) for budget, count in heads.items()) if len(heads) > 1 else ()


def count_winners(score: Tensor, position: Tensor, count: int, safeguard: float) -> Tensor:
    """Return how many tokens of each head are among the best of all heads, int64 [B, H].

    Args:
        score: float32 [B, H, N].
        position: int64 [B, H, N], in order, negative for tokens that do not compete.
        count: the mean of the tokens that a head can win.
        safeguard: the share of `count` that each head's best tokens win in any case.
    """
    rows, heads, tokens = score.shape
    safe = keep_highest(score, position, share_of(count, safeguard))
    ranked = torch.where(position < 0, -torch.inf, torch.where(safe, torch.inf, score)).flatten(1)
    best = ranked.argsort(dim=-1, descending=True, stable=True)[:, : heads * count]
    won = torch.zeros_like(ranked, dtype=torch.int64).scatter(-1, best, 1).view(rows, heads, tokens)
    return (won * (position >= 0)).sum(-1)
