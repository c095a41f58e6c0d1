"""Keep the keys that later queries are expected to attend to, by the size of their values.

Expected Attention ("Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution"). https://arxiv.org/abs/2510.00636

Queries before their rotary embedding are taken as normal, of mean mu and covariance Sigma.  With R the mean rotation of
the next `horizon` positions, the logarithm of the expected exp(logit) of key j, and its score, are

    x_j = s mu'^T k_j + s^2 k_j^T Sigma' k_j / 2      mu' = R mu, Sigma' = R Sigma R^T
    score_j = (mean over query heads of softmax(x)_j + epsilon) |v_j|

with s the factor on logits.  The softmax leaves out the first tokens, which always stay.  The paper estimates mu and
Sigma from the prompt, or once from other texts, as here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive, at_least
from kvpass.policies import voting
from kvpass.policies.calibration import CalibratedPolicy, multiply_pairs
from kvpass.policies.types import State, Tokens


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(CalibratedPolicy):
    """The Expected Attention policy.

    Attributes:
        sinks: the first tokens, which always stay.
        horizon: the number of future positions that attention is averaged over.
        epsilon: added to the expected attention of each token.
    """

    interval: Positive = dataclasses.field(default=128, kw_only=True)
    sinks: Natural = 4
    horizon: Positive = 512
    epsilon: Annotated[float, at_least(0)] = 0.02
    name = "expected_attention"

    def minimum_budget(self) -> int:
        return self.sinks + 1

    def weights_from(self, statistics: Mapping[str, Tensor]) -> list[Tensor]:
        frequency, scale = statistics["frequency"].double(), statistics["scale"].double()[:, None, None]
        ahead = torch.polar(torch.ones(()).double(), torch.arange(self.horizon) * frequency[..., None]).mean(-1)
        mean = multiply_pairs(statistics["mean"].double(), ahead[:, None]) * scale
        half = multiply_pairs(statistics["second"].double(), ahead[:, None, None])  # Sigma R^T
        second = multiply_pairs(half.mT, ahead[:, None, None]) * scale[..., None] ** 2 / 2
        return [mean.float(), second.float(), statistics["frequency"], statistics["pairs"]]

    def rescore(self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor]) -> State:
        mean, second, frequency, pairs = weights
        relative, heads = self.relative_keys(key, tokens.seen, frequency, pairs, tokens.live), key.shape[1]
        among = tokens.live & (tokens.position >= self.sinks)
        relative = relative[:, :, None]  # [B, Hkv, 1, N, D]
        second, mean = (x.view(heads, -1, *x.shape[1:]) for x in (second, mean))  # [Hkv, G, D, D] and [Hkv, G, D]
        logits = (relative * (relative @ second)).sum(-1)
        logits = logits + (relative @ mean[..., None])[..., 0]  # [B, Hkv, G, N]
        probs = voting.masked_softmax(logits, among[:, :, None]).mean(2)
        size = torch.where(tokens.live[..., None], value.float(), 0.0).square().sum(-1).sqrt()
        return {"score": (probs + self.epsilon) * size}

    def score(self, tokens: Tokens) -> Tensor:
        return torch.where(tokens.position < self.sinks, torch.inf, tokens.state["score"])
