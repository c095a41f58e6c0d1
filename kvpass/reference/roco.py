"""Transcribe `roco`: store every probability of each token, and compute their mean and variance."""

from __future__ import annotations

from torch import Tensor

from kvpass.reference.base import Reference, Token, highest_scored, in_order, split_at


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
        recent = budget - budget // 2
        older, newer = split_at(tokens, seen - recent)
        spread = highest_scored(older, budget // 4, lambda token: variance(token.notes["probs"]))
        others = [token for token in older if token not in spread]
        hitters = highest_scored(others, budget - len(newer) - len(spread), lambda token: mean(token.notes["probs"]))
        return in_order(spread + hitters) + newer
