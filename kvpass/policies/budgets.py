"""Divide budgets among layers, rows and parts of a cache, as numbers or as tensors with one number per row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Count = TypeVar("Count", bound="int | Tensor")
MAX_BUDGET = 1 << 31
"""The largest number of tokens that `share_of` takes."""


class HeadClass(NamedTuple):
    """KV heads of a layer with equal budgets.

    Attributes:
        heads: the number of heads.
        budget: tokens that each of them keeps between steps.
    """

    heads: int
    budget: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The budget and the slots of one layer.

    Attributes:
        budget: tokens kept between steps, the largest over the rows.
        capacity: slots of the layer.
        rows: tokens kept between steps for each row, if rows have different budgets.
        max_capacity: slots that the layer needs for any prompt, if that depends on the prompt.
    """

    budget: int
    capacity: int
    rows: tuple[int, ...] = ()
    max_capacity: int = 0

    def budgets_of_rows(self, rows: int) -> tuple[int, ...]:
        """Return the budget of each of `rows` rows, which `Policy.clock` and `Policy.tick` receive."""
        return self.rows or (self.budget,) * rows

    def differs(self, budget: int) -> bool:
        """Return whether slots must store budgets by row, because they can differ from the user's `budget`."""
        return bool(self.rows) or self.budget != budget

    @property
    def with_max_capacity(self) -> Plan:
        """The plan with slots for any prompt, for compilers that specialise on the number of slots."""
        return dataclasses.replace(self, capacity=max(self.capacity, self.max_capacity))


def by_rows(plans: Mapping[int, Plan], budgets: Sequence[int]) -> Plan:
    """Merge one plan for each budget into a plan with a budget for each row."""
    if len(plans) == 1:
        return next(iter(plans.values()))
    rows = tuple(plans[budget].budgets_of_rows(len(budgets))[row] for row, budget in enumerate(budgets))
    capacity, most = (max(getattr(plan, name) for plan in plans.values()) for name in ("capacity", "max_capacity"))
    return Plan(max(rows), capacity, rows, most)


def window_starts(valid: Tensor, size: int | Tensor) -> Tensor:
    """Return where each token of a prompt starts to count, for policies that renumber: int64 [B, q].

    The last `size` real tokens of a row form one window, whose tokens see nothing before it.  The tokens before it form
    windows of `size` tokens, counted from the first token.  The result is the number of real tokens before the token's
    window; it is zero for a prompt that fits.

    Args:
        valid: bool [B, q], false for padding.
        size: a number, or int64 [B, 1].
    """
    position = (valid.long().cumsum(-1) - 1).clamp(min=0)
    last = (valid.long().sum(-1, keepdim=True) - size).clamp(min=0)  # [B, 1]
    return torch.where(position < last, position // size * size, last)


def clamp_min(count: Count, least: int) -> Count:
    """Return a count, or `least` where the count is lower."""
    return count.clamp(min=least) if isinstance(count, Tensor) else max(count, least)  # type: ignore[return-value]


def clamp_max(count: Count, most: int | Tensor) -> Count:
    """Return a count, or `most` where the count is higher; a tensor of bounds is for a tensor of counts."""
    if isinstance(count, Tensor) and isinstance(most, Tensor):
        return torch.minimum(count, most)  # type: ignore[return-value]
    return count.clamp(max=most) if isinstance(count, Tensor) else min(count, most)  # type: ignore[return-value]


def share_of(count: Count, fraction: float) -> Count:
    """Return floor(fraction * count), exact for the decimal fraction: 0.29 of 100 is 29, not 28.

    Args:
        count: from 0 to `MAX_BUDGET`: an integer, a symbolic one, or an int64 tensor.
        fraction: from 0 to 1; for an integer any number that is at least 0.
    """
    whole, rest = divmod(Fraction(str(fraction)), 1)
    share = _largest_fraction(rest)
    part = count * share.numerator // share.denominator  # integers, because the count may be symbolic
    return count * whole + part if whole else part  # type: ignore[return-value]  # of the type of the count


def _largest_fraction(number: Fraction) -> Fraction:
    """Return the largest fraction up to `number` whose denominator is at most `MAX_BUDGET`.

    A share k of n tokens is at most `number` exactly if k / n is, and k / n has such a denominator.  So shares of this
    fraction equal the shares of `number`, and n times its numerator fits into int64.
    """
    nearest = number.limit_denominator(MAX_BUDGET)
    if nearest <= number:
        return nearest
    above, divisor = nearest.as_integer_ratio()
    inverse = pow(above, -1, divisor)
    below = inverse + (MAX_BUDGET - inverse) // divisor * divisor  # above * below - 1 is a multiple of divisor
    return Fraction((above * below - 1) // divisor, below)


def whole_shares(exact: Sequence[float | Fraction], total: int, most: float = math.inf) -> list[int]:
    """Return the shares rounded so that they add up to `total`: the shares of the largest rests are rounded up."""
    shares = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in [i for i in by_rest if shares[i] < most][: total - sum(shares)]:
        shares[i] += 1
    return shares
