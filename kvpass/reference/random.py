"""Transcribe `random`: each token draws a number, on arrival or in each round, and the highest numbers are kept."""

from __future__ import annotations

from kvpass.policies.random import Random
from kvpass.reference.base import Reference, Token, highest_scored, in_order, split_at

PRIME = 2**31 - 1


def mix(number: int) -> int:
    for factor, shift in ((16807, 15), (39373, 13), (742938, 16)):
        number = (number ^ (number >> shift)) * factor % PRIME
    return number


def draw(seed: int, position: int, head: int) -> int:
    """Return the number that a token draws, from 0 to PRIME - 1."""
    return mix((position * 48271 + head * 69621 + seed) % PRIME)


def seed_of_round(seed: int, seen: int) -> int:
    """Return the seed of a round, which is numbered by the tokens seen."""
    return mix((seen * 950706376 + seed) % PRIME)


class RandomReference(Reference):
    policy: Random

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        seed = seed_of_round(self.policy.seed, seen) if self.policy.redraw else self.policy.seed
        older, newer = split_at(tokens, seen - self.policy.recent)
        newer = newer[:budget]  # in a span of the text, whose share may be less than the recent tokens
        return in_order(
            highest_scored(older, budget - len(newer), lambda token: draw(seed, token.position, head)) + newer
        )
