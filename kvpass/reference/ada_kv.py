"""Transcribe `ada_kv`: `snapkv`, after the heads of a prompt have shared out the layer's budgets."""

from __future__ import annotations

from kvpass.policies.ada_kv import AdaKV
from kvpass.reference.base import DividedBudgets, HeadStream, share_of
from kvpass.reference.snapkv import SnapKVReference


class AdaKVReference(DividedBudgets, SnapKVReference):
    policy: AdaKV

    def head_counts(self, row: list[HeadStream]) -> list[float]:
        """Return how many tokens each head of a row wins."""
        each = sum(stream.budget for stream in row) // len(row) - (row[0].interval - 1) - self.policy.window
        entries = [
            (stream.head, token.position, token.score)
            for stream in row
            for token in stream.tokens
            if "selected" in token.notes and token.position < stream.seen - self.policy.window
        ]
        entries.sort(key=lambda entry: (-entry[2], entry[0], entry[1]))
        safe = share_of(each, self.policy.safeguard)
        chosen = [entry for head in range(len(row)) for entry in [e for e in entries if e[0] == head][:safe]]
        chosen += [entry for entry in entries if entry not in chosen][: len(row) * each - len(chosen)]
        return [sum(entry[0] == head for entry in chosen) for head in range(len(row))]
