"""Validate a step: compare Dynamo's graph, its canonical form, and the graph on slots.

They run in lockstep (`kvpass.rewrite.validation.lockstep`) on the same synthetic conversations:

    Dynamo's     its attention is the canonical call in exact arithmetic; its caches are the past and the new tokens
    canonical    gives the arguments of that call: query, keys, values, mask, scale
    rewritten    its queries, keys and values are the canonical ones, its mask on a slot is its token's; its
                 attention is the same call on the cached vectors, as stored

A policy that changes logits (sage, buzz with `Buzz.log_n`) is compared without that change.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.canonical import AttentionSite, attention_calls
from kvpass.fx import op_table, shapes, walk
from kvpass.fx.walk import example_value
from kvpass.lowering.formats import EncodedVectors
from kvpass.rewrite.computed_keys import join_heads, split_heads
from kvpass.rewrite.validation.conversation import Conversation, ConversationPlan, StepCase
from kvpass.rewrite.validation.coverage import last_new_kind, length_constants, smallest_table
from kvpass.rewrite.validation.interpreter import GraphRun, Visit
from kvpass.rewrite.validation.lockstep import Lockstep, Validation, on_few_threads, run_validation
from kvpass.rewrite.validation.slots import SyntheticSlots
from kvpass.torch_private import symbolic_shapes

MAX_FIRST = 61
"""The most tokens of the first conversation, which runs through all layers."""
MIN_TOKENS = 7
"""The fewest tokens of a conversation after a shorter call: with one token no order shows."""
MAX_LENGTHS = 6
"""The most lengths of later conversations."""
MAX_BLOCKS = 2
"""The most constants at which conversations begin a new block."""


def validate(case: StepCase) -> Validation:
    """Run the graphs and compare them.

    Raises:
        UnsupportedGraph: they differ; the message names the first attention call that does.
    """
    last_call = functools.cache(lambda: last_new_kind(case.given.canonical_gm.graph, case.given.sites))
    may_see_none = False

    def compare(plan: ConversationPlan, one_of_each: bool) -> None:
        nonlocal may_see_none
        may_see_no_key = _compare(case, Conversation(case, plan), last_call() if one_of_each else None)
        may_see_none |= may_see_no_key and one_of_each

    def further_plans(first: ConversationPlan) -> Iterator[ConversationPlan]:
        yield from _further_plans(case, first)
        if may_see_none:
            yield from _plans_without_keys(case, first)

    none_fits = "the graph does not serve a length that fits into the slots"
    with on_few_threads(case.dynamo_gm.graph):
        return run_validation(_first_plans(case), further_plans, compare, "conversations", none_fits)


def _first_plans(case: StepCase) -> Iterator[ConversationPlan]:
    """Yield conversations that fit into the slots, then one that does not, each with padding and then without.

    Conversations without padding are for models that do not run on padding.
    """
    windows = [window for window in case.context.windows if window is not None]
    if windows:
        counts = [min(case.given.length, max(windows) + MIN_TOKENS), case.given.length]
    else:
        counts = [
            min(max(case.given.length, MIN_TOKENS), _capacity(case), MAX_FIRST),
            min(case.given.length, _capacity(case), MAX_FIRST),
            case.given.length,
        ]
    counts = [count for count in dict.fromkeys(counts) if count >= 1 and _fits(case, count)]
    for pads_left in (True, False) if case.context.padding_inputs.ones_for_cached else (True,):
        yield from (ConversationPlan(count, pads_left=pads_left) for count in counts)


def _further_plans(case: StepCase, first: ConversationPlan) -> Iterator[ConversationPlan]:
    """Yield conversations around the constants of a graph, with evicted tokens, inner padding, and other ids."""
    query_len, constants = case.query_len, length_constants(case.dynamo_gm.graph)
    lengths = [number + 2 for number in constants]
    lengths += [number - query_len for number in constants[:1]]
    lengths = [count for count in dict.fromkeys(lengths) if 1 < count != first.count and _fits(case, count)]
    lengths = [count for count in lengths if count + query_len <= _most_tokens(case)]
    for count in sorted(lengths, reverse=True)[:MAX_LENGTHS]:
        yield ConversationPlan(count, _tokens_of_interest(constants, count, query_len), has_gap=True)
    short = min(first.count, _capacity(case))
    if _fits(case, short) and short > 1:
        yield ConversationPlan(short, has_gap=True)
        if _has_ids(case):
            yield ConversationPlan(short, ids="changing")
            yield ConversationPlan(short, ids="new")


def _plans_without_keys(case: StepCase, first: ConversationPlan) -> Iterator[ConversationPlan]:
    """Yield conversations at the beginning of a block, where a query may see no cached key."""
    for number in length_constants(case.dynamo_gm.graph)[:MAX_BLOCKS]:
        for count, dropped in ((number, 0), (number + 2, 2)):
            if count + case.query_len <= _most_tokens(case) and _fits(case, count) and not (case.renumbers and dropped):
                yield ConversationPlan(count, pads_left=False, dropped=dropped)
    short = min(first.count, _capacity(case))
    for count in (short - 1, short):  # one of these begins a block of two
        if count > 1 and _fits(case, count):
            yield ConversationPlan(count, pads_left=False)
    if short > 1 and _fits(case, short) and _has_ids(case):
        yield ConversationPlan(short, ids="new", pads_left=False)
        if not case.renumbers:
            yield ConversationPlan(short, ids="changing", pads_left=False, dropped=short - short // 2)


def _most_tokens(case: StepCase) -> float:
    """Return the most tokens with lookups in range: any on a CPU, which raises an error otherwise."""
    is_on_cpu = case.context.device.type == "cpu"
    return math.inf if is_on_cpu else max(case.given.length, smallest_table(case.dynamo_gm.graph))


def _tokens_of_interest(constants: list[int], count: int, query_len: int) -> tuple[int, ...]:
    """Return the tokens that constants refer to, counted from the first or from the new tokens."""
    tokens = [token for number in constants for token in (number, count - number, count + query_len - 1 - number)]
    return tuple(token for token in tokens if 0 <= token < count)


def _has_ids(case: StepCase) -> bool:
    others = {*case.padding_indices.values(), *itertools.chain(*case.pasts)}
    inputs = [node for i, node in enumerate(walk.placeholders(case.dynamo_gm.graph)) if i not in others]
    ids = [node for node in inputs if walk.is_tensor(node) and not example_value(node).is_floating_point()]
    return any(case.given.sizes.growing_dims(example_value(node)) for node in ids)


def _capacity(case: StepCase) -> int:
    """Return the number of tokens that fit into the slots of each layer whose whole past is cached."""
    by_layer = zip(case.given.slots, case.context.windows, strict=True)
    sizes = (each.capacity for slots, window in by_layer if window is None for each in slots.by_class)
    return min(sizes, default=case.given.length + 1) - case.context.decodes


def _fits(case: StepCase, count: int) -> bool:
    """Return whether a synthetic conversation can have `count` tokens.

    If cached tokens are renumbered, all must be cached.  If layers store their last tokens only, there must be enough
    to fill their windows.  A sparse index must select all keys, as it does on the slots.
    """
    if case.renumbers and count > _capacity(case):
        return False
    if count < max((window for window in case.context.windows if window is not None), default=1):
        return False
    if count + case.query_len > case.most_keys:
        return False
    return count == case.given.length or _serves(case, count)


def _serves(case: StepCase, count: int) -> bool:
    """Return whether Dynamo's guards allow `count` tokens in every past that is wholly cached."""
    sites = [site for site, window in zip(case.given.sites, case.context.windows, strict=True) if window is None]
    lengths = [example_value(past).shape[2] for site in sites for past in site.pasts]
    symbols = {symbol for length in lengths for symbol in shapes.expr(length).free_symbols}
    lengths_by_symbol = {symbol: sympy.Integer(count) for symbol in symbols if len(symbols) == 1}
    violated = any(guard.xreplace(lengths_by_symbol) == sympy.false for guard in shapes.guards(case.dynamo_gm.graph))
    in_range = all(symbolic_shapes.may_equal(length, count) for length in lengths)
    return not violated and in_range and _inputs_serve(case, count)


