"""Compute the sizes of BUZZ's cache, by the parameter theorem and by the recursion of thinning."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Annotated

from torch import Tensor

from kvpass.arguments import at_least
from kvpass.policies.budgets import Count

# Below these a cache would grow without bound.
Stride = Annotated[int, at_least(3)]
OldStride = Annotated[int, at_least(2)]


@dataclasses.dataclass(frozen=True)
class Strides:
    """The sampling intervals of a middle segment.

    Attributes:
        new: s, the size of a hive.
        old: s', the interval at which tokens that survived a thinning are sampled again.
    """

    new: int
    old: int

    @staticmethod
    def of(stride: int, old_stride: int | None) -> Strides:
        """Return the strides for the options of the policy."""
        return Strides(stride, (stride + 1) // 2 if old_stride is None else old_stride)

    @property
    def ratio(self) -> float:
        """T / w such that thinning leaves w of T tokens again if w of these survived an earlier thinning.

        w = w / s' + (T - w) / s, and so T / w = 1 + s - s / s'.  With s' = floor((s + 1) / 2) this is the paper's (s^2
        + 1) / (s + 1) for an odd s, and s - 1 for an even one.
        """
        return float(1 + self.new - Fraction(self.new, self.old))


def threshold_for(window: int, stride: int = 5, old_stride: int | None = None) -> int:
    """Return T for a window: T / w = (s^2 + 1) / (s + 1) for an odd stride s, s - 1 for an even one.

    >>> threshold_for(12, stride=5), threshold_for(12, stride=4), threshold_for(12, stride=5, old_stride=5)
    (52, 36, 60)
    """
    return round(window * Strides.of(stride, old_stride).ratio)


def window_and_threshold(
    budget: Count, stride: int = 5, sinks: int = 4, old_stride: int | None = None
) -> tuple[Count, Count]:
    """Return w and T for a budget, as numbers or int64 tensors like the budget.

    sinks + w + T == budget, and T / w is as in `threshold_for` or next to it.

    >>> window_and_threshold(68)
    (12, 52)
    """
    unpinned_budget, parts = budget - sinks, 1 + Strides.of(stride, old_stride).ratio
    if isinstance(unpinned_budget, Tensor):  # float64, in which Python divides and rounds
        windows = (unpinned_budget.double() / parts).round().long().clamp(min=1)
        return windows, unpinned_budget - windows  # type: ignore[return-value]  # of what the budget is
    window = max(1, round(unpinned_budget / parts))
    return window, unpinned_budget - window  # type: ignore[return-value]


def thinned(middle: int, old: int, strides: Strides) -> int:
    """Return the size of a middle after thinning, `old` of which survived before: ceil(old / s') + ceil(new / s)."""
    return -(-old // strides.old) - (-(middle - old) // strides.new)


def thinned_if_due(
    stored: int, old: int, fixed: int, threshold: int, strides: Strides, iterate: bool = False
) -> tuple[int, int]:
    """Return the tokens stored, and the old ones among them, after a thinning if the middle exceeds the threshold.

    Args:
        stored, old: the numbers before it.
        fixed: sinks and window together.
        iterate: sample again at the interval s' until the middle fits.
    """
    middle = stored - fixed
    if middle <= threshold:
        return stored, old
    size = thinned(middle, old, strides)
    while iterate and size > threshold:
        size = -(-size // strides.old)
    return fixed + size, size
