"""Transcribe `sage`: each query head selects k prompt tokens; sinks, selected tokens and a ring are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpass.policies.sage import Sage
from kvpass.reference.base import HeadStream, Reference, Token


class SageReference(Reference):
    """Reference that stores in a token's note `takers` the query heads that selected it.

    The note is "all" for a token that is kept without selection.
    """

    policy: Sage

    @property
    def late(self) -> bool:
        return self.policy.select_at == "overflow"

    def sizes(self, budget: int, group: int) -> tuple[int, int, int]:
        """Return the numbers of sinks, tokens per query head, and recent tokens."""
        sinks = math.floor(budget / 4) if self.policy.sinks is None else self.policy.sinks
        k = math.floor(budget / 2 / group) if self.policy.top is None else self.policy.top
        return sinks, k, budget - sinks - group * k

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        tokens, budget, group = stream.tokens + new, stream.budget, probabilities.shape[1]
        sinks, k, recent = self.sizes(budget, group)
        stream.notes["since"] = stream.notes.get("since", 0) + len(new) if stream.step else 0
        if self.fits(stream):
            for token in tokens:
                if token.position < sinks + group * k:
                    token.notes["takers"] = "all"
        overflows = self.late and stream.seen == budget + 1  # the budget is full, and this token exceeds it
        every = self.policy.refresh_interval
        if new and not self.fits(stream) and (overflows or not stream.step):
            self.select(tokens, logits[-1], stream, sinks, k, recent)
        elif new and stream.step and every is not None and stream.notes["since"] >= every:
            self.select(tokens, logits[-1], stream, sinks, k, max(recent - every, 0))
        stream.tokens = self.ring(tokens, budget, sinks)

    def fits(self, stream: HeadStream) -> bool:
        """Return whether the stream's tokens fit the budget, so that no selection is needed."""
        return stream.seen <= stream.budget + (0 if self.late else 1)

    def select(self, tokens: list[Token], last: Tensor, stream: HeadStream, sinks: int, k: int, recent: int) -> None:
        stream.notes["since"] = 0
        if self.fits(stream):
            return
        last_token = stream.seen - 1
        candidates = [n for n, token in enumerate(tokens) if sinks <= token.position < last_token - recent]
        for token in tokens:
            token.notes["takers"] = set()
        for head, row in enumerate(last.tolist()):
            for n in sorted(candidates, key=lambda n: (-row[n], tokens[n].position))[:k]:
                tokens[n].notes["takers"].add(head)

    def ring(self, tokens: list[Token], budget: int, sinks: int) -> list[Token]:
        while len(tokens) > budget:
            tokens.remove(next(t for t in tokens if t.position >= sinks and not t.notes.get("takers")))
        return tokens

    def bias(self, stream: HeadStream, group: int) -> Tensor | None:
        if self.policy.share == "union":
            return None
        counts = [[self.count_bias(token, head) for token in stream.tokens] for head in range(group)]
        return torch.tensor(counts)[None]

    def count_bias(self, token: Token, head: int) -> float:
        """Return the logarithm of how often a query head counts the token."""
        takers = token.notes.get("takers")
        if not takers or takers == "all":
            return 0.0
        if self.policy.share == "concat":
            return math.log(len(takers))
        return 0.0 if head in takers else -math.inf
