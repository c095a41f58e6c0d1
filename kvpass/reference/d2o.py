"""Reference of `d2o`: accumulated attention selects tokens; each evicted token is merged into its nearest neighbour."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from kvpass.policies.d2o import D2O
from kvpass.reference.base import HeadStream, Reference, Token


class D2OReference(Reference):
    def __init__(self, policy: D2O) -> None:
        self.policy = policy

    def observe(self, tokens: list[Token], probabilities: Tensor) -> None:
        for token, probs in zip(tokens, probabilities.sum((0, 1)).tolist(), strict=True):
            token.score += probs

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        tokens = stream.tokens + new
        self.observe(tokens, probabilities)
        prompt = stream.notes.setdefault("prompt", True)
        stream.notes["prompt"] = False
        if prompt and self.policy.compress_at == "first_decode":
            stream.tokens = tokens
            return
        kept = self.kept(tokens, stream)
        stream.evicted = [token for token in tokens if token not in kept]
        stream.tokens = kept

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        policy = self.policy
        divided = budget - policy.sinks if policy.extra_sinks else budget
        recent = min(divided - math.floor(Fraction(str(policy.heavy)) * divided), budget - policy.sinks)
        safe = [token for token in tokens if token.position < policy.sinks or token.position >= seen - recent]
        middle = sorted((t for t in tokens if t not in safe), key=lambda t: (-t.score, t.position))
        return sorted(safe + middle[: max(0, budget - len(safe))], key=lambda token: token.position)

    def settle(self, row: list[HeadStream]) -> None:
        if not row[0].evicted or self.policy.merge == "none":
            return
        found = [[closest(token, stream) for token in stream.evicted] for stream in row]
        if self.policy.merge == "official":
            means = [sum(u for u, _ in similarities) / len(row) for similarities in zip(*found, strict=True)]
            tau = self.threshold(row[0], means)
            for stream, pairs in zip(row, found, strict=True):
                self.official(stream, pairs, [mean >= tau for mean in means])
        else:
            for stream, pairs in zip(row, found, strict=True):
                tau = self.threshold(stream, [u for u, _ in pairs])
                merge = self.average if self.policy.merge == "average" else self.paper
                merge(stream, pairs, [u >= tau for u, _ in pairs])
        for stream in row:
            stream.evicted = []

    def threshold(self, stream: HeadStream, similarities: list[float]) -> float:
        """Return tau, updated with the similarities of the evicted tokens."""
        mean, earlier = sum(similarities) / len(similarities), stream.notes.get("tau")
        stream.notes["tau"] = mean if earlier is None else self.policy.beta * mean + (1 - self.policy.beta) * earlier
        return float(stream.notes["tau"])

    def paper(self, stream: HeadStream, pairs: list[tuple[float, Token]], merged: list[bool]) -> None:
        for target in stream.tokens:
            evicted = [
                (math.exp(u), token)
                for token, (u, into), is_merged in zip(stream.evicted, pairs, merged, strict=True)
                if into is target and is_merged
            ]
            total = math.e + sum(weight for weight, _ in evicted)
            if evicted:
                key = math.e * target.key + sum(w * token.key for w, token in evicted)
                value = math.e * target.value + sum(w * token.value for w, token in evicted)
                target.key, target.value = stream.stored(key / total), stream.stored(value / total, key=False)

    def average(self, stream: HeadStream, pairs: list[tuple[float, Token]], merged: list[bool]) -> None:
        for target in stream.tokens:
            found = zip(stream.evicted, pairs, merged, strict=True)
            group = [target] + [token for token, (_, into), is_merged in found if into is target and is_merged]
            if len(group) > 1:
                key = torch.stack([token.key for token in group]).mean(0)
                value = torch.stack([token.value for token in group]).mean(0)
                target.key, target.value = stream.stored(key), stream.stored(value, key=False)

    def official(self, stream: HeadStream, pairs: list[tuple[float, Token]], merged: list[bool]) -> None:
        for target in stream.tokens:
            evicted = [
                (u, token)
                for token, (u, into), is_merged in zip(stream.evicted, pairs, merged, strict=True)
                if into is target and is_merged
            ]
            if evicted:
                key = target.key + sum(u * token.key for u, token in evicted)
                value = target.value + sum(u * token.value for u, token in evicted)
                target.key = stream.stored(key / (1 + len(evicted)))
                target.value = stream.stored(value / (1 + len(evicted)), key=False)


def closest(token: Token, stream: HeadStream) -> tuple[float, Token]:
    """Return the largest cosine similarity of a token's key with the key of a kept, unpinned token, and that token."""
    kept = [other for other in stream.tokens if not other.pinned]
    cosines = [float(torch.cosine_similarity(token.key[0], other.key[0], dim=0)) for other in kept]
    best = max(cosines)
    return best, kept[cosines.index(best)]


def reference(policy: D2O) -> Reference:
    return D2OReference(policy)
