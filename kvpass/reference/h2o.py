"""Reference of `h2o`: keep the recent half; of the other tokens, evict those with the least accumulated attention."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor

from kvpass.policies.h2o import H2O
from kvpass.reference.base import Reference, Token


class H2OReference(Reference):
    def __init__(self, heavy: float) -> None:
        self.heavy = heavy

    def observe(self, tokens: list[Token], probabilities: Tensor) -> None:
        for token, probs in zip(tokens, probabilities.sum((0, 1)).tolist(), strict=True):
            token.score += probs

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        if len(tokens) <= budget:
            return tokens
        heavy = math.floor(Fraction(str(self.heavy)) * budget)
        recent = budget - heavy
        newer = [token for token in tokens if token.position >= seen - recent]
        older = [token for token in tokens if token.position < seen - recent]
        hitters = sorted(older, key=lambda token: (-token.score, token.position))[: budget - len(newer)]
        return sorted(hitters, key=lambda token: token.position) + newer


def reference(policy: H2O) -> Reference:
    return H2OReference(policy.heavy)
