"""Define the operator that computes the statistics of attention that a policy reads, for a prompt or a chunk.

It is opaque to the compiler, so that one compiled prompt graph serves every prompt length. On a CPU it also computes
attention: sums then need one pass over the products, or none where the tiles of `attention_tiles` compute both.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import urllib.parse
from collections.abc import Iterator

import torch
from torch import Tensor

from kvpass import policies
from kvpass.lowering import attention_sums, attention_tiles
from kvpass.lowering.attention_blocks import AttentionInputs, regrouped
from kvpass.lowering.attention_sums import highest_probs, late_statistics, votes_for_older
from kvpass.policies import to_json
from kvpass.policies.base import Policy
from kvpass.policies.heads import HeadSharding
from kvpass.policies.types import Attention, Statistic
from kvpass.user_budget import Budget, slots_of_rows

SUMS = ("total", "squares")
LAST_QUERY_STATISTICS = ("last", "window", "logits")
OLDER = ("older", "older_peak")


@dataclasses.dataclass(frozen=True)
class StatisticsArguments:
    """The arguments of `attention_statistics` that are not tensors, as text, because operators take no objects.

    Without a scan they depend on the statistics alone, so policies that read the same statistics share a prompt graph.

    Attributes:
        names: the statistics, fields of `kvpass.policies.types.Attention`, in the order of the results.
        causal: a query does not see later keys.
        scale, cap: see `kvpass.capture.canonical.attention`.
        heads: Hc, the heads of the cache.
        window: how many of the last real queries the statistics `window` and `older` average over.
        scan: the policy that scans, see `kvpass.policies.to_json`; None without a scan.
        budget: for a scan, a number of slots or a share of each row's prompt.
        sharding: for a scan, the sharding of the layer's heads as text.
    """

    names: tuple[str, ...]
    causal: bool
    scale: float
    cap: float | None
    heads: int
    window: int = 1
    scan: str | None = None
    budget: int | float | None = None
    sharding: str | None = None

    def to_text(self) -> str:
        """Return the arguments as JSON without quotes, which Inductor's C++ wrapper would not escape in its strings."""
        return urllib.parse.quote(json.dumps(dataclasses.asdict(self), sort_keys=True), safe="{}[]:, ")

    @staticmethod
    def from_text(text: str) -> StatisticsArguments:
        """Return the arguments of a text that `to_text` returned."""
        fields = json.loads(urllib.parse.unquote(text))
        return StatisticsArguments(**{**fields, "names": tuple(fields["names"])})

    def for_policy(self, policy: Policy, budget: Budget | None, sharding: HeadSharding | None) -> StatisticsArguments:
        """Return the arguments for a policy's statistics, with its window or its scan.

        Args:
            budget: a number of slots or a share; None if each row has its own.
            sharding: the sharding of the layer's heads.
        """
        arguments = self
        if not policy.statistics.isdisjoint((*LAST_QUERY_STATISTICS, *OLDER)):
            arguments = dataclasses.replace(arguments, window=policy.observation_window)
        if "scan" in policy.statistics:
            text = sharding.to_text() if sharding else None
            arguments = dataclasses.replace(arguments, scan=to_json(policy), budget=budget, sharding=text)
        return arguments

    @property
    def powers(self) -> int:
        """The number of sums over all queries: 2 with the squares, 1 with the total alone, else 0."""
        return 2 if "squares" in self.names else int("total" in self.names)


