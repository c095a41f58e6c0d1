"""The prompt graph: its own computation, and outputs for what the policy needs."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import budget as budgets
from kvpass.budget import Budget
from kvpass.cache import statistics
from kvpass.cache.step import with_logit_scale
from kvpass.capture.rotary import find_rotary
from kvpass.capture.sites import AttentionSite, arguments
from kvpass.fx import shapes, walk
from kvpass.fx.walk import value
from kvpass.policies.base import Policy
from kvpass.rewrite import renumber, scored
from kvpass.torch_private import fx_nodes


@dataclasses.dataclass
class PromptRewrite:
    """A prompt graph with more outputs.

    Attributes:
        gm: the rewritten graph.
        sites: in the order of the graph.
        raw: for each site, the place among the outputs of its keys before their rotary embedding; the
            place of the keys themselves where they are stored as they are.
        values: for each site, the place of its values.
        valid: for each site, the place of bool [B, q], or None when no token is padding.
        statistics: for each site, the places of what `kvpass.cache.statistics` gives; empty when none are needed.
        extras: for each site, the places of its query, its attended keys, its mask and its sink (None if it
            has none), which the eager reference asks for, and a cache that is to be cropped.
        calls: for each attention call, by its name, and each log-sum-exp the node that gives its result.
    """

    gm: fx.GraphModule
    sites: list[AttentionSite]
    raw: list[int]
    values: list[int]
    valid: list[int | None]
    statistics: list[list[int]]
    extras: list[tuple[int, int, int | None, int | None]]
    calls: dict[str, fx.Node] = dataclasses.field(default_factory=dict)


def rewrite_prompt(
    gm: fx.GraphModule,
    sites: list[AttentionSite],
    policies: list[Policy],
    budget: Budget,
    ranked: bool,
    extras: bool,
    examples: Sequence[Any],
    padding_inputs: list[tuple[fx.Node, ...]],
) -> PromptRewrite:
    """Add to a prompt graph the outputs that its policy needs; what it computes itself stays as it is.

    Only a policy that renumbers changes that too, for prompts beyond its budget; and where a policy's scores are made
    of every row of attention, `kvpass.rewrite.scored` has both made of the same products.

    Args:
        padding_inputs: for each site the inputs that tell padding, see `kvpass.capture.padding_analysis`.
    """
    copy, moved = fx_nodes.copy_graph_module(gm)
    output = copy.graph.output_node()
    model_outputs = len(walk.results(copy.graph))
    further: list[fx.Node] = []  # the model's own are read at the end: attention that is replaced may be one of them
    done = PromptRewrite(copy, sites, [], [], [], [], [])
    known: dict[tuple[fx.Node, ...], int] = {}
    told = [tuple(moved[node] for node in nodes) for nodes in padding_inputs]

    def emit(node: fx.Node) -> int:
        further.append(node)
        return model_outputs + len(further) - 1

    for site, policy, here in zip(sites, policies, told, strict=True):
        with copy.graph.inserting_before(moved[site.call]):
            whole = _valid_tokens(copy.graph, moved[site.grown_key], here)
            if whole is not None and here not in known:
                known[here] = emit(whole)
            done.valid.append(None if whole is None else known[here])
            valid = _of_new(copy.graph, site, moved, whole)
            if policy.scales_logits:
                for each in site.all:
                    _temper(copy.graph, each, moved, policy, valid)
        with copy.graph.inserting_before(moved[site.call].next):  # not at the end: queries would outlive their layer
            rotary = find_rotary(gm, site) if ranked else None
            keys, values = site.keys_out, site.values_out
            if site.window is not None:
                keys, values = emit(moved[site.grown_key]), emit(moved[site.grown_value])
            done.raw.append(emit(moved[rotary.raw]) if rotary else keys)
            done.values.append(values)
            found = scored.prompt_scores(copy.graph, site, moved, valid, policy, budget)
            made = {name: emit(node) for name, node in found.items()}
            done.statistics.append([made[name] for name in statistics.names(policy)])
            if extras:
                mask = None if site.mask is None else emit(moved[site.mask])
                sink_logit = None if site.sink_logit is None else emit(moved[site.sink_logit])
                attended = emit(moved[site.attended_key]) if site.computed else keys
                done.extras.append((emit(moved[site.query]), attended, mask, sink_logit))
    if policies[0].renumbers and shapes.expr(sites[0].queries) != 1:
        actual = dict(zip(walk.placeholders(gm.graph), examples, strict=True))
        _renumber(gm, copy.graph, sites, moved, actual, policies[0], budget, told[0])
    output.args = ((*walk.results(copy.graph), *further),)
    ends = [node for site in sites for each in site.all for node in (each.call, each.lse) if node is not None]
    done.calls = {node.name: moved[node] for node in ends}
    copy.recompile()
    return done


def _renumber(
    gm: fx.GraphModule,
    graph: fx.Graph,
    sites: list[AttentionSite],
    moved: dict[fx.Node, fx.Node],
    actual: dict[fx.Node, Any],
    policy: Policy,
    budget: Budget,
    told: tuple[fx.Node, ...],
) -> None:
    """Number and mask the tokens by windows, of which the last is all that is kept."""

    def valid_of(valid: Tensor | None, count: int, device: torch.device) -> Tensor:
        return torch.ones(1, count, dtype=torch.bool, device=device) if valid is None else valid

    def ids_of(ids: Tensor, along: int, valid: Tensor | None) -> Tensor:
        count = ids.shape[along]
        here = valid_of(valid, count, ids.device)
        return renumber.on_windows(ids, along, here, budgets.window_for(policy, budget, count, valid))

    def mask_of(mask: Tensor | None, query: Tensor, valid: Tensor | None, causal: bool) -> Tensor:
        count = query.shape[2]
        room = budgets.window_for(policy, budget, count, valid)
        return renumber.within_windows(mask, causal, valid_of(valid, count, query.device), room)

    for reader in renumber.readers(gm, sites, actual, renumber.fits_prompt):
        node, ids = moved[reader.node], moved[reader.ids]
        with graph.inserting_before(node):
            valid = _valid_tokens(graph, moved[reader.ids], told, reader.along)
            counted = graph.call_function(ids_of, (ids, reader.along, valid))
        counted.meta["example_value"] = value(reader.ids)
        node.replace_input_with(ids, counted)
    for site in (each for owner in sites for each in owner.all):
        call = moved[site.call]
        with graph.inserting_before(call):
            mask = None if site.mask is None else moved[site.mask]
            valid = _valid_tokens(graph, moved[site.grown_key], told)
            windows = graph.call_function(mask_of, (mask, moved[site.query], valid, site.causal))
        call.kwargs = {**arguments(call), "mask": windows, "causal": False}
        call.args = ()


def _valid_tokens(graph: fx.Graph, tokens: fx.Node, told: tuple[fx.Node, ...], along: int = 2) -> fx.Node | None:
    """Which tokens are not padding, those of an adopted past included: bool [B or 1, past + q], None for all.

    Args:
        tokens: has them along a dimension.
        told: the inputs that tell.
    """
    total, made = value(tokens).shape[along], None
    for node in told:
        ndim = value(node).ndim
        if shapes.expr(value(node).shape[-1]) != shapes.expr(total):  # there may be entries for tokens to come
            count = graph.call_method("size", (tokens, along))
            count.meta["example_value"] = total
            subscript: Any = (Ellipsis, slice(None, count))
            node = graph.call_function(operator.getitem, (node, subscript))
        tells = graph.call_function(operator.ne, (node, 0))
        tells = tells if ndim == 2 else graph.call_method("unsqueeze", (tells, 0))
        made = tells if made is None else graph.call_function(operator.and_, (made, tells))
    return made


def _of_new(
    graph: fx.Graph, site: AttentionSite, moved: dict[fx.Node, fx.Node], valid: fx.Node | None
) -> fx.Node | None:
    """Those of the tokens that are queries: all, unless a past was adopted."""
    if valid is None or site.past_key is None:
        return valid
    past = graph.call_method("size", (moved[site.past_key], 2))
    past.meta["example_value"] = value(site.past_key).shape[2]
    return graph.call_function(operator.getitem, (valid, (slice(None), slice(past, None))))


def _temper(
    graph: fx.Graph, site: AttentionSite, moved: dict[fx.Node, fx.Node], policy: Policy, valid: fx.Node | None
) -> None:
    """Multiply the prompt's queries with the policy's factor for as many tokens as each row has."""
    query, call = moved[site.query], moved[site.call]

    def function(query: Tensor, valid: Tensor | None) -> Tensor:
        everyone = torch.ones_like(query[:, 0, :, 0], dtype=torch.bool)  # [B, q]
        present = everyone if valid is None else everyone & valid
        return with_logit_scale(policy, query, present.sum(-1, keepdim=True))

    with graph.inserting_before(call):
        factored = graph.call_function(function, (query, valid))
    call.replace_input_with(query, factored)
    moved[site.query] = factored
