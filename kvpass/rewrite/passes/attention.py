"""Attention on slots: every attention call and the updates of its cache become a step of the policy on slots.

    before   k = kvpass::append(past_k, key)              after    write key and value to the free slot
             v = kvpass::append(past_v, val)                       out = attention over the slots, under the mask on
             out = kvpass::attention(query, k, v, mask)                  them
                                                                   the policy observes, chooses whom to drop

The step is `kvpass.cache.step`, traced to torch's operators and spliced in.  Layers that share a cache with an earlier
one attend to what that one attended to.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import Layout, Slots
from kvpass.cache.step import Attended, Site, decode_step, extend_step, read_step
from kvpass.capture.sites import AttentionSite
from kvpass.fx import shapes, walk
from kvpass.fx.walk import value
from kvpass.lowering.formats import Sections
from kvpass.lowering.rope import Rope, RotaryPairs
from kvpass.rewrite.computed_keys import ComputedKeys, cut_computed_keys
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.masks import MaskOnSlots, Masks
from kvpass.rewrite.record import Record
from kvpass.rewrite.rotary_slice import RotarySlice
from kvpass.rewrite.tables import Tables


def attend_on_slots(step: StepContext) -> Record:
    """Replace every attention call on a cache.

    Raises:
        UnsupportedGraph: its mask or its keys cannot be said on slots.
    """
    attending = _AttentionReplacement(step)
    for layer in range(len(step.sites)):
        attending.replace(layer)
    return Record([each.call.name for site in step.sites for each in site.all])


class _AttentionReplacement:
    """The layers of one graph; what is traced for one serves those that are like it."""

    def __init__(self, step: StepContext) -> None:
        self.step = step
        self.masks, self.tables = Masks(step), Tables(step)
        self._traced: dict[Any, fx.GraphModule] = {}

    def replace(self, number: int) -> None:
        """Splice a layer's step in, and those of the layers that share its cache."""
        step, site = self.step, self.step.sites[number]
        new = new_rows(step, number)
        slots = step.slot_inputs[number]
        before = step.copied_slots(number) if site.shared_by and step.decodes else slots
        made = self._splice(number, site, slots, new, first=True)
        for other in site.shared_by:
            self._splice(number, other, before, new, first=False)
        step.chunks.append([] if step.decodes else [*stored_rows(step, number, new), step.inputs.valid(number), *made])

    def _splice(
        self, number: int, site: AttentionSite, slots: list[fx.Node], new: list[fx.Node], first: bool
    ) -> list[fx.Node]:
        """Splice one attention call's step in; gives the statistics of a chunk.

        Args:
            first: whether it is the call that writes, and that the policy sees.
        """
        step, layout = self.step, self.step.layouts[number]
        mask, mask_key = self.masks.of(site, number)
        rotary = step.rotaries[number] if step.rotaries else None
        pairs = self.tables.pairs(rotary)
        computed = cut_computed_keys(step.gm, site, step.sizes, mask.facts if mask else ())
        mixed = self.tables.mixing(rotary, pairs, layout.capacity, site.call) if rotary and pairs else []
        groups = {
            "slots": slots,
            "new": [site.query, *new, step.inputs.valid(number)],
            "mask": mask.nodes if mask else [],
            "table": self.tables.angles(rotary, layout.capacity) if rotary else [],
            "rotate": rotary.rotate.bound if rotary else (),
            "mixed": mixed,
            "computed": computed.slice.bound if computed else (),
            "sink_logit": [] if site.sink_logit is None else [site.sink_logit],
            "weights": step.weight_inputs,
            "place": step.write_indices[number : number + 1],
        }
        nodes = [node for group in groups.values() for node in group]
        renamed = {symbol: LAYERS_CAPACITY for symbol, layer in step.size_nodes.layer_of.items() if layer == number}
        key = (
            *self._sized(number),
            mask_key,
            rotary and (rotary.key, pairs),
            computed and computed.slice.key,
            (site.scale, site.cap, site.sink_logit is None, site.lse is None, site.hidden, site.decomposed, first),
            bool(step.padding_inputs.sites[number]),
            *(_described(step, node, renamed) for node in nodes),
        )
        if key not in self._traced:
            counts = {name: len(group) for name, group in groups.items()}
            layer = _LayerCall(layout, site, mask, rotary, pairs, computed, bool(step.padding_inputs.sites[number]))
            self._traced[key] = self._trace(number, layer, nodes, counts, first)
        before = early_enough(site, nodes)
        *made, seen, bias = step.splice(self._traced[key], nodes, before, f"kvpass_{site.call.name}", number)
        step.masks[site.call.name] = (seen, None if bias is seen else bias)
        return put_in_place(step, site, made)

    def _sized(self, number: int) -> tuple[Layout, int]:
        """A layer's layout and its slots, without what is an open size of its own."""
        layout, slots = self.step.call.layouts[number], self.step.slots[number].capacity
        has_its_own = number in self.step.size_nodes.layer_of.values()
        return (dataclasses.replace(layout, capacity=0), 0) if has_its_own else (layout, slots)

    def _trace(
        self, number: int, layer: _LayerCall, nodes: list[fx.Node], counts: dict[str, int], first: bool
    ) -> fx.GraphModule:
        step, layout, lse = self.step, layer.layout, layer.found.lse
        like = step.slots[number]
        lse_like = None if lse is None else (step.shape(lse), value(lse).dtype)

        def given_out(attended: Attended, sums: Sequence[Tensor] = ()) -> list[Tensor]:
            lse = []
            if lse_like is not None and attended.lse is not None:
                shape, dtype = lse_like
                lse = [attended.lse.view(shape).to(dtype)]
            bias = attended.mask if attended.bias is None else attended.bias
            return [attended.output, *lse, *sums, attended.mask, bias]

        def function(*tensors: Tensor) -> Any:
            given = _grouped(tensors, counts)
            slots = Slots.of(given["slots"], like)
            query, key, new_value, valid = given["new"]
            here = layer.site(given)
            if step.decodes and first:
                return given_out(
                    decode_step(layout, here, slots, query, key, new_value, valid[:, 0], step.call.compact)
                )
            if step.decodes:
                return given_out(read_step(layout, here, slots, query, key, new_value, valid[:, 0]))
            attended, sums = extend_step(layout, here, slots, query, key, new_value, valid)
            return given_out(attended, sums if first else ())

        return step.trace(function, nodes, number)


