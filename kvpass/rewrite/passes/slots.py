"""Add inputs for every layer's slots and for the policy's weights, and the counter of tokens.

before   def step(ids, past_k, past_v): ...
after    def step(slots_0_key, ..., slots_0_length, ..., weight_0, ids, past_k, past_v):
             length = slots_0_length[0].clone()
             ...
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.errors import UnsupportedGraph
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record
from kvpass.torch_private import dynamo


def take_slots(step: StepContext) -> Record:
    """Add the inputs, which no node reads yet."""
    first = step.placeholders[0]
    for layer, slots in enumerate(step.slots):
        names = [f"slots_{layer}_{name}" for name in slots.names]
        step.slot_inputs.append(_inputs(step, names, _examples(step, layer), first))
    _take_weights(step, first)
    step.length = _length(step)
    return Record([node.name for node in step.new_inputs])


def _take_weights(step: StepContext, first: fx.Node) -> None:
    """Add inputs for the policy's weights: those that all layers share, or each layer's own."""
    policy = step.layouts[0].policy
    shared = [] if policy.aligns == "never" else [tensor.to(step.device) for tensor in policy.weights()]
    nodes = _inputs(step, [f"kvpass_weight_{i}" for i in range(len(shared))], shared, first)
    step.weights = list(shared)
    for layer, layout in enumerate(step.layouts):
        own = [tensor.to(step.device) for tensor in layout.policy.layer_weights(layout.layer)]
        step.weights += own
        names = [f"kvpass_weight_{layer}_{i}" for i in range(len(own))]
        step.layer_weight_inputs.append([*nodes, *_inputs(step, names, own, first)])
    step.weight_inputs = [*nodes, *(node for each in step.layer_weight_inputs for node in each[len(nodes) :])]


def _examples(step: StepContext, layer: int) -> list[Tensor]:
    tensors = step.slots[layer].tensors()
    return [_with_dynamic_sizes(step, layer, tensor) for tensor in tensors] if step.sizes.open else tensors


def _with_dynamic_sizes(step: StepContext, layer: int, tensor: Tensor) -> Tensor:
    """Return an example of a slot tensor [B, ...] or [B, ., C, ...], where B and C may be dynamic."""
    capacity = step.capacities[layer]
    shape = [step.batch, *tensor.shape[1:]]
    if not isinstance(capacity, int) and len(shape) > 2 and shape[2] == step.slots[layer].capacity:
        shape[2] = capacity
    if all(isinstance(size, int) for size in shape):
        return tensor
    if not tensor.is_contiguous():
        raise UnsupportedGraph(
            f"{step.line(0)}: slots that are not contiguous serve only one number of rows and one capacity"
        )
    return step.of_shape(tuple(shape), tensor.dtype)


def _inputs(step: StepContext, names: list[str], tensors: list[Tensor], before: fx.Node) -> list[fx.Node]:
    with step.graph.inserting_before(before):
        nodes = [step.graph.placeholder(name) for name in names]
    for node, tensor in zip(nodes, tensors, strict=True):
        dynamo.as_new_input(node, tensor, in_place=True)
    step.new_inputs.update(nodes)
    return nodes


def _length(step: StepContext) -> fx.Node:
    """Return a copy of the first layer's counter, because that layer's step increases the counter."""
    with step.graph.inserting_after(step.placeholders[-1]):
        counter = step.graph.call_function(operator.getitem, (step.slot(0, "length"), 0))
    with step.graph.inserting_after(counter):
        length = step.graph.call_method("clone", (counter,))
    for node in (counter, length):
        node.meta["example_value"] = torch.empty((), dtype=torch.int64, device="meta")
    return length
