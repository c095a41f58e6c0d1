"""Reference of `knorm`: keep the keys with the smallest L2 norm."""

from __future__ import annotations

from kvpass.policies.knorm import KNorm
from kvpass.reference.base import Reference, Token


class KNormReference(Reference):
    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        smallest = sorted(tokens, key=lambda token: (float(token.key.float().norm().half()), token.position))[:budget]
        return sorted(smallest, key=lambda token: token.position)


def reference(policy: KNorm) -> Reference:
    return KNormReference()
