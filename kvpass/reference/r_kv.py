"""Transcribe `r_kv`: stored queries vote, and each pair of keys is compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpass.policies.r_kv import RKV
from kvpass.reference.base import HeadStream, Token, highest_scored, in_order, neighbours, split_at
from kvpass.reference.voters import VotingReference, ballots, shares


class RKVReference(VotingReference):
    policy: RKV

    def rows(self, probabilities: Tensor, logits: Tensor) -> Tensor:
        return probabilities if self.policy.plain else logits.amax(1, keepdim=True)

    def rescore(self, tokens: list[Token], stream: HeadStream) -> None:
        importance, redundancy = self.importance(tokens, stream), self.redundancy(tokens)
        for token, one, other in zip(tokens, importance, redundancy, strict=True):
            token.notes["importance"], token.notes["redundancy"] = one, other

    def importance(self, tokens: list[Token], stream: HeadStream) -> list[float]:
        """Return the mean vote for each token, zero for the last ones."""
        votes, found = {token.position: 0.0 for token in tokens}, ballots(stream, self.policy.window)
        for ballot in found:
            rows = list(zip(*ballot.values(), strict=True))  # of each query head
            for row in rows:
                powers = row if self.policy.plain else [math.exp(logit - max(row)) for logit in row]
                for position, share in zip(ballot, shares(powers), strict=True):
                    votes[position] += share / len(rows) / len(found)
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
        older, newer = split_at(tokens, seen - self.policy.window)
        weight, pooled = self.policy.weight, self.pool([token.notes["importance"] for token in older])
        score = {
            id(token): weight * importance - (1 - weight) * token.notes["redundancy"]
            for token, importance in zip(older, pooled, strict=True)
        }
        newer = newer[:budget]  # in a span of the text, whose share may be less than the window
        return in_order(newer + highest_scored(older, budget - len(newer), lambda token: score[id(token)]))

    def pool(self, values: list[float]) -> list[float]:
        kernel = self.policy.kernel
        return [sum(some) / kernel if self.policy.plain else max(some) for some in neighbours(values, kernel)]