def _inputs_serve(case: StepCase, count: int) -> bool:
    """Return whether the inputs other than pasts may have their sizes for `count` tokens.

    An input that marks padding has an entry for each token.  If its size is a number, the graph serves one length.
    """
    placeholders, pasts = walk.placeholders(case.dynamo_gm.graph), {*itertools.chain(*case.pasts)}
    if not all(
        case.given.sizes.grows(example_value(placeholders[index]).shape[-1]) for index in case.padding_indices.values()
    ):
        return False
    for index, (node, argument) in enumerate(zip(placeholders, case.given.arguments, strict=True)):
        sizes = [] if index in pasts else shapes.sizes_with_values(node, argument)
        growing = [pair for pair in sizes if case.given.sizes.grows(pair[0])]
        if not all(symbolic_shapes.may_equal(size, current - case.given.length + count) for size, current in growing):
            return False
    return True


def _compare(case: StepCase, conversation: Conversation, last_call: fx.Node | None) -> bool:
    """Compare the three graphs on one conversation, up to a canonical call; return whether a query may see no key."""
    lockstep = Lockstep(
        case.dynamo_gm,
        case.given.canonical_gm,
        case.given.sites,
        conversation.argument,
        case.query_len,
        conversation.plan.label,
        last_call,
    )
    expected = lockstep.run_model()
    lockstep.run_canonical(conversation.key_indices)
    stored_as_codes = case.given.layouts[0].kv_dtype is not None
    if stored_as_codes and case.context.decodes:  # attention reads the new key and value as stored
        lockstep.run_canonical(conversation.key_indices, _rounding(case))
    actual, signature = _run_rewritten(case, conversation, lockstep), conversation.signature
    dynamo_outputs = signature.dynamo_outputs
    outputs = [None if index is None else actual[index] for index in dynamo_outputs.indices]
    if last_call is None:
        for index, beyond in dynamo_outputs.lengths.items():
            outputs[index] = conversation.count + beyond
        host_values = signature.run_host_graph(conversation.arguments_without_past)
        for index, grown in zip(dynamo_outputs.grown, host_values.outputs, strict=True):
            outputs[index] = grown
    lockstep.compare_outputs(outputs, expected, dynamo_outputs.dropped)
    return lockstep.may_see_no_key


