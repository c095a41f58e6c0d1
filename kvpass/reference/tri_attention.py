"""Transcribe `tri_attention`: the paper's sum over rotary pairs and distances, from keys before their rotation."""

from __future__ import annotations

import math

import torch

from kvpass.policies.tri_attention import TriAttention
from kvpass.reference.base import HeadStream, Reference, Token, highest_scored
from kvpass.reference.pairs import calibrated_pairs, queries_of


class TriAttentionReference(Reference):
    policy: TriAttention

    def rescore(self, tokens: list[Token], stream: HeadStream) -> None:
        for token in tokens:
            token.notes["scores"] = self.scores(stream, token)

    def scores(self, stream: HeadStream, token: Token) -> list[float]:
        """Return the score of a token for each query head of its KV head."""
        key, frequency = calibrated_pairs(self.policy.loaded, stream.layer, token.key[0])
        before = key * torch.polar(torch.ones_like(frequency), -frequency * token.position)
        found = []
        for mean, size, _ in queries_of(self.policy.loaded, stream.layer, stream.head):
            angle = mean.angle() - before.angle()
            ahead = torch.tensor([2.0**n for n in range(17)], dtype=torch.float64)[:, None]
            waves = ((stream.seen - token.position + ahead) * frequency + angle).cos().mean(0)
            found.append(float((mean.abs() * key.abs() * waves + (size - mean.abs()) * key.abs()).sum()))
        return found

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        sinks, recent = self.policy.sinks, self.policy.recent
        safe = [t for t in tokens if t.position < sinks or t.position >= seen - recent]
        others = [t for t in tokens if t not in safe]
        scores = dict.fromkeys(tokens, math.inf)
        if others:
            by_head = torch.tensor([t.notes["scores"] for t in others], dtype=torch.float64)
            deviation = by_head.std(0, correction=0).clamp(min=1e-6)
            standardised = ((by_head - by_head.mean(0)) / deviation * 4096).round() / 4096
            scores |= zip(others, standardised.amax(1).tolist(), strict=True)
        return highest_scored(tokens, budget, scores.__getitem__)
