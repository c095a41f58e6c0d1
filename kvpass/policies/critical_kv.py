"""Select prompt tokens by attention first, and then by the contribution of their values to the output of the layer.

CriticalKV (Feng et al., "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective").
https://arxiv.org/abs/2502.03805

Heads get their budgets as in AdaKV.  In each head, half of the selected tokens are the best by SnapKV's score s.  The
rest are the best of the others by (s + epsilon) times the mean over the G query heads of the L1 norm of v W_g, where
W_g are the columns of the output projection that multiply the output of head g.  Evicting such a token would change the
output of the layer most.  The public code has epsilon = 1e-4.

Later tokens form a ring.  A chunk is selected from like a prompt, with norms of the stored values of all tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from torch import Tensor

from kvpass.arguments import Share, at_least
from kvpass.policies.ada_kv import AdaKV
from kvpass.policies.budgets import share_of
from kvpass.policies.ranking import keep_highest
from kvpass.policies.types import State, Tokens

BLOCK_ELEMENTS = 2**20  # elements of projected values at a time: in float32 they stay in the CPU's caches


@dataclasses.dataclass(frozen=True)
class CriticalKV(AdaKV):
    """The CriticalKV policy.

    Attributes:
        first: the share of a head's selected tokens that are selected by attention alone.
        epsilon: added to scores before they are multiplied by norms.
    """

    first: Share = 0.5
    epsilon: Annotated[float, at_least(0)] = 1e-4
    name = "critical_kv"
    spans_refusal = "it selects in two stages, each with a share of the budget"

    def state(self) -> dict[str, torch.dtype]:
        return {**super().state(), "impact": torch.float32}

    def project(self, tokens: Tokens, value: Tensor, output: Tensor | None) -> State:
        impact = (tokens.state["score"] + self.epsilon) * output_norms(value, output)
        return {"impact": torch.where(tokens.live & tokens.state["selected"], impact, 0.0)}

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        score = self.score(tokens)
        safe = keep_highest(score, tokens.position, self.window + share_of(tokens.budget - self.window, self.first))
        rest = torch.where(tokens.state["selected"], tokens.state["impact"], score)
        return keep_highest(torch.where(safe, torch.inf, rest), tokens.position, tokens.budget), {}


def output_norms(value: Tensor, output: Tensor | None) -> Tensor:
    """Return the L1 norm of each token's contribution to the layer's output, [B, h, N].

    Args:
        value: [B, h, N, Dv].
        output: [B or 1, h, G, Dv, E], or None for unprojected values.
    """
    if output is None:
        return value.float().abs().sum(-1)
    output = output.float()
    elements_of_token = len(value) * output[0, ..., 0, :].numel()
    blocks = torch.split(value, max(1, BLOCK_ELEMENTS // elements_of_token), 2)
    return torch.cat([(block.float()[:, :, None] @ output).abs().sum(-1).mean(2) for block in blocks], -1)
