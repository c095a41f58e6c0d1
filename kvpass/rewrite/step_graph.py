"""A copy of a step graph, and what is known of it and of its call while it is rewritten."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.fx import walk
from kvpass.fx.walk import value
from kvpass.rewrite.call import StepCall
from kvpass.torch_private import fx_nodes


class StepGraph:
    """A copy of a step graph while it is rewritten.

    Attributes:
        call: what it is rewritten for.
        gm, graph: the copy; sites, holders, telling: the call's sites, the placeholders and the inputs that tell
            padding, in the copy.
        actual: Dynamo's argument at each placeholder.
        batch, queries: B and q, which may be open sizes.
        layouts, capacities: of each layer the layout, and how many slots there are; capacities and budgets may be open.
        decodes: one token goes to a slot that is free, and not, as a chunk does, beside the slots.
        ranked: keys are stored before their rotary embedding and numbered by rank.
        whole: masks look up entries in the tensors that have one for every token; by default a graph is given those
            of its slots alone.
        slot_inputs: for each layer the placeholders of its slots' tensors, in the order of `Slots.names`.
        our_inputs: all of these placeholders, and those of the policy's own tensors.
        length: int64 of no dimensions, the tokens seen, padding included.
    """

    def __init__(self, call: StepCall, whole: bool = False) -> None:
        copy, moved = fx_nodes.copy_graph_module(call.gm)
        self.call, self.gm, self.graph = call, copy, copy.graph
        self.sites = [site.moved(moved) for site in call.sites]
        self.slots, self.sizes, self.windows = call.slots, call.sizes, call.windows
        self.layouts = call.dynamic_dims or call.layouts
        self.holders = walk.placeholders(self.graph)
        self.actual = dict(zip(self.holders, call.arguments, strict=True))
        self.padding_inputs = call.padding_inputs.moved(moved)
        self.batch = call.sizes.fixed(value(call.sites[0].key).shape[0]) if call.sizes.open else call.layouts[0].batch
        self.queries = call.sizes.queries
        self.capacities = [
            slots.capacity if isinstance(layout.capacity, int) else layout.capacity
            for layout, slots in zip(self.layouts, call.slots, strict=True)
        ]
        # A prompt that is still held whole takes its first token in as a chunk.
        roomy = all(s.capacity == x.capacity for s, x in zip(call.slots, call.layouts, strict=True))
        self.decodes = bool(self.queries == 1) and roomy
        self.ranked = call.layouts[0].ranked
        self.whole = whole
        self.slot_inputs: list[list[fx.Node]] = []
        self.our_inputs: set[fx.Node] = set()
        self.length: fx.Node

    @property
    def decodes_on_gpu(self) -> bool:
        return self.decodes and self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self.layouts[0].device

    def slot(self, layer: int, name: str) -> fx.Node:
        """The placeholder of one of a layer's tensors, by its name in `Slots.names`."""
        return self.slot_inputs[layer][self.slots[layer].names.index(name)]

    def line(self, layer: int = 0) -> str:
        """The line of the user's source at which a layer attends."""
        return walk.source_line(self.sites[layer].call)

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        """The shape of a node's tensor in this call."""
        return tuple(size if isinstance(size, int) else self.sizes.fixed(size) for size in value(node).shape)

    def example(self, node: fx.Node) -> Any:
        """A tensor like the one that the node will be, strides included; or the size that it is."""
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
        """What describes a dense tensor of ours."""
        kind: dict[str, Any] = dict(dtype=dtype, device="meta")
        return self.sizes.open.like(shape, None, **kind) if self.sizes.open else torch.empty(shape, **kind)

    def device_of(self, node: fx.Node) -> torch.device:
        """Where a node's tensor is; our own inputs are where the slots are."""
        ours = value(node).device.type == "meta" or node in self.our_inputs
        return self.device if ours else value(node).device


def has_loose_strides(tensor: Any) -> bool:
    """Whether a tensor's strides may change from call to call."""
    return isinstance(tensor, Tensor) and any(isinstance(stride, torch.SymInt) for stride in tensor.stride())
