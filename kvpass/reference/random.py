"""Reference of `random`: each token draws a number on arrival, and the highest numbers are kept."""

from __future__ import annotations

from kvpass.policies.random import Random
from kvpass.reference.base import Reference, Token, best

PRIME = 2**31 - 1


def drawn(seed: int, position: int, head: int) -> int:
    """Return the number that a token draws, from 0 to PRIME - 1."""
    number = (position * 48271 + head * 69621 + seed) % PRIME
    for factor, shift in ((16807, 15), (39373, 13), (742938, 16)):
        number = (number ^ (number >> shift)) * factor % PRIME
    return number


class RandomReference(Reference):
    policy: Random

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        return best(tokens, budget, lambda token: drawn(self.policy.seed, token.position, head))
