"""Transcribe `vase`: queries are kept until a row is compacted, and vote then; or keys and values are sketched."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvpass.policies.vase import Vase
from kvpass.reference.base import HeadStream, Token, highest_scored, in_order, neighbours, share_of, split_at
from kvpass.reference.random import PRIME, draw, mix, seed_of_round
from kvpass.reference.voters import VotingReference, ballots, shares


def uniform(number: int) -> float:
    """Return a number inside of (0, 1) of 23 bits."""
    return (math.floor(number / 256) + 0.5) / 2**23


def normal(seed: int, row: int, column: int) -> float:
    """Return a standard normal number, from two uniform ones."""
    first, second = (mix((row * 48271 + (2 * column + part) * 69621 + seed) % PRIME) for part in range(2))
    return math.sqrt(-2 * math.log(uniform(first))) * math.cos(2 * math.pi * uniform(second))


class VaseReference(VotingReference):
    policy: Vase

    def rescore(self, tokens: list[Token], stream: HeadStream) -> None:
        if self.policy.variant == "dkv":
            seed = seed_of_round(self.policy.seed, stream.seen)
            for token in tokens:
                token.score = sketch_norm(token.key[0], seed) * sketch_norm(token.value[0], seed)
            return
        for token in tokens:
            token.score = 0.0
        for ballot in ballots(stream, self.policy.recent):
            for numbers in zip(*ballot.values(), strict=True):  # of each query head
                votes = dict(zip(ballot, shares(numbers), strict=True))
                for token in tokens:
                    token.score += votes.get(token.position, 0.0)

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        older, newer = split_at(tokens, seen - self.policy.recent)
        free = budget - len(newer)
        if self.policy.variant == "dkv":
            return in_order(newer + highest_scored(older, free, self.unless_sink(lambda token: token.score)))
        large = min(max(share_of(budget, self.policy.large), self.policy.sinks), budget - self.policy.recent)
        reserved = highest_scored(
            older, large, self.unless_sink(lambda token: float(token.value.max() - token.value.min()))
        )
        smooth = [sum(some) / self.policy.kernel for some in neighbours([t.score for t in older], self.policy.kernel)]
        seed, attention = seed_of_round(self.policy.seed, seen), dict(zip(map(id, older), smooth, strict=True))

        def sampled(token: Token) -> float:
            if not attention[id(token)]:
                return token.position - seen
            return attention[id(token)] / -math.log(uniform(draw(seed, token.position, head)))

        others = [token for token in older if token not in reserved]
        return in_order(newer + reserved + highest_scored(others, free - len(reserved), sampled))

    def unless_sink(self, score: Callable[[Token], float]) -> Callable[[Token], float]:
        return lambda token: math.inf if token.position < self.policy.sinks else score(token)


def sketch_norm(row: Tensor, seed: int) -> float:
    """Return |x G|^2 of a row [D]."""
    sketch = torch.tensor([[normal(seed, d, r) for r in range(20)] for d in range(len(row))]) / math.sqrt(20)
    return float((row.float() @ sketch).square().sum())
