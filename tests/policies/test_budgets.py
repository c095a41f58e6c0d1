"""Test shares of budgets: numbers and tensors are rounded alike, and exactly."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvpass.policies.base import Tokens
from kvpass.policies.budgets import MAX_BUDGET, share_of
from kvpass.policies.h2o import H2O

THIRDS = [1 / 3, 2 / 3, 0.9999999999999999, 1e-20, 5e-324, 0.29, 0.0, 1.0]


@given(
    fraction=st.sampled_from(THIRDS) | st.floats(0, 1),
    counts=st.lists(st.integers(0, 1 << 13) | st.integers(0, MAX_BUDGET), min_size=1, max_size=4),
)
@example(fraction=2 / 3, counts=[3096, MAX_BUDGET])
@example(fraction=0.29, counts=[100, 200])
def test_shares_are_rounded_down_exactly(fraction: float, counts: list[int]) -> None:
    exact = [math.floor(Fraction(str(fraction)) * count) for count in counts]
    assert [share_of(count, fraction) for count in counts] == exact
    assert share_of(torch.tensor(counts), fraction).tolist() == exact


@pytest.mark.parametrize("alpha", [1.0, 4 / 3, 3.0, 1e18, 1e300])
def test_a_multiple_of_a_number_is_exact(alpha: float) -> None:
    for count in (0, 1, 4096, MAX_BUDGET):
        assert share_of(count, alpha) == math.floor(Fraction(str(alpha)) * count)


@pytest.mark.parametrize("heavy", THIRDS)
def test_budgets_by_row_keep_the_tokens_of_one_budget(heavy: float) -> None:
    """Compare `h2o` with a number and with a tensor, as pinned tokens leave it: 3096 of 4096 slots."""
    position = torch.arange(4096)[None, None]
    scores = [
        H2O(heavy=heavy).score(Tokens(position, torch.full((1, 1, 1), 4096), {"score": position.float()}, budget))
        for budget in (3096, torch.full((1, 1, 1), 3096))
    ]
    assert torch.equal(*scores)
    assert scores[0].isinf().sum() == 3096 - math.floor(Fraction(str(heavy)) * 3096)
