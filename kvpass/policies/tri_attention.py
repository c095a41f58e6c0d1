"""Predict the logits that keys will get from later queries by the mean query, one rotary pair at a time.

TriAttention ("Efficient Long Reasoning with Trigonometric KV Compression"). https://arxiv.org/abs/2604.04921

With mu_f the mean of query pair f before the rotary embedding, E_f the mean of its absolute value, and k_f the pair of
a key before its rotary embedding at p, the score for query head h and the next position t is

    S_h = mean_d sum_f |mu_f| |k_f| cos(w_f (t - p + d) + arg(mu_f conj(k_f))) + sum_f (E_f - |mu_f|) |k_f|

over the distances d = 1, 2, 4, ..., 65536.  The mean over d is a constant factor on mu_f, so the first sum is one
product of the stored key, rotated back by t, with a constant vector.  Scores of a head are standardised over the tokens
that may be evicted, and a KV head takes the highest of its query heads' scores.

The paper pins the prompt, inside of the budget: `keep_prompt=True`.  A prompt that may be evicted loses its first
tokens unless `sinks` keeps them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive
from kvpass.policies.calibration import CalibratedPolicy, multiply_pairs, pair_norms
from kvpass.policies.types import State, Tokens

DISTANCES = tuple(2**n for n in range(17))
MIN_DEVIATION = 1e-6
GRID = 2**-12


@dataclasses.dataclass(frozen=True)
class TriAttention(CalibratedPolicy):
    """The TriAttention policy.

    Attributes:
        sinks, recent: the first and the last tokens that always stay.
    """

    interval: Positive = dataclasses.field(default=128, kw_only=True)
    sinks: Natural = 4
    recent: Natural = 0
    name = "tri_attention"

    def minimum_budget(self) -> int:
        return self.sinks + self.recent + 1

    def weights_from(self, statistics: Mapping[str, Tensor]) -> list[Tensor]:
        mean, size, frequency = statistics["mean"], statistics["size"], statistics["frequency"]
        distances = torch.tensor(DISTANCES, dtype=torch.float64)
        ahead = torch.polar(torch.ones(()).double(), distances * frequency.double()[..., None]).mean(-1)  # [L, P]
        anchor = multiply_pairs(mean.double(), ahead[:, None]).float()
        return [anchor, size - pair_norms(mean), frequency, statistics["pairs"]]

    def rescore(self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor]) -> State:
        anchor, deviation, frequency, pairs = weights
        relative, heads = self.relative_keys(key, tokens.seen, frequency, pairs, tokens.live), key.shape[1]
        anchor, deviation = (x.view(heads, -1, x.shape[1]).mT for x in (anchor, deviation))  # [Hkv, D, G], [Hkv, P, G]
        score = relative @ anchor + pair_norms(relative) @ deviation  # [B, Hkv, N, G]
        return {f"score_{group}": each for group, each in enumerate(score.unbind(-1))}

    def score(self, tokens: Tokens) -> Tensor:
        stays = (tokens.position < self.sinks) | tokens.newest(self.recent)
        among = tokens.live & ~stays
        found = (x for name, x in tokens.state.items() if name.startswith("score_"))
        highest = torch.stack([standardise(x, among) for x in found]).amax(0)
        return torch.where(stays, torch.inf, highest)


def standardise(score: Tensor, among: Tensor) -> Tensor:
    """Return scores [..., N] minus their mean, over their standard deviation, both over `among` [..., N].

    They are rounded, so that rounding decides no tie: of two tokens, each has the higher score for some query head.
    """
    count = among.sum(-1, keepdim=True).clamp(min=1)
    apart = score - torch.where(among, score, 0.0).sum(-1, keepdim=True) / count
    variance = torch.where(among, apart.square(), 0.0).sum(-1, keepdim=True) / count
    return (apart / variance.sqrt().clamp(min=MIN_DEVIATION) / GRID).round() * GRID
