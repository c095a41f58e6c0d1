"""Replace the inputs and outputs of a step graph.

    before   def step(ids, past_k, past_v):
                 ...
                 return logits, k_0, v_0, past + q
    after    def step(slots_0_key, ..., slots_0_length, ..., weight_0, ids):
                 length = slots_0_length[0].clone()
                 ...
                 return logits, key_0, value_0, real_0, sums_0, ...

The slots and the policy's weights become inputs.  Outputs that grow, such as caches, lengths and masks, are removed:
the caller returns handles, numbers from the host's count, and precomputed values instead.  A chunk's keys,
values and statistics are added.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.fx import alias, shapes, splicing, walk
from kvpass.fx.walk import example_value
from kvpass.rewrite.context import DynamoOutputs, Outputs, PassRecord, PolicyWeights, StepContext
from kvpass.torch_private import dynamo, fx_nodes


def take_slots(context: StepContext) -> PassRecord:
    """Add the slots' tensors and the policy's weights as inputs, which no node reads yet."""
    first = context.placeholders[0]
    for layer, slots in enumerate(context.slots):
        names = [f"slots_{layer}_{name}" for name in slots.names]
        tensors = slots.tensors()
        if context.sizes.dynamic:
            tensors = [_with_dynamic_sizes(context, layer, tensor) for tensor in tensors]
        context.slot_inputs.append(_inputs(context, names, tensors, first))
    context.policy_weights = _take_weights(context, first)
    context.length = _length(context)
    return PassRecord([node.name for node in context.new_inputs])


def _take_weights(context: StepContext, first: fx.Node) -> PolicyWeights:
    """Add inputs for the policy's weights of each layer; layers that share a tensor share its input."""
    by_layer = [layout.policy.layer_weights(layout.layer) for layout in context.layouts]
    distinct = {id(tensor): tensor for own in by_layer for tensor in own}
    tensors = [tensor.to(context.device) for tensor in distinct.values()]
    nodes = _inputs(context, [f"kvpass_weight_{i}" for i in range(len(tensors))], tensors, first)
    input_of = dict(zip(distinct, nodes, strict=True))
    return PolicyWeights(tensors, [[input_of[id(tensor)] for tensor in own] for own in by_layer])


def _with_dynamic_sizes(context: StepContext, layer: int, tensor: Tensor) -> Tensor:
    """Return an example of a slot tensor, whose rows and capacity may be dynamic."""
    capacity = context.capacities[layer]
    shape = [context.batch, *tensor.shape[1:]]
    if not isinstance(capacity, int) and len(shape) > 2 and shape[2] == context.slots[layer].capacity:
        shape[2] = capacity
    if all(isinstance(size, int) for size in shape):
        return tensor
    if not tensor.is_contiguous():
        why = "slots that are not contiguous serve only one number of rows and one capacity"
        walk.refuse(context.sites[0].call, why)
    return context.empty_of_shape(tuple(shape), tensor.dtype)


def _inputs(context: StepContext, names: list[str], tensors: list[Tensor], before: fx.Node) -> list[fx.Node]:
    with context.graph.inserting_before(before):
        nodes = [context.graph.placeholder(name) for name in names]
    for node, tensor in zip(nodes, tensors, strict=True):
        dynamo.as_new_input(node, tensor, in_place=True)
    context.new_inputs.update(nodes)
    return nodes


def _length(context: StepContext) -> fx.Node:
    """Return a copy of the first layer's counter, because that layer's step increases the counter."""
    number = torch.empty((), dtype=torch.int64, device="meta")
    with context.graph.inserting_after(context.placeholders[-1]):
        counter = splicing.emit(context.graph, operator.getitem, context.slot(0, "length"), 0, value=number)
    with context.graph.inserting_after(counter):
        return splicing.emit(context.graph, "clone", counter, value=number)


def drop_growing_outputs(context: StepContext) -> PassRecord:
    """Remove the outputs that grow with the cache and the code for them, and add a chunk's outputs.

    Checks of tensors that grow, such as `assert (mask[:, 0] == 1).all()`, are left to the host.
    """
    context.outputs, kept = _new_outputs(context)
    context.graph.output_node().args = (tuple(kept),)
    context.host_checks = [
        node for node in context.graph.nodes if fx_nodes.has_side_effect(node) and _depends_on_growth(context, node)
    ]
    for node in [*context.host_checks, *filter(fx_nodes.is_log_only, context.graph.nodes)]:
        context.graph.erase_node(node)
    alias.eliminate_dead(context.graph)
    removed = [index for index, new_index in enumerate(context.outputs.dynamo_outputs.indices) if new_index is None]
    return PassRecord([f"output {index}" for index in removed])


def _depends_on_growth(context: StepContext, node: fx.Node) -> bool:
    """Return whether a node is computed from a tensor or size that grows with the cache."""
    sources = walk.ancestors(node)
    return any(
        context.sizes.grows(x) if walk.is_size(x) else context.sizes.growing_dims(example_value(x)) for x in sources
    )


