"""Transcribe `snapkv`: the last queries of a prompt vote, the votes are smoothed, and other tokens form a ring."""

from __future__ import annotations

from torch import Tensor

from kvpass.policies.snapkv import SnapKV
from kvpass.reference.base import HeadStream, Reference, Token, in_order, neighbours


class SnapKVReference(Reference):
    policy: SnapKV

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        tokens = stream.tokens + new
        if new and not stream.step:
            self.vote(tokens, probabilities, stream.seen)
        stream.tokens = self.keep_tokens(tokens, stream)

    def vote(self, tokens: list[Token], probabilities: Tensor, seen: int) -> None:
        prefix = [n for n, token in enumerate(tokens) if token.position < seen - self.policy.window]
        votes = probabilities[-self.policy.window :].mean((0, 1))[prefix].tolist()  # over queries and query heads
        for n, some in zip(prefix, neighbours(votes, self.policy.kernel), strict=True):
            tokens[n].score = sum(some) / self.policy.kernel  # positions beyond either end count as zero
            tokens[n].notes["selected"] = True

    def parts(self, tokens: list[Token], seen: int) -> tuple[list[Token], list[Token], list[Token]]:
        """Return the window, the selected tokens before it, and the other tokens of the ring, the latest first."""
        window = [token for token in tokens if token.position >= seen - self.policy.window]
        others = [token for token in tokens if token not in window]
        ring = sorted((token for token in others if "selected" not in token.notes), key=lambda token: -token.position)
        return window, [token for token in others if "selected" in token.notes], ring

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        window, selected, ring = self.parts(tokens, seen)
        selected.sort(key=lambda token: (-token.score, token.position))
        return in_order((window + selected + ring)[:budget])
