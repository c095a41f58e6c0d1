"""Rewrite a prompt graph: it keeps its computation and gets outputs for the policy."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.step import with_logit_scale
from kvpass.capture.canonical import AttentionSite, attention_calls
from kvpass.capture.rotary import find_rotary
from kvpass.fx import op_table, shapes, walk
from kvpass.fx.shapes import expr
from kvpass.fx.splicing import emit
from kvpass.fx.walk import example_value
from kvpass.lowering import attention_statistics
from kvpass.lowering.attention_statistics import StatisticsArguments
from kvpass.policies.base import Policy
from kvpass.policies.budgets import share_of, window_starts
from kvpass.policies.types import Statistic
from kvpass.rewrite import renumber
from kvpass.torch_private import fx_nodes
from kvpass.user_budget import Budget


@dataclasses.dataclass(frozen=True)
class LayerOutputs:
    """The indices of the outputs that a prompt graph returns for one layer.

    Attributes:
        key, value: its keys as stored, rotated or not, and its values.
        valid_output: bool [B, q], or None if no token is padding.
        statistics: the results of `kvpass.lowering.attention_statistics`; empty if none are needed.
        operands: its query, its attended keys, its mask and its sink (None without one), which a cache that can be
            cropped needs; None if they are not needed.
    """

    key: int
    value: int
    valid_output: int | None
    statistics: list[int]
    operands: tuple[int, int, int | None, int | None] | None


@dataclasses.dataclass(frozen=True)
class PromptRewrite:
    """A prompt graph with added outputs.

    Attributes:
        rewritten_gm: the rewritten graph.
        outputs: the added outputs of each layer.
        calls: for each attention call and each log-sum-exp, by its name, the node of its result.
    """

    rewritten_gm: fx.GraphModule
    outputs: list[LayerOutputs]
    calls: dict[str, fx.Node]


@dataclasses.dataclass(frozen=True, eq=False)
class PromptRewriteInput:
    """A canonical prompt graph with the call that it is rewritten for.

    Attributes:
        canonical_gm: the graph, which is not modified.
        sites, policies: the attention calls on caches, and the policy of each.
        budget: the user's budget.
        stores_unrotated_keys: whether keys are stored before their rotary embedding.
        with_operands: whether `LayerOutputs.operands` are needed.
        examples: Dynamo's arguments.
        padding_by_site: for each site, the inputs that mark padding, see `kvpass.capture.padding_analysis`.
    """

    canonical_gm: fx.GraphModule
    sites: list[AttentionSite]
    policies: list[Policy]
    budget: Budget
    stores_unrotated_keys: bool
    with_operands: bool
    examples: Sequence[Any]
    padding_by_site: list[tuple[fx.Node, ...]]


def rewrite_prompt(given: PromptRewriteInput) -> PromptRewrite:
    """Add the outputs that the policies need to a prompt graph; its own computation stays unchanged.

    A policy that renumbers also changes the computation, for prompts beyond its budget.
    """
    sites, policies = given.sites, given.policies
    rewritten_gm, copy_of = fx_nodes.copy_graph_module(given.canonical_gm)
    model_outputs = len(walk.results(rewritten_gm.graph))
    added: list[fx.Node] = []  # the model's own outputs are read at the end: they may include replaced attention
    outputs: list[LayerOutputs] = []
    valid_outputs: dict[tuple[fx.Node, ...], int] = {}

    def add_output(node: fx.Node) -> int:
        added.append(node)
        return model_outputs + len(added) - 1

    for site, policy, nodes in zip(sites, policies, given.padding_by_site, strict=True):
        padding_inputs = tuple(copy_of[node] for node in nodes)
        with rewritten_gm.graph.inserting_before(copy_of[site.call]):
            all_valid = _valid_tokens(rewritten_gm.graph, copy_of[site.grown_key], padding_inputs)
            if all_valid is not None and padding_inputs not in valid_outputs:
                valid_outputs[padding_inputs] = add_output(all_valid)
            valid = _valid_of_new(rewritten_gm.graph, site, copy_of, all_valid)
            if policy.scales_logits:
                for each in site.attention_calls:
                    _scale_queries(rewritten_gm.graph, each, copy_of, policy, valid)
        # Not at the end, where queries would outlive their layer.
        with rewritten_gm.graph.inserting_before(copy_of[site.call].next):
            rotary = find_rotary(site) if given.stores_unrotated_keys else None
            keys, values = site.keys_out, site.values_out
            if site.window is not None:
                keys, values = add_output(copy_of[site.grown_key]), add_output(copy_of[site.grown_value])
            stored_key = add_output(copy_of[rotary.raw]) if rotary else keys
            scores = insert_statistics(rewritten_gm.graph, site, copy_of, valid, policy, given.budget)
            statistics_outputs = {name: add_output(node) for name, node in scores.items()}
            operands = _operands(site, keys, lambda node: add_output(copy_of[node])) if given.with_operands else None
        valid_output = None if all_valid is None else valid_outputs[padding_inputs]
        in_order = [statistics_outputs[name] for name in attention_statistics.statistics_of(policy)]
        outputs.append(LayerOutputs(stored_key, values, valid_output, in_order, operands))
    if policies[0].renumbers and shapes.expr(sites[0].query_len) != 1:
        _renumber(given, rewritten_gm.graph, copy_of)
    rewritten_gm.graph.output_node().args = ((*walk.results(rewritten_gm.graph), *added),)
    rewritten_gm.recompile()
    results = [node for each in attention_calls(sites) for node in each.results]
    return PromptRewrite(rewritten_gm, outputs, {node.name: copy_of[node] for node in results})


def _operands(
    site: AttentionSite, keys: int, add_output: Callable[[fx.Node], int]
) -> tuple[int, int, int | None, int | None]:
    """Emit `LayerOutputs.operands`; `keys` is the output index of the stored keys."""
    mask, sink = (None if node is None else add_output(node) for node in (site.mask, site.sink_logit))
    attended = add_output(site.attended[0]) if site.computed else keys
    return add_output(site.query), attended, mask, sink


def _renumber(given: PromptRewriteInput, graph: fx.Graph, copy_of: dict[fx.Node, fx.Node]) -> None:
    """Make position ids and masks of the copy count tokens in windows; only the last window is cached."""
    policy, budget = given.policies[0], given.budget
    padding_inputs = [copy_of[node] for node in given.padding_by_site[0]]
    assert budget is not None  # policies that renumber evict

    def valid_and_window(valid: Tensor | None, count: int, device: torch.device) -> tuple[Tensor, int | Tensor]:
        tokens = count if valid is None else valid.sum(-1, keepdim=True)
        window = policy.fitting_budget(share_of(tokens, budget)) if isinstance(budget, float) else budget
        return torch.ones(1, count, dtype=torch.bool, device=device) if valid is None else valid, window

    def ids_of(ids: Tensor, along: int, valid: Tensor | None) -> Tensor:
        starts = window_starts(*valid_and_window(valid, ids.shape[along], ids.device))
        return renumber.subtract_by_row(ids, along, starts)

    def mask_of(mask: Tensor | None, query: Tensor, valid: Tensor | None, causal: bool) -> Tensor:
        return renumber.window_mask(mask, causal, *valid_and_window(valid, query.shape[2], query.device))

    argument_of = dict(zip(walk.placeholders(given.canonical_gm.graph), given.examples, strict=True))
    for reader in renumber.find_readers(given.canonical_gm, given.sites, argument_of, renumber.fits_prompt):
        node, ids = copy_of[reader.node], copy_of[reader.ids]
        with graph.inserting_before(node):
            valid = _valid_tokens(graph, copy_of[reader.ids], padding_inputs, reader.along)
            new_ids = emit(graph, ids_of, ids, reader.along, valid, value=example_value(reader.ids))
        node.replace_input_with(ids, new_ids)
    for site in attention_calls(given.sites):
        node = copy_of[site.call]
        with graph.inserting_before(node):
            mask = None if site.mask is None else copy_of[site.mask]
            valid = _valid_tokens(graph, copy_of[site.grown_key], padding_inputs)
            window_mask = graph.call_function(mask_of, (mask, copy_of[site.query], valid, site.causal))
        node.kwargs = {**op_table.named_arguments(node), "mask": window_mask, "causal": False}
        node.args = ()


def _valid_tokens(
    graph: fx.Graph, tokens: fx.Node, padding_inputs: Sequence[fx.Node], along: int = 2
) -> fx.Node | None:
    """Return bool [B or 1, past + q], false for marked padding; None if no input marks padding."""
    total, valid = example_value(tokens).shape[along], None
    for node in padding_inputs:
        shape = example_value(node).shape
        if shapes.expr(shape[-1]) != shapes.expr(total):  # the input may have entries for later tokens
            subscript: Any = (Ellipsis, slice(None, emit(graph, "size", tokens, along, value=total)))
            node = graph.call_function(operator.getitem, (node, subscript))
        is_real = graph.call_function(operator.ne, (node, 0))
        is_real = is_real if len(shape) == 2 else graph.call_method("unsqueeze", (is_real, 0))
        valid = is_real if valid is None else graph.call_function(operator.and_, (valid, is_real))
    return valid


def _valid_of_new(
    graph: fx.Graph, site: AttentionSite, copy_of: dict[fx.Node, fx.Node], valid: fx.Node | None
) -> fx.Node | None:
    """Return the entries of the new tokens: all of them, unless the prompt continues an ordinary cache."""
    if valid is None or site.past_key is None:
        return valid
    past = emit(graph, "size", copy_of[site.past_key], 2, value=example_value(site.past_key).shape[2])
    return graph.call_function(operator.getitem, (valid, (slice(None), slice(past, None))))


def _scale_queries(
    graph: fx.Graph, site: AttentionSite, copy_of: dict[fx.Node, fx.Node], policy: Policy, valid: fx.Node | None
) -> None:
    """Scale the prompt's queries by the policy's factor for the number of tokens in each row."""
    query, call = copy_of[site.query], copy_of[site.call]

    def function(query: Tensor, valid: Tensor | None) -> Tensor:
        all_tokens = torch.ones_like(query[:, 0, :, 0], dtype=torch.bool)  # [B, q]
        real = all_tokens if valid is None else all_tokens & valid
        return with_logit_scale(policy, query, real.sum(-1, keepdim=True))

    with graph.inserting_before(call):
        scaled = graph.call_function(function, (query, valid))
    call.replace_input_with(query, scaled)
    copy_of[site.query] = scaled


def insert_statistics(
    graph: fx.Graph,
    site: AttentionSite,
    copy_of: dict[fx.Node, fx.Node],
    valid: fx.Node | None,
    policy: Policy,
    budget: Budget,
) -> dict[Statistic, fx.Node]:
    """Add the operator of the policy's statistics and return the node of each.

    The operator replaces the attention call where it also computes attention.

    Args:
        copy_of: from the nodes of the site to those of `graph`, in which the attention call may be replaced.
        valid: bool [B or 1, q], or None when no token is padding.
    """
    fused = _fuses_attention(site, policy)
    if not fused and not policy.statistics:
        return {}
    query = copy_of[site.query]
    rows = graph.call_function(operator.getitem, (query, (slice(None), 0, slice(None), 0)))
    everyone = graph.call_function(torch.ones_like, (rows,), {"dtype": torch.bool})  # [B, q]
    present = everyone if valid is None else graph.call_function(torch.logical_and, (valid, everyone))
    mask, sink_logit = (None if node is None else copy_of[node] for node in (site.mask, site.sink_logit))
    heads = 1 if site.computed else int(example_value(site.grown_key).shape[1])
    values = copy_of[op_table.named_arguments(site.call)["value"]] if fused else None
    tensors = query, copy_of[site.attended[0]], values, mask, sink_logit
    names = attention_statistics.statistics_of(policy)
    arguments = StatisticsArguments(names, site.causal, site.scale, site.cap, heads)
    arguments = arguments.for_policy(policy, budget, site.sharding)
    target = torch.ops.kvpass.attention_statistics.default
    results = graph.call_function(target, (*tensors, present, None, arguments.to_text()))
    if fused:
        call, output = copy_of[site.call], _item(graph, results, 0)
        output.meta = dict(call.meta)
        call.replace_all_uses_with(output)
        graph.erase_node(call)
        copy_of[site.call] = output
    return {name: _item(graph, results, i) for i, name in enumerate(names, int(fused))}


def _fuses_attention(site: AttentionSite, policy: Policy) -> bool:
    """Return whether the operator of statistics also computes the attention of a prompt.

    Decomposed attention is never fused, to keep its rounding.  Causal attention is fused only if the queries are as
    many as the keys.
    """
    call = op_table.named_arguments(site.call)
    query, key, values = (example_value(node) for node in (site.query, call["key"], call["value"]))
    by_library = call["product_dtype"] is None and call["hidden_logit"] is None and site.lse is None
    whole = not site.causal or expr(site.query_len) == expr(example_value(site.attended[0]).shape[2])
    plain_mask = site.mask is None or (example_value(site.mask).ndim == 4 and not site.causal)
    fits = (
        by_library and whole and plain_mask and not policy.renumbers and query.dtype == example_value(site.call).dtype
    )
    mask = None if site.mask is None else example_value(site.mask)
    return fits and attention_statistics.fuses_attention(policy, query, key, values, mask)


def _item(graph: fx.Graph, results: fx.Node, index: int) -> fx.Node:
    return graph.call_function(operator.getitem, (results, index))
