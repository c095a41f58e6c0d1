"""Transcribe `duo_attention`: `streaming`, after the gates of a layer have divided its budget."""

from __future__ import annotations

from kvpass.policies.duo_attention import DuoAttention
from kvpass.reference.base import DividedBudgets, HeadStream
from kvpass.reference.streaming import StreamingReference


class DuoAttentionReference(DividedBudgets, StreamingReference):
    policy: DuoAttention

    def head_counts(self, row: list[HeadStream]) -> list[float]:
        gates: list[float] = self.policy.loaded.gates[row[0].layer].tolist()
        return gates
