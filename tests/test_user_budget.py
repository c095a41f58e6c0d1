"""Test the user's budget: numbers of slots, shares of prompts, and budgets with which a policy can never work."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvpass import policies
from kvpass.errors import BudgetError
from kvpass.user_budget import SPARE, Budget, check_user_budget, slots_for, slots_of_rows
from tests.strategies import MODEL_SPECIFIC

FULL, WINDOW = policies.resolve("full", {}), policies.resolve("window", {})
STREAMING = policies.resolve("streaming", {"sinks": 3})
OTHERS = [policies.resolve(name, {}) for name in policies.names() if name not in MODEL_SPECIFIC]
SHARES = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)


@given(share=SHARES, prompt=st.integers(1, 100_000))
@example(share=0.29, prompt=100)  # 28.999999999999996 in floating point
@example(share=1.0, prompt=7)
def test_a_share_is_rounded_down_to_what_the_policy_works_with(share: float, prompt: int) -> None:
    exact = math.floor(Fraction(str(share)) * prompt)
    assert slots_for(WINDOW, share, prompt) == max(exact, 1)
    assert slots_for(STREAMING, share, prompt) == max(exact, 4)


@pytest.mark.parametrize("policy", OTHERS, ids=lambda policy: policy.name)
@given(share=SHARES, prompt=st.integers(1, 500))
def test_a_share_of_any_prompt_is_a_budget_or_refused(policy: policies.Policy, share: float, prompt: int) -> None:
    try:
        slots = slots_for(policy, share, prompt)
    except BudgetError:
        assert policy.name in ("cascade", "buzz")  # the only ones with budgets in between that they do not take
    else:
        policy.check_budget(slots)
        assert slots <= max(share * prompt, policy.fitting_budget(0))


@given(budget=st.integers(1, 2**40), prompt=st.integers(1, 2**40))
def test_a_number_of_slots_is_the_same_for_all_prompts(budget: int, prompt: int) -> None:
    assert slots_for(WINDOW, budget, prompt) == budget


@given(prompt=st.integers(1, 2**20))
@example(prompt=1)
@example(prompt=256)
@example(prompt=257)
def test_without_a_budget_a_cache_has_room_to_grow(prompt: int) -> None:
    """Check that slots are the smallest power of two with `SPARE` more than the prompt, so that few sizes exist."""
    slots = slots_for(FULL, None, prompt)
    assert slots >= prompt + SPARE > slots // 2
    assert slots & (slots - 1) == 0


@given(share=SHARES, lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_each_row_has_the_share_of_its_real_tokens(share: float, lengths: list[int]) -> None:
    valid = torch.arange(40) >= 40 - torch.tensor(lengths)[:, None]
    assert slots_of_rows(STREAMING, share, valid) == [slots_for(STREAMING, share, length) for length in lengths]
    assert slots_of_rows(STREAMING, 9, valid) == [9] * len(lengths)
    assert slots_of_rows(FULL, None, valid) == [slots_for(FULL, None, 40)] * len(lengths)


@pytest.mark.parametrize(
    ("budget", "fits"),
    [
        *[(fitting, True) for fitting in (1, None, 0.5, 1.0, 1e-9)],
        *[(odd, False) for odd in (0.0, -0.1, 1.5, math.nan, math.inf)],
    ],
)
def test_a_share_is_above_zero_and_at_most_one(budget: Budget, fits: bool) -> None:
    (condition,) = Budget.__metadata__  # type: ignore[attr-defined]
    assert condition.holds(budget) == fits


@pytest.mark.parametrize(
    ("policy", "budget", "message"),
    [
        ("window", None, "policy 'window' needs a budget: the slots to keep, or a share of the prompt"),
        ("streaming", 4, "budget=4 is too small for 'streaming'"),
        ("window", 0, "budget=0 is too small for 'window'"),
        ("window", -3, "budget=-3 is too small for 'window'"),
        ("ada_kv", 0.5, "budget=0.5: 'ada_kv' assigns fixed slots to each head, so the budget cannot be a share"),
        ("critical_kv", 1.0, "budget=1.0: 'critical_kv' assigns fixed slots"),
    ],
)
def test_a_budget_that_can_never_work_is_refused(policy: str, budget: Budget, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        check_user_budget(policies.resolve(policy, {}), budget)


@pytest.mark.parametrize(("policy", "budget"), [("full", None), ("window", 1), ("streaming", 5), ("streaming", 1e-6)])
def test_a_budget_that_may_work_is_not_refused(policy: str, budget: Budget) -> None:
    """Check that nothing is said of shares before a prompt is there."""
    check_user_budget(policies.resolve(policy, {}), budget)


def test_slots_of_rows() -> None:
    valid = torch.ones(3, 20, dtype=torch.bool)
    valid[1, :8] = False
    streaming = policies.resolve("streaming", {})
    assert slots_of_rows(streaming, 0.5, valid) == [10, 6, 10]
    assert slots_of_rows(streaming, 9, valid) == [9, 9, 9]
