"""Pin tokens of prompts and chunks: tokens that a caller marks, or with `Policy.keep_prompt` all of them.

Pinned tokens are never evicted, and the policy works on the other tokens with the rest of the budget.  Pitfalls of KV
cache compression (https://arxiv.org/abs/2510.00231) counts them inside the budget, which is the default here.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.base import Policy
from kvpass.policies.ranking import INT64_MAX
from kvpass.policies.types import Merge, State, Tokens

PINNED = "pinned"
"""The entry of the state that marks pinned tokens, bool [B, H', C]; decode steps do not change it."""


@dataclasses.dataclass(frozen=True)
class Pins:
    """The tokens to pin among the new tokens of one call.

    Attributes:
        mask: bool [B, q], true for a token that is never evicted.
        on_top: whether the pinned tokens count on top of the budget, which grows by their number.
        later: int64 [B], how many more tokens later calls of the same prompt pin, for the check of the budget.
    """

    mask: Tensor
    on_top: bool
    later: Tensor

    @staticmethod
    def of(mask: Tensor, start: int, stop: int, on_top: bool) -> Pins:
        """Return the pins of the columns from `start` to `stop` of a prompt's mask, bool [B, T]."""
        return Pins(mask[:, start:stop], on_top, mask[:, stop:].sum(-1))

    def first_tokens(self, count: int) -> Pins:
        """Return the pins of the first `count` tokens."""
        return dataclasses.replace(self, mask=self.mask[:, :count])

    def after(self, count: int) -> Pins:
        """Return the pins for a call with `count` more tokens before these, which are not pinned."""
        return dataclasses.replace(self, mask=torch.nn.functional.pad(self.mask, (count, 0)))

    def check(self, policy: Policy, rows: int, query_len: int) -> None:
        """Check that the pins are for this call, and that the policy allows them.

        Raises:
            PolicyError: the policy cannot have pins, or the call has another shape.
        """
        if policy.keep_prompt_refusal:
            raise PolicyError(f"pin: has no effect under policy {policy.name!r}: {policy.keep_prompt_refusal}")
        if policy.divides_heads:
            raise PolicyError(f"pin: not supported for {policy.name!r}, whose heads have different budgets")
        if policy.spans:
            raise PolicyError(f"pin: spans={policy.spans} divide the budget already: pass either spans or pins")
        if self.mask.shape != (rows, query_len):
            raise PolicyError(
                f"pin: given for tokens of shape {tuple(self.mask.shape)}, and the model passes {(rows, query_len)} to "
                "its layers: pins need a model that passes on all new tokens in one call"
            )


@dataclasses.dataclass(frozen=True)
class PinnedTokens:
    """The eviction hooks of a policy, applied to unpinned tokens with the rest of the budget.

    A policy's own `victim` is not called: the unpinned token of lowest score is evicted.
    """

    policy: Policy

    def check(self, tokens: Tokens) -> None:
        """Check that the pinned tokens of each row leave the policy the budget that it needs.

        Raises:
            BudgetError: as from `check_pinned`.
        """
        counts = _pinned(tokens).sum(-1, keepdim=True)
        rest = (self.policy.compacted(tokens.budget) - counts).flatten()
        worst = rest.argmin()
        check_pinned(self.policy, int(counts.flatten()[worst]), int(rest[worst]))

    def victim(self, tokens: Tokens) -> Tensor:
        score = self.policy.score(_without_pinned(tokens))
        below, top = (
            (torch.finfo(score.dtype).max, torch.inf) if score.is_floating_point() else (INT64_MAX - 1, INT64_MAX)
        )
        # A policy's own scores may be infinite; a pinned token must rank above them.
        return tokens.lowest(torch.where(_pinned(tokens), top, score.clamp(max=below)))

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        keep, changes = self.policy.compact(_without_pinned(tokens))
        return keep | _pinned(tokens), changes

    def merge_evicted(self, tokens: Tokens, cached_keys: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        """Return the policy's merge, in which no token is merged into a pinned one."""
        return self.policy.merge_evicted(_without_pinned(tokens), cached_keys, evicted, valid)


def _pinned(tokens: Tokens) -> Tensor:
    return tokens.state[PINNED] & tokens.live


def _without_pinned(tokens: Tokens) -> Tokens:
    """Return the tokens without pinned ones, whose slots count as free, and with the rest of the budget."""
    pinned = _pinned(tokens)
    position, rest = torch.where(pinned, -1, tokens.position), tokens.budget - pinned.sum(-1, keepdim=True)
    return dataclasses.replace(tokens, position=position, budget=rest, rank=None)


def check_pinned(policy: Policy, pinned: int, rest: int) -> None:
    """Raise BudgetError if the `rest` of a budget after the `pinned` tokens is less than the policy needs."""
    least = policy.minimum_budget()
    if rest < least:
        raise BudgetError(
            f"the budget is too small for {policy.name!r} with pinned tokens: {pinned} tokens are to stay, which "
            f"leaves {max(rest, 0)} of it for others, and {policy} needs at least {least}: raise the budget, pin fewer "
            "tokens, or pass on_top=True with the pins to count them in addition to the budget"
        )
