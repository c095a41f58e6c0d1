"""Transcribe `full`: no token is evicted."""

from __future__ import annotations

from kvpass.reference.base import Reference, Token


class FullReference(Reference):
    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        return tokens
