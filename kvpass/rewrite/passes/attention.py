"""Replace attention by a step of the policy on slots, and cache updates by writes to a slot.

    before   k = kvpass::append(past_k, key)              after    write key and value to the free slot
             v = kvpass::append(past_v, val)                       out = attention over the slots, under the mask on
             out = kvpass::attention(query, k, v, mask)                  the slots
                                                                   the policy observes and chooses the next victim

The step is `kvpass.cache.step`, traced to torch's operators and spliced in.  Layers that share a cache with an earlier
layer attend to the same slots.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch.fx as fx
from torch import Tensor

from kvpass.cache.cached_attention import AttentionOutput, CachedAttention, NewTokens
from kvpass.cache.chunk_step import chunk_step
from kvpass.cache.layout import Layout
from kvpass.cache.step import decode_step, read_step
from kvpass.capture.canonical import AttentionSite, attention_calls
from kvpass.fx import shapes, splicing, walk
from kvpass.fx.walk import example_value
from kvpass.lowering.attend import Rope, RotaryPairs
from kvpass.rewrite.computed_keys import ComputedKeys, cut_computed_keys
from kvpass.rewrite.context import AttentionResults, PassRecord, StepContext
from kvpass.rewrite.masks import MaskOnSlots, Masks
from kvpass.rewrite.rotary_subgraph import RotarySubgraph
from kvpass.rewrite.rotary_tables import RotaryTables


def attend_on_slots(context: StepContext) -> PassRecord:
    """Replace every attention call on a cache.

    Raises:
        UnsupportedGraph: a mask or the keys cannot be computed for slots.
    """
    replacement = _AttentionReplacement(context)
    for layer in range(len(context.sites)):
        replacement.replace(layer)
    context.attention = replacement.results
    return PassRecord([each.call.name for each in attention_calls(context.sites)])


class _AttentionReplacement:
    """Replace the layers of one graph; equal layers share a trace."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.masks, self.tables = Masks(context), RotaryTables(context)
        self.results = AttentionResults({}, {}, [], self.masks.dropped_outputs)
        self._traced: dict[Any, fx.GraphModule] = {}

    def replace(self, layer: int) -> None:
        """Splice in a layer's step, and the steps of the layers that share its cache."""
        context, site = self.context, self.context.sites[layer]
        new = new_vectors(context, layer)
        slots = context.slot_inputs[layer]
        slots_before = context.copy_slots(layer) if site.shared_by and context.decodes else slots
        sums = self._splice(layer, site, slots, new, first=True)
        for sharing in site.shared_by:
            self._splice(layer, sharing, slots_before, new, first=False)
        stored_key = (
            context.rotations.raw_keys[layer] if context.stores_unrotated_keys and not site.computed else new[0]
        )
        self.results.admitted_nodes.append(
            [] if context.decodes else [stored_key, new[1], context.inputs.valid(layer), *sums]
        )

    def _splice(
        self, layer: int, site: AttentionSite, slots: list[fx.Node], new: list[fx.Node], first: bool
    ) -> list[fx.Node]:
        """Splice in an attention call's step, which writes if it is the `first`; return a chunk's statistics."""
        context, layout = self.context, self.context.layouts[layer]
        mask = self.masks.for_site(site, layer)
        if layout.classes:
            _check_classes(site, layout, mask)
        rotary = context.rotations.subgraphs[layer] if context.rotations.subgraphs else None
        pairs = self.tables.pairs(rotary)
        computed = cut_computed_keys(context.step_gm, site, context.sizes, mask.key_features if mask else ())
        rope_weights = self.tables.mixing(rotary, pairs, layout.capacity, site.call) if rotary and pairs else []
        operands = {
            "slots": slots,
            "new": [site.query, *new, context.inputs.valid(layer)],
            "mask": mask.nodes if mask else [],
            "table": self.tables.angles(rotary, layout.capacity) if rotary else [],
            "rotate": rotary.rotate.bound if rotary else (),
            "rope": rope_weights,
            "computed": computed.subgraph.bound if computed else (),
            "sink_logit": [] if site.sink_logit is None else [site.sink_logit],
            "policy_weights": context.policy_weights.of_layers[layer],
            "write_slots": context.write_indices[layer : layer + 1],
        }
        nodes = [x for group in operands.values() for x in group]
        parts = _LayerStepParts(
            layout, site, mask, rotary, pairs, computed, bool(context.padding_inputs.by_layer[layer])
        )
        symbols = {symbol: _OWN_CAPACITY for symbol, owner in context.size_nodes.layer_of.items() if owner == layer}
        key = (*self._shared_layout(layer), parts.key, first, *(_value_key(context, node, symbols) for node in nodes))
        if key not in self._traced:
            counts = {name: len(group) for name, group in operands.items()}
            self._traced[key] = self._trace(layer, parts, nodes, counts, first)
        before = splice_point(site, nodes)
        outputs = context.splice(self._traced[key], nodes, before, f"kvpass_{site.call.name}", layer)
        self.results.replaced.update(replace_outputs(site, outputs))
        rest = iter(outputs[len(site.results) :])
        masks = list(itertools.islice(rest, 2 * len(layout.by_class)))
        self.results.masks[site.call.name] = [
            (visible, None if bias is visible else bias) for visible, bias in zip(masks[::2], masks[1::2], strict=True)
        ]
        return list(rest)

    def _shared_layout(self, layer: int) -> tuple[Layout, int]:
        """Return a layer's layout and number of slots, without a dynamic capacity that only this layer has."""
        layout = dataclasses.replace(self.context.given.layouts[layer], layer=0)  # a layer's own weights are inputs
        slots = self.context.slots[layer].capacity
        owns_capacity = layer in self.context.size_nodes.layer_of.values()
        return (dataclasses.replace(layout, capacity=0), 0) if owns_capacity else (layout, slots)

    def _trace(
        self, layer: int, parts: _LayerStepParts, nodes: list[fx.Node], counts: dict[str, int], first: bool
    ) -> fx.GraphModule:
        context, layout, lse = self.context, parts.layout, parts.attention.lse
        template = context.slots[layer]
        lse_like = None if lse is None else (context.shape(lse), example_value(lse).dtype)

        def results(attended: AttentionOutput) -> list[Tensor]:
            lse = []
            if lse_like is not None and attended.lse is not None:
                shape, dtype = lse_like
                lse = [attended.lse.view(shape).to(dtype)]
            masks = [x for mask, bias in attended.masks for x in (mask, mask if bias is None else bias)]
            return [attended.output, *lse, *masks, *(attended.statistics if first else ())]

        def function(*tensors: Tensor) -> Any:
            operands = _group_operands(tensors, counts)
            slots = template.with_tensors(operands["slots"])
            new, attention = NewTokens(*operands["new"]), parts.cached_attention(operands)
            if not context.decodes:
                return results(chunk_step(layout, attention, slots, new))
            new = new._replace(valid=new.valid[:, 0])
            if first:
                return results(decode_step(layout, attention, slots, new, context.given.compact))
            return results(read_step(layout, attention, slots, new))

        return context.trace(function, nodes, layer)


