"""Transcribe `window`: keep the last `budget` tokens."""

from __future__ import annotations

from kvpass.reference.base import Reference, Token


class WindowReference(Reference):
    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        return tokens[-budget:]
