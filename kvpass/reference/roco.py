"""Reference of `roco`: store every probability of each token, and compute their mean and variance."""

from __future__ import annotations

from torch import Tensor

from kvpass.policies.roco import RoCo
from kvpass.reference.base import Reference, Token


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def variance(values: list[float]) -> float:
    return mean([(value - mean(values)) ** 2 for value in values])


class RoCoReference(Reference):
    def observe(self, tokens: list[Token], probabilities: Tensor) -> None:
        first = tokens[-1].position - len(probabilities) + 1 if tokens else 0  # position of the first query
        for token, probs in zip(tokens, probabilities.permute(2, 0, 1).tolist(), strict=True):
            for query, values in enumerate(probs):
                if first + query >= token.position:
                    token.notes.setdefault("probs", []).extend(values)

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        if len(tokens) <= budget:
            return tokens
        recent = budget - budget // 2
        newer = [token for token in tokens if token.position >= seen - recent]
        older = [token for token in tokens if token.position < seen - recent]
        by_spread = sorted(older, key=lambda token: (-variance(token.notes["probs"]), token.position))
        spread, others = by_spread[: budget // 4], by_spread[budget // 4 :]
        by_mean = sorted(others, key=lambda token: (-mean(token.notes["probs"]), token.position))
        kept = spread + by_mean[: budget - len(newer) - len(spread)]
        return sorted(kept, key=lambda token: token.position) + newer


def reference(policy: RoCo) -> Reference:
    return RoCoReference()
