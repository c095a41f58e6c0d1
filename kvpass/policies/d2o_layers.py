"""How D2O shares a budget among the layers, from the variance of the attention that their tokens were paid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.policies.base import share_of
from kvpass.policies.heads import HeadSharding, gathered

LEAST_SHARE = 0.01  # of the prompt, for every layer


def column_variance(total: Tensor, valid: Tensor, density: str = "kv") -> Tensor:
    """F = Var_j(colsum_j) over the real tokens, for each row and head (Eq. 4): float64 [B, h].

    Args:
        total: attention summed over the queries, [B, Hkv, G, N].
        valid: bool [B, N].
        density: "kv" sums over the G query heads of a KV head first, so h = Hkv; "query" takes every query head by
            itself, so h = Hq.
    """
    probs = (total.sum(2) if density == "kv" else total.flatten(1, 2)).double()  # [B, h, N]
    here = valid[:, None].to(probs.dtype)
    count = here.sum(-1, keepdim=True).clamp(min=1)
    mean = (probs * here).sum(-1, keepdim=True) / count
    return ((probs - mean).square() * here).sum(-1) / count[..., 0]


def column_variances(
    totals: Sequence[Tensor], valid: Tensor, spread: HeadSharding | None, density: str = "kv"
) -> list[list[list[float]]]:
    """F for each row, layer and head, those of other processes included, which costs one collective.

    Args:
        totals: of each layer, as of `column_variance`.
    """
    here = [column_variance(total, valid, density) for total in totals]
    ranks = 1 if spread is None else spread.ranks
    flat = gathered(torch.cat([layer.flatten() for layer in here]), spread).view(ranks, -1)
    parts = torch.split(flat, [layer.numel() for layer in here], 1)  # of each layer [ranks, B * h]
    whole = [part.view(ranks, *layer.shape).transpose(0, 1) for part, layer in zip(parts, here, strict=True)]
    layers = [layer.flatten(1).tolist() for layer in whole]
    return [list(row) for row in zip(*layers, strict=True)]


def layer_budgets(
    variances: Sequence[Sequence[float]],
    budget: int,
    prompt: int,
    layers: str = "softmax",
    gate: float = 100.0,
    alpha: float = 3.0,
    least: int = 1,
) -> list[int]:
    """Slots for each layer of one row; their mean is `budget`, to the slot.

    "softmax": in proportion to softmax(-d), where d is the mean over the heads of the variances, scaled so
    that the smallest of all layers and heads is 0 and the largest 1.  "gate": 1 for a layer whose variance
    (mean over the heads) exceeds `gate`, else alpha.  Every layer gets at least a hundredth of the prompt
    and at most the prompt.  "paper": the same weights as they are, S = `budget` or alpha S whatever the
    prompt; their mean is not `budget`.

    Args:
        variances: F for each layer and head.
        prompt: real tokens of the prompt; one that fits the budget leaves it equal for all layers.
        least: the smallest budget of a layer.
    """
    means = [sum(heads) / len(heads) for heads in variances]
    if layers == "paper":
        return [budget if mean > gate else share_of(budget, alpha) for mean in means]
    if budget >= prompt:
        return [budget] * len(variances)
    if layers == "gate":
        weights = [1.0 if mean > gate else alpha for mean in means]
    else:
        low, high = min(map(min, variances)), max(map(max, variances))
        span = high - low or 1.0
        weights = [math.exp(-(mean - low) / span) for mean in means]
    floor = min(budget, max(least, math.ceil(LEAST_SHARE * prompt)))
    return _shared_out(weights, budget * len(weights), floor, prompt)


def _shared_out(weights: list[float], total: int, least: int, most: int) -> list[int]:
    """Whole numbers in proportion to the weights, each from `least` to `most`, that add up to `total`."""
    low, high = 0.0, most / min(weights)
    for _ in range(100):
        middle = (low + high) / 2
        full = sum(min(max(middle * weight, least), most) for weight in weights)
        low, high = (middle, high) if full < total else (low, middle)
    exact = [min(max(high * weight, least), most) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in [i for i in by_rest if shares[i] < most][: total - sum(shares)]:
        shares[i] += 1
    return shares


def largest_layer_budget(count: int, budget: int, layers: str = "softmax", alpha: float = 3.0) -> int:
    """The most that `layer_budgets` can give one of `count` layers, whatever the prompt."""
    if layers == "paper":
        return share_of(budget, alpha)
    others = (count - 1) / (alpha if layers == "gate" else math.e)
    return math.ceil(count * budget / (1 + others))
