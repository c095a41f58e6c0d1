"""Add the statistics of a prompt's attention that a policy reads to the prompt's graph.

    attended = kvpass::attention(query, key, value, mask, ...)

is followed by `kvpass::column_scores` or `kvpass::row_scan` of the same query, key and mask; or becomes

    attended, *scores = kvpass::scored_attention(query, key, value, mask, valid, ...)

(`kvpass::scanned_attention` for a scan), which computes both.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from kvpass.budget import Budget
from kvpass.cache import statistics
from kvpass.capture.sites import AttentionSite, arguments
from kvpass.fx.shapes import expr
from kvpass.fx.walk import value
from kvpass.policies import specify
from kvpass.policies.base import Policy, Statistic

OPERATORS = {
    ("sums", False): torch.ops.kvpass.column_scores.default,
    ("sums", True): torch.ops.kvpass.scored_attention.default,
    ("scan", False): torch.ops.kvpass.row_scan.default,
    ("scan", True): torch.ops.kvpass.scanned_attention.default,
}
"""The operators of a kind of statistics, alone or together with attention."""
EXACT = (torch.float32, torch.float64)


def prompt_scores(
    graph: fx.Graph,
    site: AttentionSite,
    moved: dict[fx.Node, fx.Node],
    valid: fx.Node | None,
    policy: Policy,
    budget: Budget,
) -> dict[Statistic, fx.Node]:
    """Nodes of what the policy asks for, as `kvpass.cache.statistics.statistics` would make it.

    Policies that need the same sums over all queries have the same prompt graph, which is compiled once and
    found in the compiler's caches by the others.

    Args:
        moved: from the nodes of the site to those of `graph`; its call's is replaced with the call.
        valid: bool [B or 1, q], or None when no token is padding.
    """
    if not policy.statistics:
        return {}
    query = moved[site.query]
    rows = graph.call_function(operator.getitem, (query, (slice(None), 0, slice(None), 0)))
    everyone = graph.call_function(torch.ones_like, (rows,), {"dtype": torch.bool})  # [B, q]
    present = everyone if valid is None else graph.call_function(torch.logical_and, (valid, everyone))
    fused = _in_one_operator(site, policy)
    attended = (arguments(site.call)["value"],) if fused else ()
    first, last = _common(site, moved, attended, present)
    made: dict[Statistic, fx.Node] = {}
    if not policy.statistics.isdisjoint(statistics.SUMS):
        asked = (*first, policy.observation, statistics.powers(policy), *(last[-1:] if fused else last))
        results = graph.call_function(OPERATORS["sums", fused], asked)
        made |= {name: _item(graph, results, index) for index, name in enumerate(statistics.SUMS, int(fused))}
    if "scan" in policy.statistics:
        written, where = (specify(policy), *statistics.room(budget)), site.spread.written() if site.spread else None
        results = graph.call_function(OPERATORS["scan", fused], (*first, *written, *last, where))
        made["scan"] = _item(graph, results, 1) if fused else results
    if fused:
        _replace(site, moved, _item(graph, results, 0))
    return made


def _common(
    site: AttentionSite, moved: dict[fx.Node, fx.Node], attended: tuple[fx.Node, ...], present: fx.Node
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of the operators before and behind those that each asks on its own; `attended`: their values."""
    mask, sink_logit = (None if node is None else moved[node] for node in (site.mask, site.sink_logit))
    heads = 1 if site.computed else int(value(site.grown_key).shape[1])
    tensors = (moved[site.query], moved[site.attended_key], *(moved[node] for node in attended))
    return (*tensors, mask, present, site.causal, site.scale), (site.cap, sink_logit, heads)


def _in_one_operator(site: AttentionSite, policy: Policy) -> bool:
    """Check whether one operator can compute attention and scores of a prompt.

    Attention that the model spells out keeps its own roundings. A scan in half precision keeps the library's attention,
    which does not round the logits. Causal attention must be causal from the first key on.
    """
    call = arguments(site.call)
    tensors = [value(node) for node in (site.query, call["key"], call["value"])]
    by_library = call["scores"] is None and call["hidden"] is None and site.lse is None
    whole = not site.causal or expr(site.queries) == expr(value(site.attended_key).shape[2])
    plain_mask = site.mask is None or (value(site.mask).ndim == 4 and not site.causal)
    exact = "scan" not in policy.statistics or tensors[0].dtype in EXACT
    fits = by_library and whole and plain_mask and exact and not policy.renumbers
    query, key, values = tensors
    return (
        fits and query.dtype == value(site.call).dtype and statistics.in_one_operator(policy, query, key, values, True)
    )


def _item(graph: fx.Graph, results: fx.Node, index: int) -> fx.Node:
    return graph.call_function(operator.getitem, (results, index))


def _replace(site: AttentionSite, moved: dict[fx.Node, fx.Node], output: fx.Node) -> None:
    """Have `output` stand for the call."""
    call = moved[site.call]
    output.meta = dict(call.meta)
    call.replace_all_uses_with(output)
    call.graph.erase_node(call)
    moved[site.call] = output