LAYERS_CAPACITY = sympy.Symbol("layers_capacity")
"""Stands for the open size of a layer that is its own, so that layers can be seen to be alike."""


def _described(step: StepContext, node: fx.Node, renamed: dict[sympy.Symbol, sympy.Symbol]) -> str:
    """What of a node's value the code for a layer depends on."""

    def said(size: Any) -> str:
        return str(shapes.expr(size).xreplace(renamed)) if renamed and isinstance(size, torch.SymInt) else str(size)

    if walk.is_size(node):
        return said(step.sizes.fixed(node))
    sizes = [*map(said, step.shape(node)), "by", *map(said, value(node).stride())]
    return str((sizes, value(node).dtype, step.device_of(node)))


def new_rows(step: StepContext, number: int) -> list[fx.Node]:
    """The new tokens' key, as it is stored for a single token and as it is attended to in a chunk, and value."""
    site = step.sites[number]
    key = step.raw_keys[number] if step.ranked and step.decodes else site.key
    return [as_cached(step.graph, site, node) for node in (key, site.value)]


def stored_rows(step: StepContext, number: int, new: list[fx.Node]) -> list[fx.Node]:
    """Of `new_rows` the key as it is stored, and the value."""
    return [step.raw_keys[number] if step.ranked and not step.sites[number].computed else new[0], new[1]]


def as_cached(graph: fx.Graph, site: AttentionSite, node: fx.Node) -> fx.Node:
    """A key or value [B, h, q, D]; [B, 1, q, h * D] where keys and values are made of it (`computed_keys.joined`)."""
    if not site.computed or value(node).shape[1] == 1:
        return node
    with graph.inserting_after(node):
        transposed = graph.call_method("transpose", (node, 1, 2))
    with graph.inserting_after(transposed):
        flat = graph.call_method("flatten", (transposed, 2))
    with graph.inserting_after(flat):
        one = graph.call_method("unsqueeze", (flat, 1))
    transposed.meta["example_value"] = value(node).transpose(1, 2)
    flat.meta["example_value"] = value(transposed).flatten(2)
    one.meta["example_value"] = value(flat).unsqueeze(1)
    return one


def early_enough(site: AttentionSite, needed: list[fx.Node]) -> fx.Node:
    """The node before which a site's step is spliced in, which comes after all that it needs.

    What the model makes of a log-sum-exp may stand before its second product.
    """
    if site.lse is None or site.call < site.lse:
        return site.call
    for node in needed:
        walk.move_before(site.lse, node)
    return site.lse


def put_in_place(step: StepContext, site: AttentionSite, made: list[fx.Node]) -> list[fx.Node]:
    """Let what a step gives, in the order of `Attended`, stand for the model's own; what it gives beyond that."""
    replaced = [node for node in (site.call, site.lse) if node is not None]
    for theirs, ours in zip(replaced, made, strict=False):
        step.replaced[theirs.name] = ours
        ours.meta["example_value"] = value(theirs)
        theirs.replace_all_uses_with(ours)
    return made[len(replaced) :]


@dataclasses.dataclass(frozen=True)
class _LayerCall:
    """What a layer's step is made of."""

    layout: Layout
    found: AttentionSite
    mask: MaskOnSlots | None
    rotary: RotarySlice | None
    pairs: RotaryPairs | None
    computed: ComputedKeys | None
    knows_padding: bool  # whether inputs tell padding, which is not held

    def site(self, given: dict[str, list[Tensor]]) -> Site:
        """The site, with the tensors that its parts read."""
        mask, rotary, computed, heads = self.mask, self.rotary, self.computed, self.layout.heads

        def masked(index: Tensor, position: Tensor, facts: list[Tensor]) -> Tensor:
            assert mask is not None
            return mask.on_slots(index, position, heads, given["mask"], facts)

        def rotated(keys: Sections, rank: Tensor) -> list[Tensor]:
            assert rotary is not None
            return rotary.on_slots(keys, rank, given["table"], given["rotate"])

        def made_of_cache(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
            assert computed is not None
            return computed.on_slots(key, value, given["computed"])

        return Site(
            scale=self.found.scale,
            mask=masked if mask else None,
            rotate=rotated if rotary else None,
            rope=Rope(given["mixed"][0], given["mixed"][1], self.pairs) if self.pairs else None,
            weights=tuple(given["weights"]),
            cap=self.found.cap,
            sink_logit=given["sink_logit"][0] if given["sink_logit"] else None,
            compute_keys=made_of_cache if computed else None,
            lse=self.found.lse is not None,
            hidden=self.found.hidden,
            decomposed=self.found.decomposed,
            knows_padding=self.knows_padding,
            write_index=given["place"][0] if given["place"] else None,
        )


def _grouped(tensors: tuple[Tensor, ...], counts: dict[str, int]) -> dict[str, list[Tensor]]:
    """Consecutive tensors by name."""
    rest = iter(tensors)
    return {name: list(itertools.islice(rest, count)) for name, count in counts.items()}
