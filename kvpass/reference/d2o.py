"""Transcribe `d2o`: accumulated attention selects tokens; each evicted token is merged into its nearest neighbour."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpass.policies.d2o import D2O
from kvpass.reference.base import HeadStream, Reference, Token, highest_scored, in_order, share_of


class D2OReference(Reference):
    policy: D2O

    def observe(self, tokens: list[Token], probabilities: Tensor) -> None:
        for token, probs in zip(tokens, probabilities.sum((0, 1)).tolist(), strict=True):
            token.score += probs

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        tokens = stream.tokens + new
        self.observe(tokens, probabilities)
        kept = self.keep_tokens(tokens, stream)
        stream.evicted = [token for token in tokens if token not in kept]
        stream.tokens = kept

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        policy = self.policy
        divided = budget - policy.sinks if policy.extra_sinks else budget
        recent = min(divided - share_of(divided, policy.heavy), budget - policy.sinks)
        safe = [token for token in tokens if token.position < policy.sinks or token.position >= seen - recent]
        middle = [token for token in tokens if token not in safe]
        return in_order(safe + highest_scored(middle, max(0, budget - len(safe)), lambda token: token.score))

    def settle(self, row: list[HeadStream]) -> None:
        if not row[0].evicted or self.policy.merge == "none":
            return
        found = [[closest(token, stream) for token in stream.evicted] for stream in row]
        if self.policy.merge == "official":
            means = [sum(u for u, _ in similarities) / len(row) for similarities in zip(*found, strict=True)]
            tau = self.threshold(row[0], means)
            for stream, pairs in zip(row, found, strict=True):
                self.merge(stream, pairs, [mean >= tau for mean in means])
        else:
            for stream, pairs in zip(row, found, strict=True):
                tau = self.threshold(stream, [u for u, _ in pairs])
                self.merge(stream, pairs, [u >= tau for u, _ in pairs])
        for stream in row:
            stream.evicted = []

    def threshold(self, stream: HeadStream, similarities: list[float]) -> float:
        """Return tau, updated with the similarities of the evicted tokens."""
        mean, earlier = sum(similarities) / len(similarities), stream.notes.get("tau")
        stream.notes["tau"] = mean if earlier is None else self.policy.beta * mean + (1 - self.policy.beta) * earlier
        return float(stream.notes["tau"])

    def merge(self, stream: HeadStream, pairs: list[tuple[float, Token]], merged: list[bool]) -> None:
        """Merge evicted rows into kept ones, with the weights of Eq. 9-11.

        Table 6's average has equal weights.  The public code weighs by u, and divides by the number of rows.
        """
        for target in stream.tokens:
            found = zip(stream.evicted, pairs, merged, strict=True)
            group = [(u, token) for token, (u, into), is_merged in found if into is target and is_merged]
            if not group:
                continue
            if self.policy.merge == "paper":
                own, weights = math.e, [math.exp(u) for u, _ in group]
                total = own + sum(weights)
            else:
                own, weights = 1.0, [u if self.policy.merge == "official" else 1.0 for u, _ in group]
                total = 1.0 + len(group)
            key, value = own * target.key, own * target.value
            for weight, (_, token) in zip(weights, group, strict=True):
                key, value = key + weight * token.key, value + weight * token.value
            target.key, target.value = stream.stored(key / total), stream.stored(value / total, key=False)


def closest(token: Token, stream: HeadStream) -> tuple[float, Token]:
    """Return the largest cosine similarity of a token's key with the key of a kept, unpinned token, and that token."""
    kept = [other for other in stream.tokens if not other.pinned]
    cosines = [float(torch.cosine_similarity(token.key[0], other.key[0], dim=0)) for other in kept]
    best = max(cosines)
    return best, kept[cosines.index(best)]
