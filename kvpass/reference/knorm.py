"""Transcribe `knorm`: keep the keys with the smallest L2 norm."""

from __future__ import annotations

from kvpass.reference.base import Reference, Token, highest_scored


class KNormReference(Reference):
    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        return highest_scored(tokens, budget, lambda token: -float(token.key.float().norm().half()))
