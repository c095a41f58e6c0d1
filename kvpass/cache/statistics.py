"""The statistics that a policy asks of a prompt or chunk: as tensors for a graph, and as `Attention`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from kvpass.budget import Budget
from kvpass.lowering.column_scores import column_scores, row_scan, scanned_attention, scored_attention
from kvpass.policies import specify
from kvpass.policies.base import Attention, Policy, Statistic
from kvpass.policies.heads import HeadSharding

SUMS: tuple[Statistic, ...] = ("total", "squares", "last", "window", "logits")


def powers(policy: Policy) -> int:
    """How many sums over all queries the policy needs: see `column_scores`."""
    return 2 if "squares" in policy.statistics else int("total" in policy.statistics)


def in_one_operator(policy: Policy, query: Tensor, key: Tensor, value: Tensor, by_library: bool) -> bool:
    """Check whether one operator computes attention and the policy's statistics of these tensors, which may be fake.

    The statistics must be of all queries. A scan shares the products with attention; sums use the log-sum-exp of the
    library's attention.

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv].
        by_library: whether the library's attention computes the output.
    """
    if query.device.type != "cpu" or not query.dtype == key.dtype == value.dtype:
        return False
    if policy.statistics == {"scan"}:
        return True
    return by_library and key.shape[3] == value.shape[3] and powers(policy) > 0 and policy.statistics <= {*SUMS}


def wanted(policy: Policy) -> list[Statistic]:
    """What `statistics` returns for the policy, in its order."""
    return sorted(policy.statistics)


def room(budget: Budget | Tensor) -> tuple[Any, float]:
    """A budget as `row_scan` takes it, as operators have no unions: a number of slots, or 0 and a share or 0.0."""
    if isinstance(budget, Tensor):
        return 0, 0.0
    return (0, budget) if isinstance(budget, float) else (budget, 0.0)


@dataclasses.dataclass(frozen=True)
class StatisticsSpec:
    """What the statistics of a prompt or chunk are made of.

    Attributes:
        query: [B, Hq, q, D]; key: [B, Ha, N, D], as attended to; the last q of N are those of the queries.
        mask: [B or 1, Hq, Ha or 1, q, N], boolean or additive, or None; sink_logit: [B or 1, Hq, q or 1, 1] or None.
        causal, scale, cap, heads: as of `kvpass.lowering.column_scores`.
        spread: where the other heads of the layer are.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    sink_logit: Tensor | None
    causal: bool
    scale: float
    cap: float | None
    heads: int
    spread: HeadSharding | None

    @property
    def last(self) -> tuple[float | None, Tensor | None, int]:
        """The arguments that all operators of `kvpass.lowering.column_scores` have behind their own."""
        return self.cap, self.sink_logit, self.heads

    @property
    def written_spread(self) -> str | None:
        return self.spread.written() if self.spread else None

    def first(self, count: int) -> StatisticsSpec:
        """Of the first `count` queries, without the keys behind them."""
        total = self.key.shape[2] - self.query.shape[2] + count
        mask = None if self.mask is None else self.mask[..., :count, :total]
        sink_logit = None if self.sink_logit is None else self.sink_logit[:, :, :count]
        return dataclasses.replace(
            self, query=self.query[:, :, :count], key=self.key[:, :, :total], mask=mask, sink_logit=sink_logit
        )

    def scan(self, policy: Policy, budget: Budget | Tensor) -> tuple[Any, ...]:
        """The arguments of `row_scan` behind those that all operators begin with; see `statistics`."""
        by_row = (budget,) if isinstance(budget, Tensor) else ()
        return (specify(policy), *room(budget), *self.last, self.written_spread, *by_row)

    def attention(self, policy: Policy, valid: Tensor, budget: Budget | Tensor) -> Attention:
        """What the queries paid; the arguments are those of `statistics`."""
        if not policy.statistics:
            return Attention()
        made = statistics(policy, self, valid, budget)
        return as_attention(policy, made, valid, self.spread)


def statistics(policy: Policy, spec: StatisticsSpec, valid: Tensor, budget: Budget | Tensor) -> list[Tensor]:
    """The tensors that the policy asks for.

    Args:
        valid: bool [B, q], false for padding.
        budget: as users write it, or that of each row, int64 [B, H', 1].
    """
    made: dict[Statistic, Tensor] = {}
    first = (spec.query, spec.key, spec.mask, valid, spec.causal, spec.scale)
    if not policy.statistics.isdisjoint(SUMS):
        sums = column_scores(*first, policy.observation, powers(policy), *spec.last)
        made = dict(zip(SUMS, sums, strict=True))
    if "scan" in policy.statistics:
        made["scan"] = row_scan(*first, *spec.scan(policy, budget))
    return [made[name] for name in wanted(policy)]


def attended_and_scored(
    policy: Policy, spec: StatisticsSpec, value: Tensor, valid: Tensor, budget: Budget | Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Compute attention and `statistics` by one operator, where `in_one_operator` allows it."""
    first = (spec.query, spec.key, value, spec.mask, valid, spec.causal, spec.scale)
    if "scan" in policy.statistics:
        output, made = scanned_attention(*first, *spec.scan(policy, budget))
        return output, [made]
    output, *sums = scored_attention(*first, policy.observation, powers(policy), spec.heads)
    named = dict(zip(SUMS, sums, strict=True))
    return output, [named[name] for name in wanted(policy)]


def as_attention(policy: Policy, tensors: list[Tensor], valid: Tensor, spread: HeadSharding | None = None) -> Attention:
    """What `statistics` returned, by name; valid is bool [B, q]."""
    named = dict(zip(wanted(policy), tensors, strict=True))
    return Attention(**named, queries=valid.sum(-1)[:, None, None], spread=spread)
