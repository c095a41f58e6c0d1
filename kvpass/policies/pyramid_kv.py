"""Select prompt tokens as SnapKV does, with budgets that fall from the first layer to the last.

PyramidKV ("PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling").
https://arxiv.org/abs/2406.02069

With b = budget - window, the last layer gets b // beta selected tokens, the first one 2 b - b // beta, and the layers
between them lie on a line.  The first layer's budget is at most the prompt's length, and prompts shorter than 2 b give
every layer the same budget, as in the public code.  That code falls by whole steps, rounded down, so that its layers
get more than b on average, up to 2 b with a small budget and many layers.  Here the budgets' mean is the budget.  With
an `interval`, which the paper lacks, the last layer gets at least `interval` selected tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor

from kvpass.arguments import Positive
from kvpass.policies.budgets import Plan, whole_shares
from kvpass.policies.snapkv import SnapKV
from kvpass.policies.types import Attention


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """The PyramidKV policy.

    Attributes:
        beta: the ratio of the mean number of tokens that layers select to the last layer's.
    """

    beta: Positive = 20
    name = "pyramid_kv"
    shardable = "heads"

    def plan(self, attention: Sequence[Attention], valid: Tensor, budget: int) -> list[Plan]:
        layers = len(attention)
        options = (layers, budget, self.window, self.beta)
        steepest = pyramid(*options, prompt=4 * budget, interval=self.interval)
        budgets = [pyramid(*options, prompt, self.interval) for prompt in valid.sum(-1).tolist()]
        return [
            Plan(max(rows), max(rows) + 1, rows, max(most, budget) + 1)
            for rows, most in zip(zip(*budgets, strict=True), steepest, strict=True)
        ]


def pyramid(layers: int, budget: int, window: int, beta: int, prompt: int, interval: int = 1) -> list[int]:
    """Return the budget of each layer for a prompt; their mean is `budget`.

    The last layer selects at least `interval` tokens, so that a compaction leaves it one in addition to its window.
    """
    mean = budget - window
    if layers == 1 or prompt <= budget or prompt < 2 * mean:
        return [budget] * layers
    most = min(2 * mean - max(mean // beta, interval), prompt - window)
    fall = Fraction(2 * (most - mean), layers - 1)
    shares = whole_shares([most - layer * fall for layer in range(layers)], layers * mean)
    return [share + window for share in shares]
