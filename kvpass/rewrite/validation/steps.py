"""Translation validation of a step: Dynamo's graph, its canonical form, and the graph on slots.

They are interpreted in lockstep (`kvpass.rewrite.validation.lockstep`) on the same made-up conversations:

    Dynamo's     its attention is the canonical call in exact arithmetic; its caches are past and new rows
    canonical    gives the arguments of that call: query, keys, values, mask, scale
    rewritten    its queries and new rows are the canonical ones, its mask on a slot is that of the slot's token; its
                 attention is the same call on the held rows, as they are stored

A policy that changes logits (sage, buzz with `log_n`) is held against the model without that change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.sites import AttentionSite, arguments
from kvpass.fx import shapes, walk
from kvpass.fx.walk import value
from kvpass.lowering.formats import Rows
from kvpass.rewrite.validation.constants import of_lengths, smallest_table
from kvpass.rewrite.validation.conversation import Conversation, ConversationPlan, StepCase
from kvpass.rewrite.validation.interpreter import DoesNotRun, GraphRun, Visit
from kvpass.rewrite.validation.kinds import last_new_kind
from kvpass.rewrite.validation.lockstep import (
    Lockstep,
    Validation,
    leaving_out,
    validated,
)
from kvpass.rewrite.validation.slots import MadeUpSlots
from kvpass.torch_private import symbolic_shapes

TOKENS = 61
"""Most tokens of the first conversation, which is run through all layers."""
FEW = 7
"""As many are made up where the call at hand has seen fewer: of one token nothing shows in which order they are."""
LENGTHS = 6
"""Most lengths of further conversations."""
BLOCKS = 2
"""Most constants of which conversations begin a block anew."""


def validate(step: StepCase) -> Validation:
    """Run the graphs and compare.

    Raises:
        UnsupportedGraph: they differ; names the first attention call that does.
    """
    return validated(
        _first_plans(step),
        lambda plan: _compare(step, Conversation(step, plan), None),
        lambda first, left: _try_others(step, first, left),
        "conversations",
        "the graph does not serve a length that fits into the slots",
    )


def _try_others(step: StepCase, first: ConversationPlan, left: list[str]) -> None:
    """Run one layer of each kind on further conversations, as far as the model's own graph runs; note the others."""
    last = last_new_kind(step.canonical.graph, step.sites)
    blind = False
    for plan in _further_plans(step, first):
        with leaving_out(left, plan.said):
            blind = _compare(step, Conversation(step, plan), last) or blind
    if blind:
        for plan in _blind_plans(step, first):
            with leaving_out(left, plan.said):
                _compare(step, Conversation(step, plan), last)


def _first_plans(step: StepCase) -> Iterator[ConversationPlan]:
    """A conversation of which the slots hold every token, as far as there is one, else one of which they do not."""
    windows = [window for window in step.context.windows if window is not None]
    if windows:
        counts = [min(step.seen, max(windows) + FEW), step.seen]
    else:
        counts = [min(max(step.seen, FEW), _room(step), TOKENS), min(step.seen, _room(step), TOKENS), step.seen]
    for count in dict.fromkeys(counts):
        if count >= 1 and _fits(step, count):
            yield ConversationPlan(count)


def _further_plans(step: StepCase, first: ConversationPlan) -> Iterator[ConversationPlan]:
    """Conversations on both sides of the constants of a graph, with tokens evicted, padding amid them, other ids."""
    new, constants = step.queries, of_lengths(step.gm.graph)
    lengths = [number + 2 for number in constants]
    lengths += [number - new for number in constants[:1]]
    if step.layouts[0].device.type != "cpu":  # where a lookup out of range cannot be caught
        lengths = [count for count in lengths if count + new <= max(step.seen, smallest_table(step.gm.graph))]
    lengths = [count for count in dict.fromkeys(lengths) if count > 1 and count != first.count and _fits(step, count)]
    for count in sorted(lengths, reverse=True)[:LENGTHS]:
        yield ConversationPlan(count, _interesting(constants, count, new), gap=True)
    few = min(first.count, _room(step))
    if _fits(step, few) and few > 1:
        yield ConversationPlan(few, gap=True)
        if _has_ids(step):
            yield ConversationPlan(few, ids="changing")
            yield ConversationPlan(few, ids="new")


