"""Keep a uniformly random subset of all tokens: the control that every score must beat.

Each token gets a number when it arrives, a hash of its position, its KV head and `seed`; the highest numbers stay.  The
survivors of any prefix are then a uniform sample of it, the newest token included.  Tokens of a chunk are hashed like
those of a prompt.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from torch import Tensor

from kvpass.arguments import between
from kvpass.policies.base import Policy
from kvpass.policies.heads import head_indices
from kvpass.policies.types import Tokens

PRIME = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Options: `seed`, any integer from 0 to 2**31 - 2."""

    seed: Annotated[int, between(0, PRIME - 1)] = 0
    name = "random"
    spreads = "heads"
    heads = "kv"

    def score(self, tokens: Tokens) -> Tensor:
        heads = head_indices(tokens.position, tokens.spread)  # [H', 1]
        drawn = (tokens.position * 48271 + heads * 69621 + self.seed) % PRIME
        for factor, shift in ((16807, 15), (39373, 13), (742938, 16)):
            drawn = (drawn ^ (drawn >> shift)) * factor % PRIME  # below 2**51: no overflow
        return drawn
