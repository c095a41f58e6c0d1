"""Select prompt tokens by the highest attention of any late query, and not by the mean.

DefensiveKV (Feng et al., "Taming the Fragility of KV Cache Eviction in LLM Inference").
https://arxiv.org/abs/2510.13334

Once, at the end of a prompt, each of its last `window` queries has its attention to the tokens before them averaged
over `kernel` neighbours, zero beyond either end, and rescaled to its previous sum.  A token's score is the highest
of all queries and of the G query heads of a KV head, and at least the mean of these over the tokens.  It is multiplied
by the token value's contribution to the output of the layer (`kvpass.policies.critical_kv`), as a share of all KV
heads' contributions.

In each head, tokens are safe in order of mean attention while their cumulative share is below `mass`.  They and then
the highest scores of all heads win the selected tokens of the layer.  Heads get budgets by their winners as under
`ada_kv`.  Each keeps its safe tokens, then its highest scores, and its window, and continues with a ring.

A chunk is selected from like a prompt.  Cached tokens are not averaged with neighbours, because some were evicted, and
values are not compared across heads, because heads cache different tokens.  Heads stay in their classes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvpass.arguments import Positive, Share
from kvpass.policies.ada_kv import AdaKV, count_winners
from kvpass.policies.critical_kv import output_norms
from kvpass.policies.ranking import INT64_MAX, keep_highest
from kvpass.policies.types import Attention, State, Tokens
from kvpass.policies.voting import TINY


@dataclasses.dataclass(frozen=True)
class DefensiveKV(AdaKV):
    """The DefensiveKV policy.

    Attributes:
        mass: the share of a head's mean attention below which its tokens are selected by mean attention alone.
    """

    window: Positive = 32
    safeguard: Share = 0.0
    mass: Share = 0.9
    name = "defensive_kv"
    spans_refusal = "its safe tokens have a share of the attention to the whole prompt"
    statistics = frozenset({"window", "scan"})

    def state(self) -> dict[str, torch.dtype]:
        return {**super().state(), "mean": torch.float32, "impact": torch.float32}

    def smoothed(self, probs: Tensor, valid: Tensor, cached_columns: int) -> Tensor:
        """Return attention averaged over neighbours among the new tokens that are older than the window."""
        older = valid & (valid.cumsum(-1) <= valid.sum(-1, keepdim=True) - self.window)  # [B, q]
        order = (~older).int().argsort(dim=-1, stable=True)[:, None, None, None].expand_as(probs[..., cached_columns:])
        among = older[:, None, None, None]
        rows = torch.where(among, probs[..., cached_columns:], 0.0)
        pooled = torch.nn.functional.avg_pool1d(
            rows.gather(-1, order).flatten(0, 3)[:, None], self.kernel, stride=1, padding=self.kernel // 2
        )
        pooled = torch.where(among, torch.zeros_like(rows).scatter(-1, order, pooled.view_as(rows)), 0.0)
        pooled = pooled * (rows.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp(min=TINY))
        return torch.cat([probs[..., :cached_columns], pooled], -1)

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        scored = (attention.queries > 0) & tokens.live & ~tokens.newest(self.window)
        peak = torch.where(scored, attention.scan, 0.0)
        least = peak.sum(-1, keepdim=True) / scored.sum(-1, keepdim=True).clamp(min=1)
        return {
            "score": torch.where(scored, torch.maximum(peak, least), tokens.state["score"]),
            "mean": torch.where(scored, attention.window.mean(2), tokens.state["mean"]),
            "selected": scored | tokens.state["selected"],
        }

    def project(self, tokens: Tokens, value: Tensor, output: Tensor | None) -> State:
        norms = output_norms(value, output)
        if not tokens.cached_columns:  # a prompt, whose tokens all heads have
            norms = norms / norms.sum(1, keepdim=True).clamp(min=TINY)
        return {"impact": torch.where(tokens.live & tokens.state["selected"], tokens.state["score"] * norms, 0.0)}

    def head_counts(self, tokens: Tokens, layer: int) -> Tensor:
        selected = self.compacted(tokens.budget) - self.window
        assert isinstance(selected, int)  # rows have equal budgets
        safe, position = self._safe_tokens(tokens, selected), torch.where(self._competes(tokens), tokens.position, -1)
        score = torch.where(safe, torch.inf, tokens.state["impact"])
        return count_winners(score, position, selected, self.safeguard)

    def compact(self, tokens: Tokens) -> tuple[Tensor, State]:
        by_impact = torch.where(self._competes(tokens), tokens.state["impact"], self.score(tokens))
        score = torch.where(self._safe_tokens(tokens, tokens.budget - self.window), torch.inf, by_impact)
        return keep_highest(score, tokens.position, tokens.budget), {}

    def _safe_tokens(self, tokens: Tokens, most: int | Tensor) -> Tensor:
        """Mark the tokens of highest mean attention up to a share `mass`, but at most `most`: bool [B, H, N]."""
        among = self._competes(tokens)
        mean = torch.where(among, tokens.state["mean"], 0.0).double()
        order = torch.where(among, tokens.position, INT64_MAX).argsort(dim=-1)
        order = order.gather(-1, mean.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        share = mean.gather(-1, order).cumsum(-1) / mean.sum(-1, keepdim=True).clamp(min=TINY)
        below = (share < self.mass).scatter(-1, order, share < self.mass)
        return below & keep_highest(mean, torch.where(among, tokens.position, -1), most)
