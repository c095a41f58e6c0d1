"""Transcribe `tova`: evict the token with the least attention from the last query, except the last token."""

from __future__ import annotations

from torch import Tensor

from kvpass.reference.base import Reference, Token


class TovaReference(Reference):
    def observe(self, tokens: list[Token], probabilities: Tensor) -> None:
        if len(probabilities) == 0:
            return
        for token, probs in zip(tokens, probabilities[-1].mean(0).tolist(), strict=True):
            token.score = probs

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        while len(tokens) > budget:
            older = tokens[:-1] if tokens[-1].position == seen - 1 else tokens
            tokens.remove(min(older or tokens, key=lambda token: (token.score, -token.position)))
        return tokens
