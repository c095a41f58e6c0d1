"""Choose made-up conversations that need every graph that real ones will need, so that these find them compiled.

The token values do not matter, only the ways in which the model is called.
"""

from __future__ import annotations

from kvpass.policies.base import Policy
from kvpass.policies.types import Clock

TOKEN = 1  # every made-up token
TURN = 5  # tokens in a later turn
WITHOUT_BUDGET = (32, 48)  # prompt lengths if nothing is evicted


def prompt_lengths(budget: float | None, chunk: int | None = None) -> tuple[int, int]:
    """Return the lengths of two prompts; the second exceeds a budget that is a number of slots.

    Args:
        chunk: the tokens in a chunk of a prompt.  A chunk's graph is compiled at its second run, so the second prompt
            has three chunks, and a rest.
    """
    known = budget is not None and budget >= 1
    short, long = (max(2, int(budget) * 3 // 4), int(budget) + 16) if budget and known else WITHOUT_BUDGET
    return short, long if chunk is None else max(long, 3 * chunk + chunk // 2)


def steps_until_compaction(policy: Policy, budget: int, clock: Clock) -> int:
    """Return the number of steps until the policy compacts; 0 if it does not within as many steps as slots."""
    if not clock:
        return 0
    for count in range(1, budget + 2):
        due, clock = policy.tick(clock, budget)
        if due:
            return count
    return 0
