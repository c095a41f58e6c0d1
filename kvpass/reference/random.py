"""Reference of `random`: each token draws a number on arrival, and the highest numbers are kept."""

from __future__ import annotations

from kvpass.policies.random import Random
from kvpass.reference.base import Reference, Token

PRIME = 2**31 - 1


def drawn(seed: int, position: int, head: int) -> int:
    """Return the number that a token draws, from 0 to PRIME - 1."""
    number = (position * 48271 + head * 69621 + seed) % PRIME
    for factor, shift in ((16807, 15), (39373, 13), (742938, 16)):
        number = (number ^ (number >> shift)) * factor % PRIME
    return number


class RandomReference(Reference):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        luckiest = sorted(tokens, key=lambda token: -drawn(self.seed, token.position, head))[:budget]
        return sorted(luckiest, key=lambda token: token.position)


def reference(policy: Random) -> Reference:
    return RandomReference(policy.seed)
