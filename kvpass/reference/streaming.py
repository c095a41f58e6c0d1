"""Transcribe `streaming`: append, attend over all tokens, keep [0, sinks) and the last budget - sinks."""

from __future__ import annotations

from kvpass.policies.streaming import Streaming
from kvpass.reference.base import Reference, Token


class StreamingReference(Reference):
    policy: Streaming

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        sinks = [token for token in tokens if token.position < self.policy.sinks][:budget]
        return sinks + tokens[len(tokens) - (budget - len(sinks)) :]
