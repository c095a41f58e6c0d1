"""Add the statistics of a prompt's attention that a policy reads to the prompt's graph.

    attended = kvpass::attention(query, key, value, mask, ...)

is followed by

    *statistics = kvpass::attention_statistics(query, key, None, mask, ...)

or replaced with the same operator and its values, which then computes the output as well.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from kvpass.budget import Budget
from kvpass.cache import statistics
from kvpass.capture.sites import AttentionSite
from kvpass.fx import op_table
from kvpass.fx.shapes import expr
from kvpass.fx.walk import value
from kvpass.policies.base import Policy
from kvpass.policies.types import Statistic

STATISTICS = torch.ops.kvpass.attention_statistics.default


def prompt_scores(
    graph: fx.Graph,
    site: AttentionSite,
    moved: dict[fx.Node, fx.Node],
    valid: fx.Node | None,
    policy: Policy,
    budget: Budget,
) -> dict[Statistic, fx.Node]:
    """Add the operator of the policy's statistics and return the node of each.

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
    mask, sink_logit = (None if node is None else moved[node] for node in (site.mask, site.sink_logit))
    heads = 1 if site.computed else int(value(site.grown_key).shape[1])
    values = moved[op_table.bound(site.call)["value"]] if fused else None
    tensors = query, moved[site.attended_key], values, mask, sink_logit
    request = statistics.requested(policy, site.causal, site.scale, site.cap, heads, budget, site.spread)
    results = graph.call_function(STATISTICS, (*tensors, present, None, request))
    if fused:
        _replace(site, moved, _item(graph, results, 0))
    return {name: _item(graph, results, i) for i, name in enumerate(statistics.names(policy), int(fused))}


def _in_one_operator(site: AttentionSite, policy: Policy) -> bool:
    """Check whether one operator can compute attention and scores of a prompt.

    Attention that the model spells out keeps its own roundings. Causal attention must be causal from the first key on.
    """
    call = op_table.bound(site.call)
    tensors = [value(node) for node in (site.query, call["key"], call["value"])]
    by_library = call["scores"] is None and call["hidden"] is None and site.lse is None
    whole = not site.causal or expr(site.queries) == expr(value(site.attended_key).shape[2])
    plain_mask = site.mask is None or (value(site.mask).ndim == 4 and not site.causal)
    fits = by_library and whole and plain_mask and not policy.renumbers
    query, key, values = tensors
    return fits and query.dtype == value(site.call).dtype and statistics.in_one_operator(policy, query, key, values)


def _item(graph: fx.Graph, results: fx.Node, index: int) -> fx.Node:
    return graph.call_function(operator.getitem, (results, index))


def _replace(site: AttentionSite, moved: dict[fx.Node, fx.Node], output: fx.Node) -> None:
    """Have `output` stand for the call."""
    call = moved[site.call]
    output.meta = dict(call.meta)
    call.replace_all_uses_with(output)
    call.graph.erase_node(call)
    moved[site.call] = output