def _new_outputs(context: StepContext) -> tuple[Outputs, list[Any]]:
    originals = walk.results(context.graph)
    caches = {index for site in context.sites for index in (site.keys_out, site.values_out)}
    lengths = {
        index: context.sizes.beyond_length(output)
        for index, output in enumerate(originals)
        if walk.is_size(output) and context.sizes.grows(output)
    }
    grown = [
        index
        for index, output in enumerate(originals)
        if index not in caches | context.attention.dropped_outputs.keys()
        and walk.is_tensor(output)
        and context.sizes.growing_dims(example_value(output))
    ]
    removed = {*caches, *lengths, *grown, *context.attention.dropped_outputs}
    kept = [output for index, output in enumerate(originals) if index not in removed]
    order = iter(range(len(kept)))
    indices = [None if index in removed else next(order) for index in range(len(originals))]
    starts = [*itertools.accumulate(map(len, context.attention.admitted_nodes), initial=len(kept))]
    chunks = [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]
    kept += [node for chunk in context.attention.admitted_nodes for node in chunk]
    valid_output = None if context.valid_node is None else len(kept)
    kept += [] if context.valid_node is None else [context.valid_node]
    outputs = DynamoOutputs(indices, lengths, grown, context.attention.dropped_outputs)
    return Outputs(outputs, chunks, valid_output), kept


def precompute_on_host(context: StepContext) -> PassRecord:
    """Make inputs of values that read all tokens, such as positions counted in a mask, `mask.cumsum(-1)[:, -q:]`.

    Only integers, sizes and buffers may go into such a value, so the host never computes attention or a state.
    """
    reading = [node for node in context.graph.nodes if _ends_growth(context, node)]
    if not reading:
        return PassRecord()
    alias_sets = alias.AliasSets(context.graph)
    found = [
        node
        for node in reading
        if not alias_sets.writers(node) and all(_is_no_state(context, x) for x in walk.ancestors(node))
    ]
    for node in found:
        node.replace_all_uses_with(context.inputs.host_input(node))
    return PassRecord([node.name for node in found])


def _ends_growth(context: StepContext, node: fx.Node) -> bool:
    """Return whether a tensor on the device of the slots does not grow, and is computed from one that does."""

    def grows(tensor: fx.Node) -> bool:
        return walk.is_tensor(tensor) and bool(context.sizes.growing_dims(example_value(tensor)))

    if not walk.is_tensor(node) or example_value(node).device.type != context.device.type:
        return False
    return any(map(grows, node.all_input_nodes)) and not grows(node)


def _is_no_state(context: StepContext, node: fx.Node) -> bool:
    """Return whether a node is a size, integers (as in masks), a buffer, or computed from other nodes."""
    argument = context.argument_of.get(node)
    if argument is None:
        return node.op not in ("placeholder", "get_attr")
    if isinstance(argument, Tensor) and walk.is_inexact(argument):
        return dynamo.is_of_module(node) and not isinstance(argument, torch.nn.Parameter)
    return True


def resolve_sizes(context: StepContext) -> PassRecord:
    """Insert numbers for sizes, and leave no size that follows the cache.

    Raises:
        UnsupportedGraph: a node still depends on the length of the cache.
    """
    alias.eliminate_dead(context.graph)
    sizes = context.sizes
    settled = [node for node in context.graph.nodes if walk.is_size(node) and node.users and not sizes.grows(node)]
    for node in settled:
        if not sizes.is_dynamic(node):
            shapes.replace_by(node, context.size_nodes.number_or_node(sizes.resolved_size(node)))
    alias.eliminate_dead(context.graph)  # with lengths that cancel out
    for node in context.graph.nodes:
        if walk.is_size(node) and node.users and sizes.grows(node):
            context.refuse_growth(_reader(node))
    for argument in context.placeholders:
        if not argument.users and not context.size_nodes.has(argument):
            context.graph.erase_node(argument)
        elif context.sizes.growing_dims(example_value(argument)):
            context.refuse_growth(next(iter(argument.users)))
    return PassRecord([node.name for node in settled])


def _reader(size: fx.Node) -> fx.Node:
    """Return the first operation on tensors that reads a size, or a size computed from it."""
    sizes = walk.reach([size], lambda node: filter(walk.is_size, node.users))
    return min((user for node in sizes for user in node.users if not walk.is_size(user)), default=size)


def order_inputs(context: StepContext) -> PassRecord:
    """Put the placeholders in the order in which `StepSignature.flat_arguments` returns their values."""
    new_inputs = [
        *(node for nodes in context.slot_inputs for node in nodes),
        *dict.fromkeys(node for nodes in context.policy_weights.of_layers for node in nodes),
        *context.inputs.nodes,
    ]
    remaining = set(walk.placeholders(context.graph))
    splicing.put_first(context.graph, [*new_inputs, *(node for node in context.placeholders if node in remaining)])
    return PassRecord([node.name for node in walk.placeholders(context.graph)])
