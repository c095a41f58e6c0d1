"""Transcribe `expected_attention`: the mean rotation as a matrix, and the log of a normal variable's mean exp."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpass.policies.expected_attention import ExpectedAttention
from kvpass.reference.base import HeadStream, Reference, Token, highest_scored
from kvpass.reference.pairs import calibrated_pairs, queries_of


class ExpectedAttentionReference(Reference):
    policy: ExpectedAttention

    def rescore(self, tokens: list[Token], stream: HeadStream) -> None:
        later = [token for token in tokens if token.position >= self.policy.sinks]
        shares = [torch.tensor(self.expected(stream, later, group)).softmax(0) for group in range(self._group)]
        for index, token in enumerate(later):
            share = sum(float(each[index]) for each in shares) / self._group
            token.score = (share + self.policy.epsilon) * float(token.value[0].double().norm())

    @property
    def _group(self) -> int:
        return self.policy.loaded.model.query_heads // self.policy.loaded.model.heads

    def expected(self, stream: HeadStream, tokens: list[Token], group: int) -> list[float]:
        """Return the log of the expected exp(logit) of each token, for one query head of a KV head."""
        calibration = self.policy.loaded
        mean, _, second = queries_of(calibration, stream.layer, stream.head)[group]
        scale = float(calibration.tensors["scale"][stream.layer])
        found = []
        for token in tokens:
            key, frequency = calibrated_pairs(calibration, stream.layer, token.key[0])
            rotation = _mean_rotation(frequency, stream.seen, self.policy.horizon)
            row = torch.cat([key.real, key.imag])
            middle = float(rotation @ torch.cat([mean.real, mean.imag]) @ row)
            spread = float(row @ rotation @ second @ rotation.T @ row)
            found.append(scale * middle + scale**2 * spread / 2)
        return found

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        return highest_scored(tokens, budget, lambda t: math.inf if t.position < self.policy.sinks else t.score)


def _mean_rotation(frequency: Tensor, seen: int, horizon: int) -> Tensor:
    """Return the mean of the rotation matrices [D, D] of the next positions, for rows with first dimensions first."""
    angle = (seen + torch.arange(horizon, dtype=torch.float64))[:, None] * frequency
    cos, sin = torch.diag(angle.cos().mean(0)), torch.diag(angle.sin().mean(0))
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