def _check_classes(site: AttentionSite, layout: Layout, mask: MaskOnSlots | None) -> None:
    """Raise UnsupportedGraph for attention that heads with different budgets cannot share."""
    own = (
        site.mask is not None
        and example_value(site.mask).ndim == 4
        and shapes.expr(example_value(site.mask).shape[1]) != 1
    )
    why = {
        "each head has its own mask": own,
        "its mask looks up an input at the index of each cached token": mask is not None and bool(mask.entries),
    }
    for reason, holds in why.items():
        if holds:
            stored = f"{reason}, and {layout.policy.name!r} stores heads by their budgets"
            walk.refuse(site.call, f"{stored}; use a policy with equal budgets, such as 'snapkv'")


_OWN_CAPACITY = sympy.Symbol("layers_capacity")
"""Stands for the dynamic capacity of any one layer, so that layers compare equal."""


def _value_key(context: StepContext, node: fx.Node, symbols: dict[sympy.Symbol, sympy.Symbol]) -> str:
    """Return the properties of a node's value on which a layer's code depends, as text."""
    text = functools.partial(shapes.text, renamed=symbols)
    if walk.is_size(node):
        return text(context.sizes.resolved_size(node))
    sizes = [*map(text, context.shape(node)), "by", *map(text, example_value(node).stride())]
    return str((sizes, example_value(node).dtype, context.device_of(node)))