def _run_rewritten(case: StepCase, conversation: Conversation, lockstep: Lockstep) -> list[Any]:
    visits: dict[fx.Node, Visit] = {}
    slots = SyntheticSlots(conversation)
    context, rewritten_gm = case.context, case.rewrite.rewritten_gm
    nodes = set(rewritten_gm.graph.nodes)
    rewritten_sites = attention_calls(context.sites)
    padded = (~conversation.valid.all(-1)).to(case.given.layouts[0].device)
    for (layer, site), rewritten in zip(lockstep.calls, rewritten_sites, strict=True):
        call = op_table.named_arguments(site.call)
        if (rewritten.scale, rewritten.cap) != (call["scale"], call["cap"]):
            lockstep.refuse(site, f"logits are scaled by {rewritten.scale} and capped at {rewritten.cap} instead")
        for head_class, (mask, bias) in enumerate(context.attention.masks[site.call.name]):
            if mask in nodes and mask.op != "placeholder":
                last_node = mask if bias is None or bias not in nodes or bias < mask else bias
                visits[last_node] = _at_mask(slots, lockstep, (layer, head_class), site, mask, bias)
        for node in site.results:
            problem = "attention to the slots is not attention to the cache"
            visits[context.attention.replaced[node.name]] = lockstep.at_call(site, node, problem, padded)
        inputs = [(rewritten.query, site.query), (rewritten.key, site.key), (rewritten.value, site.value)]
        if not case.stores_unrotated_keys or bool(conversation.valid.all()):
            visits |= {new: lockstep.at_input(site, old) for new, old in inputs if new in nodes and new not in visits}
    end = None if lockstep.last_call is None else context.attention.replaced[lockstep.last_call.name]
    return lockstep.run("rewritten", GraphRun(rewritten_gm, slots.argument_factory(), visits), end)


def _at_mask(
    slots: SyntheticSlots,
    lockstep: Lockstep,
    heads_at: tuple[int, int],
    site: AttentionSite,
    mask: fx.Node,
    bias: fx.Node | None,
) -> Visit:
    """Return a visit that compares mask and bias with the model's; `heads_at` is a layer and a class of heads."""

    def visit(run: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        run.env[node] = result
        expected, bias_on_slots = lockstep.exact_results[site.call.name], None if bias is None else run.load(bias)
        heads = slots.heads(*heads_at)
        expected = expected if heads is None else expected.of_heads(heads, slots.case.given.layouts[heads_at[0]].heads)
        if not expected.matches_mask(run.load(mask), bias_on_slots, slots.key_index_of_slots(*heads_at)):
            lockstep.refuse(site, "the mask on the slots is not the mask of their tokens")
        return result

    return visit


def _rounding(case: StepCase) -> dict[fx.Node, Visit]:
    """Return visits of the nodes of new keys and values, which round them as the storage format does."""
    nodes = {node.name: node for node in case.given.canonical_gm.graph.nodes}
    raw_keys = [nodes[node.name] for node in case.context.rotations.raw_keys] or [site.key for site in case.given.sites]
    visits: dict[fx.Node, Visit] = {}
    for site, key, layout in zip(case.given.sites, raw_keys, case.given.layouts, strict=True):
        visits[key] = _round_as_stored(layout.key_format, layout.heads, layout.dtype)
        visits[site.value] = _round_as_stored(layout.value_format, layout.heads, layout.dtype)
    return visits


def _round_as_stored(format: Any, heads: int, dtype: torch.dtype) -> Visit:
    """Return a visit that rounds keys or values [B, h, q, D] as the storage format does."""

    def visit(run: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        vectors = result if result.shape[1] == heads else join_heads(result)
        return split_heads(EncodedVectors.of(format, vectors).read_as(dtype), result.shape[1])

    return visit
