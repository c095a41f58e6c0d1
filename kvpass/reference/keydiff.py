"""Transcribe `keydiff`: the lowest cosine with the mean of the unit keys stays."""

from __future__ import annotations

import math

import torch

from kvpass.policies.keydiff import KeyDiff
from kvpass.reference.base import HeadStream, Reference, Token, highest_scored


class KeyDiffReference(Reference):
    policy: KeyDiff

    def rescore(self, tokens: list[Token], stream: HeadStream) -> None:
        if tokens:
            keys = torch.stack([token.key[0].float() for token in tokens])
            anchor = torch.nn.functional.normalize(keys, dim=-1).mean(0)
            for token, key in zip(tokens, keys, strict=True):
                token.score = -float(torch.nn.functional.cosine_similarity(key, anchor, dim=0))

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        def score(token: Token) -> float:
            safe = token.position < self.policy.sinks or token.position >= seen - self.policy.recent
            return math.inf if safe else token.score

        return highest_scored(tokens, budget, score)
