"""Transcribe `cascade`: sub-caches as lists, newest token last, with the recursion written token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median_low

import torch
from torch import Tensor

from kvpass.policies.cascade import Cascade
from kvpass.reference.base import HeadStream, Reference, Token, in_order

REDUCE: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda probs: sum(probs) / len(probs),
    "max": max,
    "median": median_low,
}


class CascadeReference(Reference):
    policy: Cascade

    def caches(self, stream: HeadStream) -> list[list[Token]]:
        if "caches" not in stream.notes:
            stream.notes["caches"] = [[] for _ in range(self.policy.cascades)]
        caches: list[list[Token]] = stream.notes["caches"]
        return caches

    def insert(self, stream: HeadStream, item: Token) -> None:
        """Insert one token into the sub-caches, by the paper's scan."""
        policy, caches = self.policy, self.caches(stream)
        if item.position < policy.sinks:
            stream.notes.setdefault("sinks", []).append(item)
            return
        number, width = item.position - policy.sinks, (stream.budget - policy.sinks) // policy.cascades
        base = None if policy.growth == "linear" else int(policy.growth.removeprefix("pow"))
        eager = policy.eager_fill and item.position <= stream.budget  # t <= |C| + s
        for i, cache in enumerate(caches):
            accepts = eager or number % (i + 1 if base is None else base**i) == 0
            if accepts and len(cache) < width:
                cache.append(item)
                return
            if accepts:
                cache.append(item)
                item = cache.pop(0)
                continue
            if not cache:
                cache.append(item)
            elif policy.select and item.score >= cache[-1].score:
                cache[-1] = item
            return

    def cached_tokens(self, stream: HeadStream) -> list[Token]:
        tokens = stream.notes.get("sinks", []) + [token for cache in self.caches(stream) for token in cache]
        return in_order(tokens)

    def prepare(self, stream: HeadStream) -> None:
        if self.policy.order == "write_first":
            no_row = torch.zeros(0)
            stream.notes["next"] = Token(stream.seen, -1, no_row, no_row)
            self.insert(stream, stream.notes["next"])
            stream.tokens = [token for token in self.cached_tokens(stream) if token is not stream.notes["next"]]

    def score(self, tokens: list[Token], row: Tensor, decay: float) -> None:
        """Update scores: mu <- gamma mu + (1 - gamma) sbar, for probabilities `row` [heads, tokens]."""
        for token, probs in zip(tokens, row.T.tolist(), strict=True):
            token.score = decay * token.score + (1 - decay) * REDUCE[self.policy.reduce](probs)

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        tokens, policy = stream.tokens + new, self.policy
        width = (stream.budget - policy.sinks) // policy.cascades
        decay = math.exp(-math.log(100) / width) if policy.gamma is None else policy.gamma
        prompt = not stream.step and stream.seen == len(new)
        if stream.step and new and policy.order == "write_first":
            self.replace_placeholder(stream, new[0])
            self.score(tokens, probabilities[0], decay)
        elif prompt and policy.order == "write_first":
            for token, row in zip(new, probabilities, strict=True):
                self.insert(stream, token)
                self.score(tokens, row, decay)
        elif prompt:
            for token, row in zip(new, probabilities, strict=True):
                self.score(tokens, row, decay)
                self.insert(stream, token)
        else:
            for row in probabilities:
                self.score(tokens, row, decay)
            for token in new:
                self.insert(stream, token)
        stream.tokens = self.cached_tokens(stream)

    def replace_placeholder(self, stream: HeadStream, token: Token) -> None:
        """Replace the token that `prepare` inserted as a placeholder."""
        for tokens in [stream.notes.get("sinks", []), *self.caches(stream)]:
            for n, cached in enumerate(tokens):
                if cached is stream.notes["next"]:
                    tokens[n] = token
