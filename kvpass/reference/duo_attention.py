"""Reference of `duo_attention`: that of `streaming`, after the gates of a layer have divided its budget."""

from __future__ import annotations

from torch import Tensor

from kvpass.policies.duo_attention import DuoAttention
from kvpass.reference.base import HeadStream, Token
from kvpass.reference.streaming import StreamingReference


class DuoAttentionReference(StreamingReference):
    policy: DuoAttention

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        if stream.notes.get("shared"):
            return super().take(stream, new, probabilities, logits)
        stream.tokens = new  # until `settle` has given the heads their budgets
        return None

    def settle(self, row: list[HeadStream]) -> None:
        if row[0].notes.get("shared"):
            return
        gates = self.policy.loaded.gates[row[0].layer].tolist()
        budgets = sorted((stream.budget for stream in row), reverse=True)
        by_gate = sorted(row, key=lambda stream: (-gates[stream.head], stream.head))
        for stream, budget in zip(by_gate, budgets, strict=True):
            stream.budget, stream.notes["shared"] = budget, True
            stream.tokens = self.keep_tokens(stream.tokens, stream)
