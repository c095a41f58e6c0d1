"""Transcribe `h2o`: keep the recent half; of the other tokens, evict the ones with the least accumulated attention."""

from __future__ import annotations

from torch import Tensor

from kvpass.policies.h2o import H2O
from kvpass.reference.base import Reference, Token, highest_scored, share_of, split_at


class H2OReference(Reference):
    policy: H2O

    def observe(self, tokens: list[Token], probabilities: Tensor) -> None:
        for token, probs in zip(tokens, probabilities.sum((0, 1)).tolist(), strict=True):
            token.score += probs

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        recent = budget - share_of(budget, self.policy.heavy)
        older, newer = split_at(tokens, seen - recent)
        return highest_scored(older, budget - len(newer), lambda token: token.score) + newer
