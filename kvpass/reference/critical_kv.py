"""Transcribe `critical_kv`: `ada_kv`, with a second choice by the projected values."""

from __future__ import annotations

from torch import Tensor

from kvpass.policies.critical_kv import CriticalKV
from kvpass.reference.ada_kv import AdaKVReference
from kvpass.reference.base import HeadStream, Token, in_order, share_of


class CriticalKVReference(AdaKVReference):
    policy: CriticalKV

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        if not stream.step:
            for token in stream.tokens + new:
                token.notes["norm"] = self.norm(token.value[0].float(), stream.output_projection)
        super().take(stream, new, probabilities, logits)

    def norm(self, value: Tensor, output: Tensor | None) -> float:
        """Return the mean over query heads of the L1 norm of a projected value [Dv]."""
        if output is None:
            return float(value.abs().sum())
        return sum(float((value @ head.float()).abs().sum()) for head in output) / len(output)

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        window, selected, ring = self.parts(tokens, seen)
        by_attention = sorted(selected, key=lambda token: (-token.score, token.position))
        count = share_of(budget - self.policy.window, self.policy.first)
        safe = (by_attention + ring)[:count]
        rest = [token for token in selected if token not in safe]
        rest.sort(key=lambda token: (-(token.score + self.policy.epsilon) * token.notes["norm"], token.position))
        return in_order((window + safe + rest + [token for token in ring if token not in safe])[:budget])
