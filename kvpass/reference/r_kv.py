"""Reference of `r_kv`: stored queries vote, and each pair of keys is compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpass.policies.r_kv import RKV
from kvpass.reference import voters
from kvpass.reference.base import HeadStream, Reference, Token, highest_scored, in_order, split_at


class RKVReference(Reference):
    policy: RKV

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        tokens, policy = stream.tokens + new, self.policy
        rows = probabilities if policy.plain else logits.amax(1, keepdim=True)
        voters.remember(stream, tokens, new, rows)
        exceeds = len(tokens) > stream.budget
        if exceeds:
            importance, redundancy = self.importance(tokens, stream), self.redundancy(tokens)
            for token, one, other in zip(tokens, importance, redundancy, strict=True):
                token.notes["importance"], token.notes["redundancy"] = one, other
        voters.forget(stream, exceeds)
        stream.tokens = self.keep_tokens(tokens, stream)

    def importance(self, tokens: list[Token], stream: HeadStream) -> list[float]:
        """Return the mean vote for each token, zero for the last ones."""
        votes, chosen = {token.position: 0.0 for token in tokens}, voters.voters(stream, self.policy.window)
        for query in chosen:
            places = voters.eligible(query, stream, self.policy.window, chosen)
            rows = list(zip(*(query.seen[position] for position in places), strict=True))  # of each query head
            for row in rows:
                powers = row if self.policy.plain else [math.exp(logit - max(row)) for logit in row]
                for position, power in zip(places, powers, strict=True):
                    votes[position] += power / sum(powers) / len(rows) / len(chosen)
        return [votes[token.position] for token in tokens]

    def redundancy(self, tokens: list[Token]) -> list[float]:
        keys = torch.stack([token.key[0].float() for token in tokens])
        unit = torch.nn.functional.normalize(keys, dim=-1)
        cosine = (unit @ unit.T).fill_diagonal_(0).tolist()
        for row in [] if self.policy.plain else cosine:
            similar = [j for j, value in enumerate(row) if value > 0.5]
            if similar or self.policy.official:
                row[max(similar, default=0)] = 0.0
        means = torch.tensor(cosine).mean(0)
        return means.softmax(0).tolist()

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        if len(tokens) <= budget:
            return tokens
        older, newer = split_at(tokens, seen - self.policy.window)
        weight, pooled = self.policy.weight, self.pool([token.notes["importance"] for token in older])
        score = {
            id(token): weight * importance - (1 - weight) * token.notes["redundancy"]
            for token, importance in zip(older, pooled, strict=True)
        }
        newer = newer[:budget]  # of a span of the text, whose share may be less than the window
        return in_order(newer + highest_scored(older, budget - len(newer), lambda token: score[id(token)]))

    def pool(self, values: list[float]) -> list[float]:
        side, kernel = self.policy.kernel // 2, self.policy.kernel
        neighbours = [values[max(0, n - side) : n + side + 1] for n in range(len(values))]
        return [sum(some) / kernel if self.policy.plain else max(some) for some in neighbours]