@torch.library.custom_op("kvpass::attention_statistics", mutates_args=())
def attention_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    sink_logit: Tensor | None,
    valid: Tensor,
    row_budgets: Tensor | None,
    request: str,
) -> list[Tensor]:
    """Compute statistics of the matrix softmax(scale * query key^T + mask), and attention if there are values.

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; the queries are the last q of the S tokens.
        value: [B, Hkv, S, D] on a CPU, or None. Then all three have one dtype, q is S if causal, there is no cap and
            no sink.
        mask: bool or additive [B or 1, Hq, Hkv or 1, q, S or 1], or None; with Hkv only on a CPU.
        sink_logit: one more logit of each row, [B or 1, Hq, q or 1, 1], or None.
        valid: bool [B, q], false for padding queries, which no statistic counts.
        row_budgets: for a scan, int64 [B, H', 1], the slots of each row, instead of the budget in `request`.
        request: the text of a `StatisticsArguments`.

    Returns:
        The output [B, Hq, q, D] in the memory of [B, q, Hq, D] if there are values, then the statistics: each float32
        [B, Hc, Hq / Hc, S], peaks [B, Hc, 1, S], a scan [B, H', S].
    """
    parsed = StatisticsArguments.from_text(request)
    dtype = torch.promote_types(query.dtype, key.dtype)  # they differ under autocast
    query, key = query.to(dtype), key.to(dtype)
    mask = None if mask is None else mask.expand(*mask.shape[:-1], key.shape[2])
    attention = AttentionInputs(query, key, mask, parsed.causal, parsed.scale, parsed.cap, sink_logit)
    policy = None if parsed.scan is None else policies.from_json(parsed.scan)
    smooths = policy is not None and policy.smooths
    means = policy is not None and policy.scans_means and not smooths
    output, sums, probs = _attended(attention, value, valid, parsed.powers, means)
    results = _statistics(attention, parsed, valid, sums)
    if policy is not None and smooths:
        results["scan"] = _highest_probs(attention, parsed, policy, valid)
    elif policy is not None:
        results["scan"] = _scanned(attention, parsed, policy, valid, row_budgets, probs)
    named = [results[name] for name in parsed.names]
    if output is None:
        return named
    return [output.transpose(1, 2).contiguous().transpose(1, 2), *named]


