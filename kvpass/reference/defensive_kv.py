"""Transcribe `defensive_kv`: the worst case over late queries, and budgets of heads by the tokens that win."""

from __future__ import annotations

from torch import Tensor

from kvpass.policies.defensive_kv import DefensiveKV
from kvpass.reference.base import HeadStream, Token, in_order, neighbours, share_of
from kvpass.reference.critical_kv import CriticalKVReference


class DefensiveKVReference(CriticalKVReference):
    policy: DefensiveKV  # type: ignore[assignment]  # norms are computed alike, and all else differs

    def vote(self, tokens: list[Token], probabilities: Tensor, seen: int) -> None:
        cached, last = len(tokens) - len(probabilities), seen - self.policy.window
        before = [n for n, token in enumerate(tokens) if token.position < last]
        old, new = [n for n in before if n < cached], [n for n in before if n >= cached]
        late = probabilities[-self.policy.window :].double()
        rows = [self.smooth(row[new].tolist()) for row in late.flatten(0, 1)]
        peaks = dict(zip(old, late[..., old].amax((0, 1)).tolist(), strict=True)) if old else {}
        peaks |= {n: max(row[index] for row in rows) for index, n in enumerate(new)}
        for n in before:
            tokens[n].score = max(peaks[n], sum(peaks.values()) / len(peaks))
            tokens[n].notes["mean"] = float(late[..., n].mean())
            tokens[n].notes["impact"] = tokens[n].score * tokens[n].notes["norm"]
            tokens[n].notes["selected"] = True

    def smooth(self, row: list[float]) -> list[float]:
        """Return a row averaged over neighbours, with the same sum."""
        averaged = [sum(some) / self.policy.kernel for some in neighbours(row, self.policy.kernel)]
        return [x * sum(row) / sum(averaged) if sum(averaged) else 0.0 for x in averaged]

    def head_counts(self, row: list[HeadStream]) -> list[float]:
        for same in zip(*(stream.tokens for stream in row), strict=True):
            whole = sum(token.notes["norm"] for token in same)
            for token in same:
                token.notes["impact"] = token.score * token.notes["norm"] / whole if whole else 0.0
        each = sum(stream.budget for stream in row) // len(row) - (row[0].interval - 1) - self.policy.window
        entries = []
        for stream in row:
            tokens = [token for token in stream.tokens if "selected" in token.notes]
            safe = self.safe_tokens(tokens, each)
            rest = [token for token in tokens if token not in safe]
            rest.sort(key=lambda token: (-token.notes["impact"], token.position))
            guarded = max(share_of(each, self.policy.safeguard), len(safe))
            entries += [
                (index >= guarded, -token.notes["impact"], stream.head) for index, token in enumerate(safe + rest)
            ]
        won = [head for *_, head in sorted(entries)[: len(row) * each]]
        return [won.count(stream.head) for stream in row]

    def safe_tokens(self, tokens: list[Token], most: int) -> list[Token]:
        """Return the tokens of highest mean attention whose cumulative share is below `mass`."""
        by_mean = sorted(tokens, key=lambda token: (-token.notes["mean"], token.position))
        whole, share, found = sum(token.notes["mean"] for token in tokens), 0.0, []
        for token in by_mean[: max(most, 0)]:
            share += token.notes["mean"]
            if share >= self.policy.mass * whole:
                break
            found.append(token)
        return found

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        window, selected, ring = self.parts(tokens, seen)
        safe = self.safe_tokens(selected, budget - self.policy.window)
        rest = [token for token in selected if token not in safe]
        rest.sort(key=lambda token: (-token.notes["impact"], token.position))
        return in_order((window + safe + rest + ring)[:budget])
