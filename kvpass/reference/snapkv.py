"""Reference of `snapkv`: the last queries of a prompt vote, the votes are smoothed, and other tokens form a ring."""

from __future__ import annotations

from torch import Tensor

from kvpass.policies.snapkv import SnapKV
from kvpass.reference.base import HeadStream, Reference, Token, in_order


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
        side = self.policy.kernel // 2
        for index, n in enumerate(prefix):
            neighbours = votes[max(0, index - side) : index + side + 1]
            tokens[n].score = sum(neighbours) / self.policy.kernel  # positions beyond either end count as zero
            tokens[n].notes["selected"] = True

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        if len(tokens) <= budget:
            return tokens
        window = [token for token in tokens if token.position >= seen - self.policy.window]
        selected = [token for token in tokens if "selected" in token.notes]
        ring = [token for token in tokens if "selected" not in token.notes and token not in window]
        selected.sort(key=lambda token: (-token.score, token.position))
        ring.sort(key=lambda token: -token.position)
        kept = (window + selected + ring)[:budget]
        return in_order(kept)
