"""Keep sinks, heavy hitters and recent tokens, and merge evicted tokens into similar ones.

D2O (Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of LLMs").
https://arxiv.org/abs/2406.13035

A token's score is the attention to it, summed over all queries and the G query heads of its KV head.  Sinks, the
highest scores and the most recent tokens stay, N : M = 3 : 1.  An evicted token i is merged into the kept token of most
similar key, u_i = max_j cos(k_i, k_j), unless it is too far from all of them (Eq. 9-11, without the stray sum in the
printed Eq. 11):

    tau_0 = mean_i u_i,   tau_t = beta u + (1 - beta) tau_{t-1},   m_i = [u_i >= tau]
    k_c <- w_c k_c + sum_i w_i k_i,   w_c = e / Z,   w_i = exp(u_i) m_i / Z,   Z = e + sum_i exp(u_i) m_i

and v_c with the same weights.  The score of the kept token does not change.  A step costs one more pass over the keys
and one vector of K and V rewritten per head.

`budget` is the mean over the layers: a layer whose prompt attention varies more over the tokens gets less
(`layer_budgets`), in each row of a batch by that row alone.  A chunk is treated like a prompt: its queries are summed,
then all tokens beyond the budget are merged, and tau moves once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvpass.arguments import Natural, Share, at_least
from kvpass.policies.base import Policy
from kvpass.policies.budgets import Plan, clamp_max, share_of, whole_shares
from kvpass.policies.full import Full
from kvpass.policies.heads import HeadSharding, gather_heads, reduce_heads
from kvpass.policies.ranking import INT64_MAX, slots_by_position
from kvpass.policies.types import Attention, Merge, State, Tokens
from kvpass.torch_private.inductor import materialize

UNSET = -2.0  # tau before the first merge, below every cosine
MIN_SHARE = 0.01  # every layer keeps this share of the prompt
BLOCK = 64  # keys compared with all others at a time: their cosines stay in the CPU's caches
MIN_NORM = 1e-12


@dataclasses.dataclass(frozen=True)
class D2O(Policy):
    """The D2O policy.

    Attributes:
        sinks, heavy: the first tokens that stay, and the share N / (N + M); sinks are a part of N.
        extra_sinks: sinks are not a part of N, which is a share of the rest.
        layers: how layers share the budget: "softmax" over their densities; "gate", alpha times as much for a density
            up to `gate`, scaled so that the mean is the budget; or "paper", the budget or alpha times it.
        beta: how fast tau moves.
        merge: "paper" as above; "average", plain means k_c <- (k_c + sum_i m_i k_i) / (1 + n_c); "none", evicted tokens
            are dropped (both in Table 6); or "official", k_c <- (k_c + sum_i u_i k_i) / (1 + n_c), means of vectors
            that are scaled by their u, and one decision for all heads by the mean of their u.
        skip_layers: layers that keep every token, at any cost; the mean does not include them.
        density: the operand of variances (Eq. 4): the column sums of a "kv" head, or of each "query" head.
    """

    sinks: Natural = 4
    heavy: Share = 0.75
    layers: Literal["softmax", "gate", "paper"] = "softmax"
    gate: Annotated[float, at_least(0)] = 100.0
    alpha: Annotated[float, at_least(1)] = 3.0
    beta: Share = 0.5
    merge: Literal["paper", "average", "none", "official"] = "paper"
    skip_layers: tuple[int, ...] = ()
    extra_sinks: bool = False
    density: Literal["kv", "query"] = "kv"
    name = "d2o"
    interval_refusal = "each token is merged when it is evicted, and layers have different budgets"
    shardable = "heads"
    heads = "kv"
    statistics = frozenset({"total"})

    @property
    def merges(self) -> bool:
        return self.merge != "none"

    def minimum_budget(self) -> int:
        return self.sinks + 1

    def for_layer(self, layer: int, layers: int) -> Policy:
        return Full() if layer in self.skip_layers or layer - layers in self.skip_layers else self

    def plan(self, attention: Sequence[Attention], valid: Tensor, budget: int) -> list[Plan]:
        totals = [layer.total for layer in attention]
        variances = column_variances(totals, valid, attention[0].sharding, self.density)
        options = (self.layers, self.gate, self.alpha, self.minimum_budget())
        lengths = valid.sum(-1).tolist()
        budgets = [layer_budgets(row, budget, prompt, *options) for row, prompt in zip(variances, lengths, strict=True)]
        max_budget = largest_layer_budget(len(totals), budget, self.layers, self.alpha) + 1
        return [Plan(max(rows), max(rows) + 1, rows, max_budget) for rows in zip(*budgets, strict=True)]

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32}

    def row_state(self) -> dict[str, int | float]:
        return {"threshold": UNSET}  # tau

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        return {"score": tokens.state["score"] + attention.total.sum(2)}  # [B, Hkv, N]

    def _recent(self, budget: int | Tensor) -> int | Tensor:
        """Return M, the number of recent tokens."""
        shared = budget - self.sinks if self.extra_sinks else budget
        return clamp_max(shared - share_of(shared, self.heavy), budget - self.sinks)

    def score(self, tokens: Tokens) -> Tensor:
        safe = (tokens.position < self.sinks) | tokens.newest(self._recent(tokens.budget))
        return torch.where(safe, torch.inf, tokens.state["score"])

    def merge_evicted(self, tokens: Tokens, cached_keys: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        similar, into = nearest(evicted, cached_keys, tokens.position)  # [B, Hkv, E]
        official = self.merge == "official"
        similarity = reduce_heads(similar[:, :, None], "mean", tokens.sharding) if official else similar
        mean = torch.where(valid, similarity, 0).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
        previous = tokens.state["threshold"]
        updated = torch.where(previous == UNSET, mean, self.beta * mean + (1 - self.beta) * previous)
        threshold = torch.where(valid.any(-1, keepdim=True), updated, previous)
        weight, share, own = self._weights(similar, (valid & (similarity >= threshold)).float())
        return Merge(into, weight, share, own, {"threshold": threshold})

    def _weights(self, similar: Tensor, merged: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return the weights of evicted tokens, their shares of the denominator, and the slot's weight; see `Merge`."""
        if self.merge == "paper":
            return merged * similar.exp(), merged * similar.exp(), math.e
        return merged * similar if self.merge == "official" else merged, merged, 1.0


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
    totals: Sequence[Tensor], valid: Tensor, sharding: HeadSharding | None, density: str = "kv"
) -> list[list[list[float]]]:
    """Return F for each row, layer and head, including heads of other processes, which costs one collective.

    Args:
        totals: the `total` of each layer, as in `column_variance`.
    """
    local = [column_variance(total, valid, density) for total in totals]
    processes = 1 if sharding is None else sharding.world_size
    flat = gather_heads(torch.cat([layer.flatten() for layer in local]), sharding).view(processes, -1)
    parts = torch.split(flat, [layer.numel() for layer in local], 1)  # of each layer [processes, B * h]
    all_heads = [part.view(processes, *layer.shape).transpose(0, 1) for part, layer in zip(parts, local, strict=True)]
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
    return whole_shares([min(max(high * weight, minimum), maximum) for weight in weights], total, maximum)


