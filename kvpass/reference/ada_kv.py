"""Reference of `ada_kv`: that of `snapkv`, after the heads of a prompt have shared out the layer's budgets."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor

from kvpass.policies.ada_kv import AdaKV
from kvpass.reference.base import HeadStream, Token
from kvpass.reference.snapkv import SnapKVReference


class AdaKVReference(SnapKVReference):
    policy: AdaKV

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        if stream.tokens or stream.notes.get("shared"):
            return super().take(stream, new, probabilities, logits)
        if new:
            self.vote(new, probabilities, stream.seen)
        stream.tokens = new  # until `settle` has given the heads their budgets
        return None

    def settle(self, row: list[HeadStream]) -> None:
        if row[0].notes.get("shared"):
            return
        counts = self.count_wins(row)
        budgets = sorted((stream.budget for stream in row), reverse=True)
        by_count = sorted(row, key=lambda stream: (-counts[stream.head], stream.head))
        for stream, budget in zip(by_count, budgets, strict=True):
            stream.budget, stream.notes["shared"] = budget, True
            stream.tokens = self.keep_tokens(stream.tokens, stream)

    def parts(self, tokens: list[Token], seen: int) -> tuple[list[Token], list[Token], list[Token]]:
        """Return the window, the selected tokens before it, and others of the ring, the latest first."""
        window = [token for token in tokens if token.position >= seen - self.policy.window]
        others = [token for token in tokens if token not in window]
        ring = sorted((token for token in others if "selected" not in token.notes), key=lambda token: -token.position)
        return window, [token for token in others if "selected" in token.notes], ring

    def count_wins(self, row: list[HeadStream]) -> list[int]:
        """Return how many tokens each head of a row wins."""
        mean = Fraction(sum(stream.budget for stream in row), len(row))
        each = math.floor(mean) - (row[0].interval - 1) - self.policy.window
        entries = [
            (stream.head, token.position, token.score)
            for stream in row
            for token in stream.tokens
            if "selected" in token.notes and token.position < stream.seen - self.policy.window
        ]
        entries.sort(key=lambda entry: (-entry[2], entry[0], entry[1]))
        safe = math.floor(Fraction(str(self.policy.safeguard)) * each)
        chosen = [entry for head in range(len(row)) for entry in [e for e in entries if e[0] == head][:safe]]
        chosen += [entry for entry in entries if entry not in chosen][: len(row) * each - len(chosen)]
        return [sum(entry[0] == head for entry in chosen) for head in range(len(row))]
