"""Define the inputs of a step graph other than slots, policy weights and Dynamo's arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import AnySlots, ClassedSlots
from kvpass.fx.splicing import with_value
from kvpass.fx.walk import example_value
from kvpass.rewrite.mask_subgraph import PerTokenInput
from kvpass.rewrite.step_graph import StepGraph
from kvpass.torch_private import dynamo


@dataclasses.dataclass(frozen=True)
class GatheredInput:
    """An input with one entry for each slot of a layer, see `PerTokenInput`.

    Attributes:
        layer: the layer whose slots select the entries.
        is_argument: whether the tensor is one of Dynamo's arguments; otherwise it is precomputed on the host.
        tensor_index: its index among Dynamo's arguments or among the precomputed tensors.
    """

    layer: int
    entry: PerTokenInput
    is_argument: bool
    tensor_index: int

    def gather(self, tensor: Tensor, slots: AnySlots, query_len: int) -> Tensor:
        """Return the entries [B, H', C + q, ...]: of the slots, then of the new tokens."""
        assert not isinstance(slots, ClassedSlots)  # the pass that attends refuses such inputs for slots in classes
        new_index = slots.length[:, None] + torch.arange(query_len, device=slots.length.device)
        index = torch.cat([slots.index, new_index[:, None].expand(-1, slots.index.shape[1], -1)], -1)
        return self.entry.gather(tensor, index.to(tensor.device))


class AddedInputs:
    """Create the other placeholders of a step graph on demand, each once.

    Attributes:
        columns: for Dynamo's placeholders, the inputs with the columns of the new tokens.
        entries: for layers and per-token inputs, the inputs with the entries of the slots.
        host_inputs: for nodes that read all tokens, the inputs with their values, which are precomputed on the host.
    """

    def __init__(self, context: StepGraph) -> None:
        self._context = context
        self.columns: dict[fx.Node, fx.Node] = {}
        self.entries: dict[tuple[int, PerTokenInput], fx.Node] = {}
        self.host_inputs: dict[fx.Node, fx.Node] = {}
        self._valid: dict[tuple[fx.Node, ...], fx.Node] = {}

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.columns.values(), *self.entries.values(), *self.host_inputs.values()]

    def column(self, argument: fx.Node) -> fx.Node:
        """Return the input with the new tokens' columns of an argument that has a column for every token."""
        if argument not in self.columns:
            context, example = self._context, example_value(argument)
            shape = (*map(context.sizes.resolved_size, example.shape[:-1]), context.query_len)
            self.columns[argument] = self._new(f"{argument.name}_now", shape, example.dtype)
        return self.columns[argument]

    def entry(self, layer: int, entry: PerTokenInput) -> fx.Node:
        """Return the input with the entry of each slot's token in a layer."""
        context, name = self._context, entry.node.name
        if (layer, entry) not in self.entries:
            count = context.capacities[layer] + context.query_len
            shape = (context.batch, context.layouts[layer].metadata_heads, count, *entry.entry_shape)
            self.entries[layer, entry] = self._new(f"{name}_at_{layer}", shape, example_value(entry.node).dtype)
        return self.entries[layer, entry]

    def host_input(self, node: fx.Node) -> fx.Node:
        """Return the input with the value of a node that reads all tokens."""
        if node not in self.host_inputs:
            self.host_inputs[node] = self._new(
                f"{node.name}_on_host", self._context.shape(node), example_value(node).dtype
            )
        return self.host_inputs[node]

    def valid(self, layer: int) -> fx.Node:
        """Return the node bool [B, q], false where a new token is padding, for a layer."""
        context, padding_inputs = self._context, self._context.padding_inputs.by_layer[layer]
        if padding_inputs in self._valid:
            return self._valid[padding_inputs]
        shape, device = (context.batch, context.query_len), context.device

        def function(*columns: Tensor) -> list[Tensor]:
            valid = torch.ones(shape, dtype=torch.bool, device=device)
            for column in columns:
                valid = valid & (column != 0)
            return [valid]

        inputs = [self.column(argument) for argument in padding_inputs]
        node = context.compute(function, inputs, context.length.next, f"kvpass_valid_{len(self._valid)}")[0]
        self._valid[padding_inputs] = with_value(node, context.empty_of_shape(shape, torch.bool))
        return node

    def gathered_inputs(self) -> tuple[list[GatheredInput], list[fx.Node]]:
        """Return the inputs of `entries`, and the nodes whose values they gather from if these are precomputed."""
        found, computed = [], list[fx.Node]()
        for layer, entry in self.entries:
            node = entry.node
            if node.op == "placeholder":
                found.append(GatheredInput(layer, entry, True, self._context.placeholders.index(node)))
                continue
            if node not in computed:
                computed.append(node)
            found.append(GatheredInput(layer, entry, False, computed.index(node)))
        return found, computed

    def _new(self, name: str, shape: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        example = self._context.empty_of_shape(shape, dtype)
        with self._context.graph.inserting_after(self._context.placeholders[-1]):
            node = self._context.graph.placeholder(name)
        dynamo.as_new_input(node, example, in_place=False)
        return node