@attention_statistics.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    sink_logit: Tensor | None,
    valid: Tensor,
    row_budgets: Tensor | None,
    request: str,
) -> list[Tensor]:
    parsed = StatisticsArguments.from_text(request)
    batch, groups, keys = key.shape[0], query.shape[1] // parsed.heads, key.shape[2]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(parsed.names, (batch, parsed.heads, groups, keys))
    if "older_peak" in shapes:
        shapes["older_peak"] = (batch, parsed.heads, 1, keys)
    if parsed.scan is not None:
        shared = policies.from_json(parsed.scan).heads == "shared"
        shapes["scan"] = (batch, 1 if shared else parsed.heads, keys)
    results = [query.new_empty(shapes[name], dtype=torch.float32) for name in parsed.names]
    if value is None:
        return results
    output = value.new_empty(batch, query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
    return [output, *results]


def _attended(
    attention: AttentionInputs, value: Tensor | None, valid: Tensor, powers: int, means: bool
) -> tuple[Tensor | None, list[Tensor], Iterator[Iterator[Tensor]]]:
    """Return the output of attention if there are values, its column sums, and its probabilities for a scan.

    Probabilities are computed when they are read; see `kvpass.lowering.attention_sums.probabilities`.

    Args:
        means: whether the caller reads only the mean of all heads.  The output is complete when it has read all means.
    """
    if value is None:
        return None, attention_sums.column_sums(attention, valid, powers), attention_sums.probabilities(attention)
    if means and not powers and attention_sums.attends_in_tiles(attention, summed=True):
        output, probs = attention_sums.attend_with_means(attention, value)
        return output, [], probs
    output, log_sum_exp, sums = attention_sums.attend(attention, value, valid, powers)
    return output, sums, attention_sums.probabilities(attention, log_sum_exp)


def _statistics(
    attention: AttentionInputs, arguments: StatisticsArguments, valid: Tensor, sums: list[Tensor]
) -> dict[str, Tensor]:
    """Return the statistics that the arguments name, except a scan; `sums` has their `SUMS`, each [B, Hkv, G, S]."""
    results = dict(zip(SUMS, sums, strict=False))  # fewer without the squares
    if not {*LAST_QUERY_STATISTICS}.isdisjoint(arguments.names):
        results |= zip(LAST_QUERY_STATISTICS, late_statistics(attention, valid, arguments.window), strict=True)
    if "older" in arguments.names:
        results["older"] = votes_for_older(attention, valid, arguments.window)
    results = {name: regrouped(x, arguments.heads) for name, x in results.items()}
    if "older_peak" in arguments.names:
        results["older_peak"] = votes_for_older(attention, valid, arguments.window, arguments.heads)
    return results


def _highest_probs(attention: AttentionInputs, arguments: StatisticsArguments, policy: Policy, valid: Tensor) -> Tensor:
    """Return the highest smoothed probability of each key among the last queries, float32 [B, H', S]."""
    cached_columns = attention.key.shape[2] - attention.query.shape[2]

    def smoothed(probs: Tensor, real: Tensor) -> Tensor:
        return policy.smoothed(probs, real, cached_columns)

    peaks = highest_probs(attention, valid, policy.observation_window, smoothed)
    return regrouped(peaks, arguments.heads).amax(2)


def _scanned(
    attention: AttentionInputs,
    arguments: StatisticsArguments,
    policy: Policy,
    valid: Tensor,
    row_budgets: Tensor | None,
    probs: Iterator[Iterator[Tensor]],
) -> Tensor:
    """Return the policy's scan over the probabilities of all queries, in order, float32 [B, H', S]."""
    cached_columns = attention.key.shape[2] - attention.query.shape[2]
    sharding = HeadSharding.from_text(arguments.sharding)
    slots = slots_of_rows(policy, arguments.budget, valid) if row_budgets is None else row_budgets[:, 0, 0].tolist()
    results = []
    for row, blocks in enumerate(probs):
        by_head = (block if policy.scans_means else regrouped(block, arguments.heads) for block in blocks)
        in_float32 = (block.float() for block in by_head)
        results.append(policy.scan(in_float32, valid[row : row + 1], cached_columns, slots[row], sharding))
        collections.deque(in_float32, maxlen=0)  # blocks that are not read are not computed, the output included
    return torch.cat(results)


def statistics_of(policy: Policy) -> tuple[Statistic, ...]:
    """Return the statistics that a policy reads, in the order of the operator's results."""
    return tuple(sorted(policy.statistics))


def fuses_attention(policy: Policy, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether the operator should also compute attention of these tensors, which may be fake.

    Statistics of all queries use the log-sum-exp of attention.  For other policies the operator computes attention only
    if it is faster than the library for this number of queries.

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv].
        mask: the mask of attention, or None.
    """
    alike = query.dtype == key.dtype == value.dtype and key.shape[3] == value.shape[3]
    if not alike or query.device.type != "cpu":
        return False
    reads_all_queries = not policy.statistics.isdisjoint({*SUMS, "scan"})
    return reads_all_queries or attention_tiles.is_faster(query, mask, summed=False)


@dataclasses.dataclass(frozen=True)
class StatisticsOperands(AttentionInputs):
    """The attention of a prompt or chunk whose statistics a policy reads.

    Keys are the attended keys, [B, Ha, N, D].

    Attributes:
        heads: see `StatisticsArguments`.
        sharding: see `kvpass.policies.types.Attention`.
    """

    heads: int = dataclasses.field(kw_only=True)
    sharding: HeadSharding | None = dataclasses.field(kw_only=True)

    def first_tokens(self, count: int) -> StatisticsOperands:
        """Return the operands of the first `count` queries, without the keys after them."""
        total = self.key.shape[2] - self.query.shape[2] + count
        mask = None if self.mask is None else self.mask[..., :count, :total]
        sink_logit = None if self.sink_logit is None else self.sink_logit[:, :, :count]
        return dataclasses.replace(
            self, query=self.query[:, :, :count], key=self.key[:, :, :total], mask=mask, sink_logit=sink_logit
        )

    def attention(self, policy: Policy, valid: Tensor, budget: Budget | Tensor) -> Attention:
        """Compute the statistics of the queries' attention; for the arguments see `statistics`."""
        if not policy.statistics:
            return Attention()
        results = statistics(policy, self, valid, budget)
        return as_attention(policy, results, valid, self.sharding)


def statistics(
    policy: Policy, operands: StatisticsOperands, valid: Tensor, budget: Budget | Tensor, value: Tensor | None = None
) -> list[Tensor]:
    """Compute the tensors that the policy reads.

    Args:
        valid: bool [B, q], false for padding.
        budget: the user's budget, or the slots of each row, int64 [B, H', 1].
        value: [B, Ha, N, Dv] to compute attention too, where `fuses_attention` allows it.

    Returns:
        The output [B, Hq, q, Dv] of attention if there are values, then the statistics of `statistics_of`.
    """
    by_row = budget if isinstance(budget, Tensor) and "scan" in policy.statistics else None
    arguments = StatisticsArguments(
        statistics_of(policy), operands.causal, operands.scale, operands.cap, operands.heads
    )
    arguments = arguments.for_policy(policy, None if isinstance(budget, Tensor) else budget, operands.sharding)
    results: list[Tensor] = attention_statistics(
        operands.query, operands.key, value, operands.mask, operands.sink_logit, valid, by_row, arguments.to_text()
    )
    return results


def as_attention(
    policy: Policy, tensors: list[Tensor], valid: Tensor, sharding: HeadSharding | None = None
) -> Attention:
    """Name the tensors that `statistics` returned; valid is bool [B, q]."""
    named = dict(zip(statistics_of(policy), tensors, strict=True))
    return Attention(**named, queries=valid.sum(-1)[:, None, None], sharding=sharding)
