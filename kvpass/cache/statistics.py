"""The statistics of a prompt's or chunk's attention that a policy reads."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvpass.budget import Budget
from kvpass.cache.slots import Layout
from kvpass.lowering.attention_statistics import LATE, OLDER, SUMS, StatisticsRequest, attention_statistics
from kvpass.policies import specify
from kvpass.policies.base import Policy
from kvpass.policies.heads import HeadSharding
from kvpass.policies.types import Attention, Statistic


def names(policy: Policy) -> tuple[Statistic, ...]:
    """Return the statistics that a policy reads, in the order of the operator's results."""
    return tuple(sorted(policy.statistics))


def requested(
    policy: Policy,
    causal: bool,
    scale: float,
    cap: float | None,
    heads: int,
    budget: Budget | None,
    sharding: HeadSharding | None,
) -> str:
    """Return the text of the `StatisticsRequest` of a policy.

    Args:
        causal, scale, cap, heads: as of `StatisticsRequest`.
        budget: a number of slots or a share; None if each row has its own.
        sharding: the sharding of the layer's heads.
    """
    request = StatisticsRequest(names(policy), causal, scale, cap, heads)
    if not policy.statistics.isdisjoint((*LATE, *OLDER)):
        request = dataclasses.replace(request, window=policy.observation)
    if "scan" in policy.statistics:
        text = sharding.written() if sharding else None
        request = dataclasses.replace(request, scan=specify(policy), budget=budget, sharding=text)
    return request.text()


def in_one_operator(policy: Policy, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Check whether the operator can compute the library's attention of these tensors as well, which may be fake.

    The statistics must be of all queries: they then use the log-sum-exp of the library's attention.

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv].
    """
    alike = query.dtype == key.dtype == value.dtype and key.shape[3] == value.shape[3]
    return alike and query.device.type == "cpu" and not policy.statistics.isdisjoint({*SUMS, "scan"})


@dataclasses.dataclass(frozen=True)
class StatisticsSpec:
    """What the statistics of a prompt or chunk are made of.

    Attributes:
        query: [B, Hq, q, D]; key: [B, Ha, N, D], as attended to; the last q of N are those of the queries.
        mask: [B or 1, Hq, Ha or 1, q, N], boolean or additive, or None; sink_logit: [B or 1, Hq, q or 1, 1] or None.
        causal, scale, cap, heads: as of `StatisticsRequest`.
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

    def first(self, count: int) -> StatisticsSpec:
        """Of the first `count` queries, without the keys behind them."""
        total = self.key.shape[2] - self.query.shape[2] + count
        mask = None if self.mask is None else self.mask[..., :count, :total]
        sink_logit = None if self.sink_logit is None else self.sink_logit[:, :, :count]
        return dataclasses.replace(
            self, query=self.query[:, :, :count], key=self.key[:, :, :total], mask=mask, sink_logit=sink_logit
        )

    def attention(self, policy: Policy, valid: Tensor, budget: Budget | Tensor) -> Attention:
        """What the queries paid; the arguments are those of `statistics`."""
        if not policy.statistics:
            return Attention()
        made = statistics(policy, self, valid, budget)
        return as_attention(policy, made, valid, self.spread)


def statistics(
    policy: Policy, spec: StatisticsSpec, valid: Tensor, budget: Budget | Tensor, value: Tensor | None = None
) -> list[Tensor]:
    """Compute the tensors that the policy reads.

    Args:
        valid: bool [B, q], false for padding.
        budget: as users write it, or the slots of each row, int64 [B, H', 1].
        value: [B, Ha, N, Dv] to compute attention as well, where `in_one_operator` allows it.

    Returns:
        The output [B, Hq, q, Dv] of attention if there are values, then the `names` of the policy.
    """
    by_row = budget if isinstance(budget, Tensor) and "scan" in policy.statistics else None
    common = spec.causal, spec.scale, spec.cap, spec.heads
    request = requested(policy, *common, None if isinstance(budget, Tensor) else budget, spec.spread)
    made: list[Tensor] = attention_statistics(
        spec.query, spec.key, value, spec.mask, spec.sink_logit, valid, by_row, request
    )
    return made


def as_attention(policy: Policy, tensors: list[Tensor], valid: Tensor, spread: HeadSharding | None = None) -> Attention:
    """What `statistics` returned, by name; valid is bool [B, q]."""
    named = dict(zip(names(policy), tensors, strict=True))
    return Attention(**named, queries=valid.sum(-1)[:, None, None], spread=spread)


def of_chunk(layout: Layout, results: list[list[Tensor]], valid: Tensor) -> Attention | tuple[Attention, ...]:
    """Return `Chunk.attention` from what `by_class` returned; valid is bool [B, q]."""
    policy = layout.policy
    if not policy.statistics:
        return Attention()
    return of_classes([as_attention(policy, x[: len(policy.statistics)], valid, layout.spread) for x in results])


def of_classes(attention: list[Attention]) -> Attention | tuple[Attention, ...]:
    """Return `Chunk.attention` from that of each class of heads, none without statistics."""
    return tuple(attention) if len(attention) > 1 else attention[0] if attention else Attention()


def by_class(layout: Layout, results: list[Tensor]) -> list[list[Tensor]]:
    """Divide the statistics that `kvpass.cache.step.extend_step` returned among the classes of heads."""
    count = len(results) // len(layout.parts)
    return [results[i * count : (i + 1) * count] for i in range(len(layout.parts))]
