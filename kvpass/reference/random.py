"""Reference of `random`: each token draws a number when it arrives, the highest stay."""

from __future__ import annotations

from torch import Tensor

from kvpass.policies.random import Random
from kvpass.reference.base import Reference, Stream, Token

PRIME = 2**31 - 1


def drawn(seed: int, position: int, head: int) -> int:
    """The number that a token draws, from 0 to PRIME - 1."""
    number = (position * 48271 + head * 69621 + seed) % PRIME
    for factor, shift in ((16807, 15), (39373, 13), (742938, 16)):
        number = (number ^ (number >> shift)) * factor % PRIME
    return number


class RandomReference(Reference):
    def __init__(self, policy: Random) -> None:
        self.policy = policy

    def take(self, stream: Stream, new: list[Token], rows: Tensor, logits: Tensor) -> None:
        for token in new:
            token.notes["stays"] = self.policy.keep_prompt and not stream.step
        super().take(stream, new, rows, logits)

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        safe = [token for token in tokens if token.notes["stays"]]
        others = [token for token in tokens if not token.notes["stays"]]
        luckiest = sorted(others, key=lambda token: -drawn(self.policy.seed, token.position, head))
        return sorted(safe + luckiest[: budget - len(safe)], key=lambda token: token.position)


def reference(policy: Random) -> Reference:
    return RandomReference(policy)