def _blind_plans(step: StepCase, first: ConversationPlan) -> Iterator[ConversationPlan]:
    """Conversations in which a query may see no key, or none that is held: at the beginning of a block or a segment."""
    numbered = step.ranked or any(layout.policy.renumbers for layout in step.layouts)
    table = math.inf if step.layouts[0].device.type == "cpu" else max(step.seen, smallest_table(step.gm.graph))
    for number in of_lengths(step.gm.graph)[:BLOCKS]:
        for count, forgets in ((number, 0), (number + 2, 2)):
            if count + step.queries <= table and _fits(step, count) and not (numbered and forgets):
                yield ConversationPlan(count, pads=False, forgets=forgets)
    few = min(first.count, _room(step))
    for count in (few - 1, few):  # one of them begins a block of two
        if count > 1 and _fits(step, count):
            yield ConversationPlan(count, pads=False)
    if few > 1 and _fits(step, few) and _has_ids(step):
        yield ConversationPlan(few, ids="new", pads=False)
        if not numbered:
            yield ConversationPlan(few, ids="changing", pads=False, forgets=few - few // 2)


def _interesting(constants: list[int], count: int, new: int) -> tuple[int, ...]:
    """The tokens that constants point at, counted from the first or from those that are new."""
    ends = [token for number in constants for token in (number, count - number, count + new - 1 - number)]
    return tuple(token for token in ends if 0 <= token < count)


def _has_ids(step: StepCase) -> bool:
    """Whether an input has a whole number for every token."""
    holders = walk.placeholders(step.gm.graph)
    marks = step.padding_inputs.values()
    return any(
        walk.is_tensor(node)
        and not value(node).is_floating_point()
        and i not in marks
        and any(step.sizes.grows(size) for size in value(node).shape)
        for i, node in enumerate(holders)
        if all(i not in pair for pair in step.pasts)
    )


def _room(step: StepCase) -> int:
    """The tokens that fit into the slots of each layer whose past is held whole."""
    whole = [slots.capacity for slots, window in zip(step.slots, step.context.windows, strict=True) if window is None]
    return min(whole, default=step.seen + 1) - step.context.decodes


def _fits(step: StepCase, count: int) -> bool:
    """Whether a conversation of so many tokens can be made up.

    Where held tokens are numbered anew all must be held.  Where layers store their last tokens only, at least so many
    that they have begun to.  A sparse index must choose all keys, as it does on the slots.
    """
    numbered = step.ranked or any(layout.policy.renumbers for layout in step.layouts)
    if numbered and count > _room(step):
        return False
    if count < max((window for window in step.context.windows if window is not None), default=1):
        return False
    if count + step.queries > step.most_keys:
        return False
    return count == step.seen or _serves(step, count)


def _serves(step: StepCase, count: int) -> bool:
    """Whether Dynamo's guards leave the graph for so many tokens in every past that is held whole."""
    lengths = _past_lengths(step)
    symbols = {symbol for length in lengths for symbol in shapes.expr(length).free_symbols}
    asked = symbolic_shapes.guarded(*(value(node) for node in walk.placeholders(step.gm.graph)))
    known = {symbol: sympy.Integer(count) for symbol in symbols if len(symbols) == 1}
    refused = any(each.xreplace(known) == sympy.false for each in asked)
    return (
        not refused
        and all(symbolic_shapes.may_equal(length, count) for length in lengths)
        and _inputs_serve(step, count)
    )


def _inputs_serve(step: StepCase, count: int) -> bool:
    """Whether the inputs beside pasts may have the sizes that they have of so many tokens.

    One that marks padding has an entry for each token; if its size is a number the graph is of one length.
    """
    holders, pasts = walk.placeholders(step.gm.graph), {index for pair in step.pasts for index in pair}
    if not all(step.sizes.grows(value(holders[index]).shape[-1]) for index in step.padding_inputs.values()):
        return False
    for index, (node, given) in enumerate(zip(holders, step.arguments, strict=True)):
        if index in pasts or not (walk.is_tensor(node) or walk.is_size(node)):
            continue
        pairs = zip(value(node).shape, given.shape, strict=True) if walk.is_tensor(node) else [(value(node), given)]
        if not all(
            symbolic_shapes.may_equal(size, now - step.seen + count) for size, now in pairs if step.sizes.grows(size)
        ):
            return False
    return True


def _past_lengths(step: StepCase) -> list[Any]:
    """The lengths of the layers' pasts that are held whole, as the graph has them."""
    whole = [site for site, window in zip(step.sites, step.context.windows, strict=True) if window is None]
    return [value(past).shape[2] for site in whole for past in (site.past_key, site.past_value)]  # type: ignore[arg-type]


def _compare(step: StepCase, made: Conversation, last: fx.Node | None) -> bool:
    """Run the three graphs on one conversation, up to a canonical call; return whether a query may see no key.

    Raises:
        UnsupportedGraph: the graphs differ.
        Unfit: the model's own graph does not run.
    """
    pair = Lockstep(step.gm, step.canonical, step.sites, made.argument, step.queries, made.plan.said, last)
    theirs = pair.run_model()
    pair.run_canonical(made.columns)
    if step.kv_dtype is not None and step.context.decodes:  # the new row is attended to as it is stored
        pair.run_canonical(made.columns, _rounding(step))
    ours, rewrite = _run_rewritten(step, made, pair), made.rewrite
    outputs = [None if index is None else ours[index] for index in rewrite.outputs]
    if last is None:
        for index, beyond in rewrite.lengths.items():
            outputs[index] = made.count + beyond
        for index, grown in zip(rewrite.grown, rewrite.host_precomputed(made.plain), strict=False):
            outputs[index] = grown
    pair.compare_outputs(outputs, theirs, rewrite.unread)
    return pair.blind


def _run_rewritten(step: StepCase, made: Conversation, pair: Lockstep) -> list[Any]:
    visits: dict[fx.Node, Visit] = {}
    slots = MadeUpSlots(made)
    context, left = step.context, set(step.rewrite.gm.graph.nodes)
    moved = [each for site in context.sites for each in site.all]
    padded = (~made.valid.all(-1)).to(step.layouts[0].device)
    for (layer, site), ours in zip(pair.calls, moved, strict=True):
        given = arguments(site.call)
        if (ours.scale, ours.cap) != (given["scale"], given["cap"]):
            pair.refuse(site, f"logits are scaled by {ours.scale} and capped at {ours.cap} instead")
        mask, bias = context.masks[site.call.name]
        if mask in left and mask.op != "placeholder":
            late = mask if bias is None or bias not in left or bias < mask else bias
            visits[late] = _at_mask(slots, pair, layer, site, mask, bias)
        for node in (site.call, site.lse):
            if node is not None:
                what = "attention to the slots is not attention to the cache"
                visits[context.replaced[node.name]] = pair.at_call(site, node, what, padded)
        pairs = [(ours.query, site.query), (ours.key, site.key), (ours.value, site.value)]
        if not step.ranked or bool(made.valid.all()):
            visits |= {our: pair.at_input(site, their) for our, their in pairs if our in left and our not in visits}
    try:
        end = None if pair.last is None else context.replaced[pair.last.name]
        return GraphRun(step.rewrite.gm, slots.flat(), visits).run_to(end)
    except DoesNotRun as error:
        pair.refuse(step.sites[0], f"the rewritten graph does not run: {error}")


def _at_mask(
    slots: MadeUpSlots, pair: Lockstep, layer: int, site: AttentionSite, mask: fx.Node, bias: fx.Node | None
) -> Visit:
    """Compare which slots are seen, and the bias on them, with the model's own mask of their tokens."""

    def visit(walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        walk.env[node] = result
        wanted, on = pair.wanted[site.call.name], None if bias is None else walk.load(bias)
        if not wanted.sees(walk.load(mask), on, slots.columns(layer)):
            pair.refuse(site, "the mask on the slots is not the mask of their tokens")
        return result

    return visit


def _rounding(step: StepCase) -> dict[fx.Node, Visit]:
    """At the canonical nodes that make new rows: what is read of the rows once they are stored."""
    there = {node.name: node for node in step.canonical.graph.nodes}
    raw_keys = [there[node.name] for node in step.context.raw_keys] or [site.key for site in step.sites]
    visits: dict[fx.Node, Visit] = {}
    for site, key, layout in zip(step.sites, raw_keys, step.layouts, strict=True):
        visits[key] = _stored_as(layout.key_format, layout.heads, layout.dtype)
        visits[site.value] = _stored_as(layout.value_format, layout.heads, layout.dtype)
    return visits


def _stored_as(format: Any, heads: int, dtype: torch.dtype) -> Visit:
    """Rows [B, h, q, D] as they are read once they are stored; of one head where keys are computed from them."""

    def visit(walk: GraphRun, node: fx.Node, result: Tensor) -> Tensor:
        joins = result.shape[1] != heads
        rows = result.transpose(1, 2).flatten(2)[:, None] if joins else result
        read = Rows.of(format, rows).read_as(dtype)
        return torch.unflatten(read[:, 0], -1, (result.shape[1], -1)).transpose(1, 2) if joins else read

    return visit
