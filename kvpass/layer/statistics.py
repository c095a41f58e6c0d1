"""The statistics that a policy asks of a prompt or chunk: as tensors for a graph, and as `Attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpass.budget import Budget
from kvpass.lowering.column_scores import column_scores, row_scan
from kvpass.policies import specify
from kvpass.policies.base import Attention, Policy, Statistic
from kvpass.policies.heads import Spread

SUMS: tuple[Statistic, ...] = ("total", "squares", "last", "window", "logits")


def powers(policy: Policy) -> int:
    """How many sums over all queries the policy needs: see `column_scores`."""
    return 2 if "squares" in policy.statistics else int("total" in policy.statistics)


def wanted(policy: Policy) -> list[Statistic]:
    """What `statistics` returns for the policy, in its order."""
    return sorted(policy.statistics)


def room(budget: Budget) -> tuple[Any, float]:
    """A budget as `row_scan` takes it, as operators have no unions: a number of slots, or 0 and a share."""
    return (0, budget) if isinstance(budget, float) else (budget, 0.0)


def statistics(
    policy: Policy,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    budget: Budget,
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
    spread: Spread | None = None,
) -> list[Tensor]:
    """The tensors that the policy asks for; `budget` as users write it, the others as for `column_scores`."""
    made: dict[Statistic, Tensor] = {}
    if not policy.statistics.isdisjoint(SUMS):
        asked = (policy.observation, powers(policy))
        sums = column_scores(query, key, mask, real, causal, scale, *asked, cap, sink, heads)
        made = dict(zip(SUMS, sums, strict=True))
    if "scan" in policy.statistics:
        written, where = (specify(policy), *room(budget)), spread.written() if spread else None
        made["scan"] = row_scan(query, key, mask, real, causal, scale, *written, cap, sink, heads, where)
    return [made[name] for name in wanted(policy)]


def as_attention(policy: Policy, tensors: list[Tensor], real: Tensor, spread: Spread | None = None) -> Attention:
    """What `statistics` returned, by name; real is bool [B, q]."""
    named = dict(zip(wanted(policy), tensors, strict=True))
    return Attention(**named, queries=real.sum(-1)[:, None, None], spread=spread)
