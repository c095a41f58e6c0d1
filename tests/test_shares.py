"""A budget that is a share is one of each row's real tokens: what a padded row keeps is what it keeps alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpass
from kvpass import budget as budgets
from kvpass import policies
from kvpass.policies.base import Plan, by_rows
from tests.models import build, different, force, prompt


def held(run: Any, row: int = 0, padding: int = 0) -> list[list[int]]:
    """Return the positions, counted behind the padding, that a row holds in each layer after the last step."""
    return [[place - padding for place in layer[row, 0].tolist() if place >= 0] for layer in run.held[-1]]


@pytest.mark.parametrize("policy", ["streaming", "h2o", "cascade", "d2o"])
@pytest.mark.parametrize("padding", [(6,), (6, 6)], ids=["one row", "two rows"])
@pytest.mark.few(2)
def test_padding_is_not_shared_in(policy: str, padding: tuple[int, ...]) -> None:
    """Rows of 14 tokens in 20 columns keep 7 of them, and not 10."""
    model, (ids, mask) = build("Llama"), prompt(len(padding), 24, padding)
    padded = force(model, ids, mask, [20, 1, 1], policy=policy, budget=0.5, inner="eager")
    alone = force(model, ids[:1, 6:], mask[:1, 6:], [14, 1, 1], policy=policy, budget=0.5, inner="eager")
    assert held(padded, padding=6) == held(alone)
    torch.testing.assert_close(padded.logits[:1, -3:], alone.logits[:, -3:], atol=1e-4, rtol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["eager", "reference"])
def test_rows_of_different_lengths_keep_their_own_share_under_d2o(inner: str) -> None:
    model, (ids, mask) = different(2), prompt(2, 24, (8, 0))
    together = force(model, ids, mask, [20, 1, 1], policy="d2o", budget=0.5, inner=inner)
    for row, left in enumerate((8, 0)):
        one = (ids[row : row + 1, left:], mask[row : row + 1, left:])
        alone = force(model, *one, [20 - left, 1, 1], policy="d2o", budget=0.5, inner=inner)
        assert held(together, row, left) == held(alone)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "tova"])
def test_rows_of_different_shares_are_refused_by_other_policies(policy: str) -> None:
    ids, mask = prompt(2, 20, (8, 0))
    with pytest.raises(kvpass.BudgetError, match=r"rows of \[12, 20\] tokens would keep \[6, 10\]"):
        force(build("Llama"), ids, mask, [20], policy=policy, budget=0.5, inner="eager")


def test_slots_of_rows() -> None:
    valid = torch.ones(3, 20, dtype=torch.bool)
    valid[1, :8] = False
    streaming = policies.resolve("streaming", {})
    assert budgets.slots_of_rows(streaming, 0.5, valid) == [10, 6, 10]
    assert budgets.slots_of_rows(streaming, 9, valid) == [9, 9, 9]


def test_a_plan_by_rows_takes_each_row_from_the_plan_for_its_budget() -> None:
    plans = {6: Plan(7, 8, (5, 7), 9), 10: Plan(11, 12, (11, 10), 14)}
    assert by_rows(plans, [10, 6]) == Plan(11, 12, (11, 7), 14)
    assert by_rows({6: plans[6]}, [6, 6]) is plans[6]
