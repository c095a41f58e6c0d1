"""Check the budget that the user gives, and convert it to a number of slots."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from kvpass.arguments import Condition
from kvpass.errors import BudgetError
from kvpass.policies.base import Policy
from kvpass.policies.budgets import share_of

Budget = Annotated[
    int | float | None,
    Condition(
        holds=lambda budget: not isinstance(budget, float) or 0 < budget <= 1,
        message="must be a number of slots, or a share of the prompt above 0 and at most 1.0",
        error=BudgetError,
    ),
]
SPARE = 256  # slots that an unbounded cache can grow by before it is compiled again


def check_user_budget(policy: Policy, budget: Budget) -> None:
    """Raise BudgetError for a budget that can never work with the policy."""
    if budget is None:
        if policy.evicts:
            raise BudgetError(f"policy {policy.name!r} needs a budget: the slots to keep, or a share of the prompt")
        return
    if isinstance(budget, float) and policy.divides_heads:
        raise BudgetError(
            f"budget={budget}: {policy.name!r} assigns fixed slots to each head, so the budget cannot be a share of "
            "the prompt: give a number of slots"
        )
    if isinstance(budget, int):
        policy.check_budget(budget)


def slots_for(policy: Policy, budget: Budget, prompt: int) -> int:
    """Return the tokens to keep between steps for a prompt of `prompt` tokens.

    Raises:
        BudgetError: the share of this prompt is a budget that the policy cannot work with.
    """
    if budget is None:
        return 1 << (prompt + SPARE - 1).bit_length()
    if isinstance(budget, int):
        return budget
    slots = policy.fitting_budget(share_of(prompt, budget))
    policy.check_budget(slots)
    return slots


def slots_of_rows(policy: Policy, budget: Budget, valid: Tensor) -> list[int]:
    """Return the tokens to keep for each row of a prompt, whose real tokens bool [B, S] marks."""
    rows, padded = valid.shape
    lengths = valid.sum(-1).tolist() if isinstance(budget, float) else [padded] * rows
    return [slots_for(policy, budget, length) for length in lengths]
