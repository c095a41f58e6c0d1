"""The control: a uniformly random subset of all tokens seen, which every score must beat.

Each token draws a number when it arrives, a hash of its position, its KV head and `seed`; the highest
stay.  The survivors of any prefix are then a uniform sample of it, the newest token not excepted.  The
tokens of a chunk draw like those of a prompt.

`keep_prompt=True`: only generated tokens draw, those that come one at a time; what a prompt or a chunk
brings stays.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpass.errors import BudgetError
from kvpass.policies.base import Attention, Policy, State, Tokens, require
from kvpass.policies.heads import numbers

PRIME = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Options: `seed`, any integer from 0 to 2**31 - 2; `keep_prompt`, whether prompts and chunks stay."""

    seed: int = 0
    keep_prompt: bool = False
    name: ClassVar[str] = "random"
    spreads: ClassVar[Literal["never", "heads", "always"]] = "heads"
    heads: ClassVar[Literal["shared", "kv"]] = "kv"

    def __post_init__(self) -> None:
        require(0 <= self.seed < PRIME, "seed", self.seed, f"must lie between 0 and {PRIME - 1}")
        require(isinstance(self.keep_prompt, bool), "keep_prompt", self.keep_prompt, "must be True or False")

    def state(self) -> dict[str, torch.dtype]:
        return {"given": torch.bool} if self.keep_prompt else {}

    def absorb(self, tokens: Tokens, attention: Attention) -> State:
        new = tokens.position.shape[-1] - tokens.held
        if not self.keep_prompt or (tokens.held and new == 1):
            return {}
        came = torch.arange(tokens.held + new, device=tokens.position.device) >= tokens.held
        given = tokens.state["given"] | (came & tokens.live)
        most = int(given.sum(-1).max())
        if most > tokens.budget:
            raise BudgetError(f"budget={tokens.budget} is too small for keep_prompt=True: {most} tokens are to stay")
        return {"given": given}

    def worth(self, tokens: Tokens) -> Tensor:
        heads = numbers(tokens.position, tokens.spread)  # [H', 1]
        drawn = (tokens.position * 48271 + heads * 69621 + self.seed) % PRIME
        for factor, shift in ((16807, 15), (39373, 13), (742938, 16)):
            drawn = (drawn ^ (drawn >> shift)) * factor % PRIME  # below 2**51: no overflow
        return torch.where(tokens.state["given"], PRIME, drawn) if self.keep_prompt else drawn
