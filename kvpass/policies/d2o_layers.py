"""Share D2O's budget among layers, by the variance of attention over the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.policies.budgets import share_of
from kvpass.policies.heads import HeadSharding, gathered

MIN_SHARE = 0.01  # every layer keeps this share of the prompt


def column_variance(total: Tensor, valid: Tensor, density: str = "kv") -> Tensor:
    """Return F = Var_j(colsum_j) over the real tokens, for each row and head (Eq. 4): float64 [B, h].

    Args:
        total: attention summed over the queries, [B, Hkv, G, N].
        valid: bool [B, N].
        density: "kv" sums over the G query heads of a KV head first, so h = Hkv; "query" takes every query head by
            itself, so h = Hq.
    """
    probs = (total.sum(2) if density == "kv" else total.flatten(1, 2)).double()  # [B, h, N]
    real = valid[:, None].to(probs.dtype)
    count = real.sum(-1, keepdim=True).clamp(min=1)
    mean = (probs * real).sum(-1, keepdim=True) / count
    return ((probs - mean).square() * real).sum(-1) / count[..., 0]


def column_variances(
    totals: Sequence[Tensor], valid: Tensor, spread: HeadSharding | None, density: str = "kv"
) -> list[list[list[float]]]:
    """Return F for each row, layer and head, including heads of other processes, which costs one collective.

    Args:
        totals: of each layer, as in `column_variance`.
    """
    local = [column_variance(total, valid, density) for total in totals]
    ranks = 1 if spread is None else spread.ranks
    flat = gathered(torch.cat([layer.flatten() for layer in local]), spread).view(ranks, -1)
    parts = torch.split(flat, [layer.numel() for layer in local], 1)  # of each layer [ranks, B * h]
    all_heads = [part.view(ranks, *layer.shape).transpose(0, 1) for part, layer in zip(parts, local, strict=True)]
    layers = [layer.flatten(1).tolist() for layer in all_heads]
    return [list(row) for row in zip(*layers, strict=True)]


def layer_budgets(
    variances: Sequence[Sequence[float]],
    budget: int,
    prompt: int,
    layers: str = "softmax",
    gate: float = 100.0,
    alpha: float = 3.0,
    minimum: int = 1,
) -> list[int]:
    """Return the slots of each layer for one row; their mean is exactly `budget`, except with "paper".

    "softmax": in proportion to softmax(-d), where d is the mean over the heads of the variances, scaled so that the
    smallest of all layers and heads is 0 and the largest 1.  "gate": 1 for a layer whose variance (mean over the heads)
    exceeds `gate`, else alpha.  Every layer gets at least a hundredth of the prompt and at most the prompt.  "paper":
    the weights of "gate" times `budget`, for any prompt.

    Args:
        variances: F for each layer and head.
        prompt: real tokens of the prompt; a prompt that fits leaves the budget equal for all layers.
        minimum: the smallest budget of a layer.
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
    floor = min(budget, max(minimum, math.ceil(MIN_SHARE * prompt)))
    return _shared_out(weights, budget * len(weights), floor, prompt)


def _shared_out(weights: list[float], total: int, minimum: int, maximum: int) -> list[int]:
    """Return integers in proportion to the weights, from `minimum` to `maximum`, that add up to `total`."""
    low, high = 0.0, maximum / min(weights)
    for _ in range(100):
        middle = (low + high) / 2
        full = sum(min(max(middle * weight, minimum), maximum) for weight in weights)
        low, high = (middle, high) if full < total else (low, middle)
    exact = [min(max(high * weight, minimum), maximum) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in [i for i in by_rest if shares[i] < maximum][: total - sum(shares)]:
        shares[i] += 1
    return shares


def largest_layer_budget(count: int, budget: int, layers: str = "softmax", alpha: float = 3.0) -> int:
    """Return the largest result of `layer_budgets` for one of `count` layers and any prompt."""
    if layers == "paper":
        return share_of(budget, alpha)
    others = (count - 1) / (alpha if layers == "gate" else math.e)
    return math.ceil(count * budget / (1 + others))