def largest_layer_budget(count: int, budget: int, layers: str = "softmax", alpha: float = 3.0) -> int:
    """Return the largest result of `layer_budgets` for one of `count` layers and any prompt."""
    if layers == "paper":
        return share_of(budget, alpha)
    others = (count - 1) / (alpha if layers == "gate" else math.e)
    return math.ceil(count * budget / (1 + others))


def nearest(key: Tensor, cached_keys: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each key its most similar live slot; of equal ones the slot of lowest position.

    Args:
        key: [B, Hkv, E, D]; cached_keys: [B, Hkv, C, D].
        position: int64 [B, Hkv, C], negative for free slots.

    Returns:
        The cosines, float32 [B, Hkv, E], and the slots, int64 [B, Hkv, E].
    """
    if key.shape[2] != 1:
        return _nearest_of_many(key, cached_keys, position)
    cosine = (
        _cosines_on_cpu(key, cached_keys) if key.device.type == "cpu" else _cosines_on_gpu(key, cached_keys)
    )  # [B, Hkv, 1, C]
    cosine = torch.where(position[:, :, None] < 0, -torch.inf, cosine)
    best = cosine.amax(-1, keepdim=True)
    return best[..., 0], torch.where(cosine == best, position[:, :, None], INT64_MAX).argmin(-1)


def _nearest_of_many(key: Tensor, cached_keys: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return `nearest` for evicted keys of prompts and chunks, in blocks and uncompiled."""
    batch, heads, count, _ = key.shape
    # Slots are sorted by position, free ones last, because `max` finds the first of equals.
    order = slots_by_position(position)[..., : max(1, int((position >= 0).sum(-1).max()))]
    sorted_keys = cached_keys.gather(2, order[..., None].expand(*order.shape, cached_keys.shape[3]))
    unit_slots = _unit(sorted_keys).flatten(0, 1).transpose(1, 2)  # [B * Hkv, D, n]
    free = (position.gather(-1, order) < 0).flatten(0, 1)[:, None]
    hidden = torch.zeros(free.shape, dtype=torch.float32, device=free.device).masked_fill(free, -torch.inf)
    blocks = [_unit(block).flatten(0, 1) for block in torch.split(key, BLOCK, 2)]
    best = [torch.baddbmm(hidden, block, unit_slots).max(-1) for block in blocks]
    cosine, nth = (torch.cat(each, 1).view(batch, heads, count) for each in zip(*best, strict=True))
    return cosine, order.gather(-1, nth)


def _unit(key: Tensor) -> Tensor:
    return key.float() / _norm(key)[..., None]


def _cosines_on_gpu(key: Tensor, cached_keys: Tensor) -> Tensor:
    """Return cosines [B, Hkv, 1, C] on a GPU, in one launch with the norms and without a converted copy."""
    product = (key[..., None, :].float() * cached_keys[:, :, None].float()).sum(-1)
    return product / (_norm(key)[..., None] * _norm(cached_keys)[:, :, None])


def _cosines_on_cpu(key: Tensor, cached_keys: Tensor) -> Tensor:
    """Return cosines [B, Hkv, 1, C] on a CPU, in one pass over the slots and without a converted copy.

    On a CPU, products and norms share one loop over the slots only if both read values of the head.  A compiler would
    run norms alone in a separate loop, over all slots as one long row.  On a GPU this would cost two more launches.
    """
    inverse_norm = materialize(1 / _norm(key)[..., None])  # [B, Hkv, 1, 1]
    slots = cached_keys.float() * inverse_norm
    product = (slots * materialize(key.float() * inverse_norm)).sum(-1)  # [B, Hkv, C]
    norm = torch.maximum(slots.square().sum(-1).sqrt(), MIN_NORM * inverse_norm[..., 0])
    return (product / norm)[:, :, None]


def _norm(key: Tensor) -> Tensor:
    return key.float().square().sum(-1).sqrt().clamp(min=MIN_NORM)