def new_vectors(context: StepContext, layer: int) -> list[fx.Node]:
    """Return the new tokens' key and value; the key of a single token as stored, rotated or not."""
    site = context.sites[layer]
    key = context.rotations.raw_keys[layer] if context.stores_unrotated_keys and context.decodes else site.key
    return [as_cached(context.graph, site, node) for node in (key, site.value)]


def as_cached(graph: fx.Graph, site: AttentionSite, node: fx.Node) -> fx.Node:
    """Return a key or value as it is cached: with joined heads if keys are computed from it."""
    if not site.computed or example_value(node).shape[1] == 1:
        return node
    with graph.inserting_before(node.next):
        flat = splicing.emit(graph, "flatten", splicing.emit(graph, "transpose", node, 1, 2), 2)
        return splicing.emit(graph, "unsqueeze", flat, 1)


def splice_point(site: AttentionSite, needed: list[fx.Node]) -> fx.Node:
    """Return the node before which a site's step is spliced in, after moving `needed` before it.

    The model's code may read a log-sum-exp before its second product.
    """
    if site.lse is None or site.call < site.lse:
        return site.call
    for node in needed:
        walk.move_before(site.lse, node)
    return site.lse


def replace_outputs(site: AttentionSite, outputs: list[fx.Node]) -> dict[str, fx.Node]:
    """Replace a site's results by a step's, the first outputs; return its `AttentionResults.replaced`."""
    replaced = dict(zip(site.results, outputs, strict=False))
    for old, new in replaced.items():
        old.replace_all_uses_with(splicing.with_value(new, example_value(old)))
    return {old.name: new for old, new in replaced.items()}


@dataclasses.dataclass(frozen=True)
class _LayerStepParts:
    """The parts of a layer's step."""

    layout: Layout
    attention: AttentionSite
    mask: MaskOnSlots | None
    rotary: RotarySubgraph | None
    pairs: RotaryPairs | None
    computed: ComputedKeys | None
    has_padding_inputs: bool  # see `CachedAttention`

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for parts of steps that have the same code for the same layout and operands."""
        site = self.attention
        facts = (site.scale, site.cap, site.sink_logit is None, site.lse is None, site.hidden_logit, site.decomposed)
        rotary, computed = self.rotary and (self.rotary.key, self.pairs), self.computed and self.computed.subgraph.key
        return (self.mask and self.mask.key, rotary, computed, *facts, self.has_padding_inputs)

    def cached_attention(self, operands: dict[str, list[Tensor]]) -> CachedAttention:
        """Return the attention call with the tensors that its parts read."""
        mask, rotary, computed, heads = self.mask, self.rotary, self.computed, self.layout.heads
        of_mask, table, of_rotary = operands["mask"], operands["table"], operands["rotate"]
        return CachedAttention(
            scale=self.attention.scale,
            mask=None
            if mask is None
            else lambda index, position, key_features: mask.on_slots(index, position, heads, of_mask, key_features),
            rotate=None if rotary is None else lambda keys, rank: rotary.on_slots(keys, rank, table, of_rotary),
            rope=Rope(operands["rope"][0], operands["rope"][1], self.pairs) if self.pairs else None,
            policy_weights=tuple(operands["policy_weights"]),
            cap=self.attention.cap,
            sink_logit=operands["sink_logit"][0] if operands["sink_logit"] else None,
            compute_keys=None if computed is None else lambda k, v: computed.on_slots(k, v, operands["computed"]),
            lse=self.attention.lse is not None,
            hidden_logit=self.attention.hidden_logit,
            decomposed=self.attention.decomposed,
            has_padding_inputs=self.has_padding_inputs,
            write_slots=operands["write_slots"][0] if operands["write_slots"] else None,
        )


def _group_operands(tensors: tuple[Tensor, ...], counts: dict[str, int]) -> dict[str, list[Tensor]]:
    rest = iter(tensors)
    return {name: list(itertools.islice(rest, count)) for name, count in counts.items()}
