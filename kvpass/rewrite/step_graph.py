"""Describe the call that a step graph is rewritten for, and copy the graph for its rewrite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import Layout, Slots
from kvpass.capture.canonical import AttentionSite
from kvpass.fx import walk
from kvpass.fx.shapes import Sizes
from kvpass.fx.walk import value
from kvpass.torch_private import fx_nodes


@dataclasses.dataclass(frozen=True)
class PaddingInputs:
    """Name the inputs that mark padding, see `kvpass.capture.padding_analysis`.

    Attributes:
        sites: for each site, the inputs that mark padding in all masks on its cache.
        known: the inputs whose entry is known to be one for every cached token.
    """

    sites: tuple[tuple[fx.Node, ...], ...]
    known: frozenset[fx.Node]

    def moved(self, to: dict[fx.Node, fx.Node]) -> PaddingInputs:
        """Return the inputs in a copy of the graph; `to` maps each node to its copy."""
        sites = tuple(tuple(to[node] for node in nodes) for nodes in self.sites)
        return PaddingInputs(sites, frozenset(to[node] for node in self.known))


@dataclasses.dataclass(frozen=True)
class StepCall:
    """Combine a canonical step graph with the call that it is rewritten for.

    Attributes:
        gm, sites: the graph, which is not modified, and its attention on caches.
        layouts, slots: of each layer.
        arguments: Dynamo's arguments.
        sizes: the values of the graph's symbols in this call.
        seen: the number of tokens before this call.
        windows: for each layer, how many tokens the model stores, None for all.
        padding_inputs: the inputs that mark padding.
        compact: whether the policy compacts the slots in this step.
        dynamic_dims: the layouts with symbols for the sizes that differ between calls; empty if there are none.
    """

    gm: fx.GraphModule
    sites: list[AttentionSite]
    layouts: list[Layout]
    slots: list[Slots]
    arguments: tuple[Any, ...]
    sizes: Sizes
    seen: int
    windows: tuple[int | None, ...]
    padding_inputs: PaddingInputs
    compact: bool = False
    dynamic_dims: list[Layout] = dataclasses.field(default_factory=list)

    def with_layouts(self, change: Callable[[Layout], Layout]) -> StepCall:
        """Return the call with changed layouts; its slots then hold no data."""
        layouts, dynamic_dims = [change(each) for each in self.layouts], [change(each) for each in self.dynamic_dims]
        slots = [each.on_meta(layout) for each, layout in zip(self.slots, layouts, strict=True)]
        return dataclasses.replace(self, layouts=layouts, dynamic_dims=dynamic_dims, slots=slots)


class StepGraph:
    """A copy of a step graph during its rewrite.

    Attributes:
        call: the call that the graph is rewritten for.
        gm, graph: the copy.
        sites, placeholders, padding_inputs: the call's sites, its placeholders and the inputs that mark padding, in the
            copy.
        argument_of: Dynamo's argument for each placeholder.
        batch, queries: B and q, which may be dynamic sizes.
        layouts, capacities: for each layer, its layout and its number of slots; capacities and budgets may be dynamic.
        decodes: whether one token is written to a free slot; a chunk is not written by the graph.
        ranked: whether keys are stored before their rotary embedding and numbered by rank.
        whole: whether masks gather entries from tensors with all tokens; by default the graph gets the entries of its
            slots.
        slot_inputs: for each layer, the placeholders of its slots' tensors, in the order of `Slots.names`.
        new_inputs: all of these placeholders, and those of the policy's own tensors.
        length: int64 without dimensions, the number of tokens seen, padding included.
    """

    def __init__(self, call: StepCall, whole: bool = False) -> None:
        copy, moved = fx_nodes.copy_graph_module(call.gm)
        self.call, self.gm, self.graph = call, copy, copy.graph
        self.sites = [site.moved(moved) for site in call.sites]
        self.slots, self.sizes, self.windows = call.slots, call.sizes, call.windows
        self.layouts = call.dynamic_dims or call.layouts
        self.placeholders = walk.placeholders(self.graph)
        self.argument_of = dict(zip(self.placeholders, call.arguments, strict=True))
        self.padding_inputs = call.padding_inputs.moved(moved)
        self.batch = call.sizes.fixed(value(call.sites[0].key).shape[0]) if call.sizes.open else call.layouts[0].batch
        self.queries = call.sizes.queries
        self.capacities = [
            slots.capacity if isinstance(layout.capacity, int) else layout.capacity
            for layout, slots in zip(self.layouts, call.slots, strict=True)
        ]
        # A prompt that is still held whole adds its first token as a chunk.
        has_all_slots = all(s.capacity == x.capacity for s, x in zip(call.slots, call.layouts, strict=True))
        self.decodes = bool(self.queries == 1) and has_all_slots
        self.ranked = call.layouts[0].ranked
        self.whole = whole
        self.slot_inputs: list[list[fx.Node]] = []
        self.new_inputs: set[fx.Node] = set()
        self.length: fx.Node

    @property
    def decodes_on_gpu(self) -> bool:
        return self.decodes and self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """The device of the slots."""
        return self.layouts[0].device

    def slot(self, layer: int, name: str) -> fx.Node:
        """Return the placeholder of one tensor of a layer, by its name in `Slots.names`."""
        return self.slot_inputs[layer][self.slots[layer].names.index(name)]

    def line(self, layer: int = 0) -> str:
        """Return the line of the user's source at which a layer attends."""
        return walk.source_line(self.sites[layer].call)

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the shape of a node's tensor in this call."""
        return tuple(size if isinstance(size, int) else self.sizes.fixed(size) for size in value(node).shape)

    def example(self, node: fx.Node) -> Any:
        """Return an empty tensor with the shape, strides and dtype of a node's value, or the value of a size."""
        if walk.is_size(node):
            return self.sizes.fixed(node)
        kind: dict[str, Any] = dict(dtype=value(node).dtype, device=self.device_of(node))
        strides = value(node).stride()
        made_dense = node.op == "placeholder" and has_loose_strides(value(node))  # see `StepRewrite.flat`
        dense = made_dense or any(self.sizes.grows(stride) for stride in strides)
        fixed = None if dense else [self.sizes.fixed(stride) for stride in strides]
        if self.sizes.open:
            return self.sizes.open.like(self.shape(node), fixed, **kind)
        shape = self.shape(node)
        return torch.empty(shape, **kind) if fixed is None else torch.empty_strided(shape, fixed, **kind)

    def of_shape(self, shape: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor without data that stands for a dense tensor which kvpass adds."""
        kind: dict[str, Any] = dict(dtype=dtype, device="meta")
        return self.sizes.open.like(shape, None, **kind) if self.sizes.open else torch.empty(shape, **kind)

    def device_of(self, node: fx.Node) -> torch.device:
        """Return the device of a node's tensor; inputs that kvpass adds are where the slots are."""
        is_new = value(node).device.type == "meta" or node in self.new_inputs
        return self.device if is_new else value(node).device


def has_loose_strides(tensor: Any) -> bool:
    """Return whether a tensor's strides may change from call to call."""
    return isinstance(tensor, Tensor) and any(isinstance(stride, torch.SymInt) for stride in tensor.stride())
