"""Pin the tokens of prompts and chunks, for policies with `keep_prompt`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.errors import BudgetError
from kvpass.policies.base import Policy
from kvpass.policies.protocols import Merging
from kvpass.policies.ranking import LATE
from kvpass.policies.types import Attention, Merge, State, Tokens

PINNED = "pinned"
"""The entry of the state that marks pinned tokens."""


@dataclasses.dataclass(frozen=True)
class PinnedTokens:
    """The hooks by which a policy evicts, applied to the tokens that are not pinned, with the rest of the budget.

    A policy's own `victim` is not called: the unpinned token of lowest score is evicted.
    """

    policy: Policy

    def state(self) -> dict[str, torch.dtype]:
        """Return the policy's state, and the entry for pinned tokens."""
        return {**self.policy.state(), PINNED: torch.bool}

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        """Return the policy's changes to the state, and pin the new tokens of a prompt or chunk.

        Raises:
            BudgetError: as from `check_pinned`.
        """
        changes, count = self.policy.observe_chunk(tokens, attention), tokens.position.shape[-1]
        if tokens.held == count:
            return changes
        is_new = torch.arange(count, device=tokens.position.device) >= tokens.held
        pinned = (tokens.state[PINNED] | is_new) & tokens.live
        counts = pinned.sum(-1, keepdim=True)
        check_pinned(self.policy, int(counts.max()), int((self.policy.compacted(tokens.budget) - counts).min()))
        return {**changes, PINNED: pinned}

    def victim(self, tokens: Tokens) -> Tensor:
        score = self.policy.score(_unpinned(tokens))
        below, top = (torch.finfo(score.dtype).max, torch.inf) if score.is_floating_point() else (LATE - 1, LATE)
        return tokens.lowest(torch.where(_pinned(tokens), top, score.clamp(max=below)))

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        keep, changes = self.policy.compact(_unpinned(tokens))
        return keep | _pinned(tokens), changes

    def merge_evicted(self, tokens: Tokens, held: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        """Return the policy's merge, in which no token is merged into a pinned one."""
        assert isinstance(self.policy, Merging)
        return self.policy.merge_evicted(_unpinned(tokens), held, evicted, valid)


def _pinned(tokens: Tokens) -> Tensor:
    return tokens.state[PINNED] & tokens.live


def _unpinned(tokens: Tokens) -> Tokens:
    """Return the tokens without pinned ones, whose slots count as free, and with the rest of the budget."""
    pinned = _pinned(tokens)
    position, rest = torch.where(pinned, -1, tokens.position), tokens.budget - pinned.sum(-1, keepdim=True)
    return dataclasses.replace(tokens, position=position, budget=rest, rank=None)


def check_pinned(policy: Policy, pinned: int, rest: int) -> None:
    """Raise BudgetError if `pinned` tokens leave a `rest` of a budget that is less than the policy needs."""
    least = policy.minimum_budget()
    if rest < least:
        raise BudgetError(
            f"the budget is too small for {policy.name!r} with keep_prompt=True: {pinned} tokens are to stay, which "
            f"leaves {max(rest, 0)} of it for others, and {policy} needs at least {least}"
        )
