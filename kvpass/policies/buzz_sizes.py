"""The sizes of BUZZ's cache: the parameter theorem, and the recursion that thinning follows."""

from __future__ import annotations

from kvpass.policies.base import require


def ratio(stride: int) -> float:
    """T / w."""
    require(stride >= 3, "stride", stride, "must be at least 3: the cache would grow without bound")
    return (stride**2 + 1) / (stride + 1) if stride % 2 else stride - 1


def threshold_for(window: int, stride: int = 5) -> int:
    """T for a window: T / w = (s^2 + 1) / (s + 1) for an odd stride s, s - 1 for an even one.

    >>> threshold_for(12, stride=5), threshold_for(12, stride=4)
    (52, 36)
    """
    return round(window * ratio(stride))


def window_and_threshold(budget: int, stride: int = 5, sinks: int = 4) -> tuple[int, int]:
    """w and T for a budget: sinks + w + T == budget, T / w as in `threshold_for` or next to it.

    >>> window_and_threshold(68)
    (12, 52)
    """
    window = max(1, round((budget - sinks) / (1 + ratio(stride))))
    return window, budget - sinks - window


def thinned(middle: int, old: int, stride: int) -> int:
    """How many of a middle are left, of which `old` have been through it before: ceil(old / s') + ceil(new / s)."""
    interval = (stride + 1) // 2
    return -(-old // interval) - (-(middle - old) // stride)


def thinned_if_due(
    stored: int, old: int, fixed: int, threshold: int, stride: int, iterate: bool = False
) -> tuple[int, int]:
    """Tokens stored and old ones among them, after a thinning if the middle holds more than the threshold.

    Args:
        stored, old: the same before it.
        fixed: sinks and window together.
        iterate: sample again at the interval s' until the middle fits.
    """
    middle, interval = stored - fixed, (stride + 1) // 2
    if middle <= threshold:
        return stored, old
    size = thinned(middle, old, stride)
    while iterate and size > threshold:
        size = -(-size // interval)
    return fixed + size, size
