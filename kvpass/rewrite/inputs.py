"""What a rewritten step graph takes beside slots, weights and Dynamo's arguments: parts of those, and what is made of
them before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import Slots
from kvpass.fx.walk import value
from kvpass.rewrite.mask_slice import PerTokenInput
from kvpass.rewrite.step_graph import StepGraph
from kvpass.torch_private import dynamo

Compute = Callable[[Callable[..., list[Tensor]], list[fx.Node], fx.Node, str], list[fx.Node]]
"""See `kvpass.rewrite.context.StepContext.compute`."""


@dataclasses.dataclass(frozen=True)
class GatheredInput:
    """An entry for each slot of a layer, see `PerTokenInput`.

    Attributes:
        layer: whose slots; None for the tensor itself, in which a reference looks up.
        given: whether the tensor is one of Dynamo's arguments, and not computed beside the graph.
        arg_index: among these, or among what is looked up of those.
    """

    layer: int | None
    entry: PerTokenInput
    given: bool
    arg_index: int

    def of(self, full: Tensor, slots: Slots, queries: int) -> Tensor:
        """[B, H', C + q, ...]: of the slots, then of the new tokens."""
        new = slots.length[:, None] + torch.arange(queries, device=slots.length.device)
        indices = torch.cat([slots.index, new[:, None].expand(-1, slots.index.shape[1], -1)], -1)
        return self.entry.at(full, indices.to(full.device))


class FurtherInputs:
    """Placeholders of what is asked for, each made once.

    Attributes:
        columns: by Dynamo's placeholder, of its columns of the new tokens.
        entries: by layer and entry, of what is looked up for the tokens.
        host_inputs: by node, of what it gives, which is computed beside the graph as it reads all tokens.
    """

    def __init__(self, step: StepGraph, compute: Compute) -> None:
        self._step, self._compute = step, compute
        self.columns: dict[fx.Node, fx.Node] = {}
        self.entries: dict[tuple[int | None, PerTokenInput], fx.Node] = {}
        self.host_inputs: dict[fx.Node, fx.Node] = {}
        self._valid: dict[tuple[fx.Node, ...], fx.Node] = {}

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.columns.values(), *self.entries.values(), *self.host_inputs.values()]

    def column(self, holder: fx.Node) -> fx.Node:
        """The new tokens' columns of one of Dynamo's arguments that has one for every token."""
        if holder not in self.columns:
            shape = (*map(self._step.sizes.fixed, value(holder).shape[:-1]), self._step.queries)
            self.columns[holder] = self._new(f"{holder.name}_now", shape, value(holder).dtype)
        return self.columns[holder]

    def entry(self, layer: int, entry: PerTokenInput) -> fx.Node:
        """What a mask looks up for the token of each slot of a layer, or if `whole` what it looks up in."""
        step, name = self._step, entry.node.name
        if step.whole:
            if (None, entry) not in self.entries:
                self.entries[None, entry] = self._like(f"{name}_whole", value(entry.node))
            return self.entries[None, entry]
        if (layer, entry) not in self.entries:
            count = step.capacities[layer] + step.queries
            shape = (step.batch, step.layouts[layer].groups, count, *entry.rest)
            self.entries[layer, entry] = self._new(f"{name}_at_{layer}", shape, value(entry.node).dtype)
        return self.entries[layer, entry]

    def host_input(self, node: fx.Node) -> fx.Node:
        """What a node gives that reads all tokens."""
        if node not in self.host_inputs:
            self.host_inputs[node] = self._new(f"{node.name}_aside", self._step.shape(node), value(node).dtype)
        return self.host_inputs[node]

    def valid(self, layer: int) -> fx.Node:
        """bool [B, q]: which of the new tokens are not padding, for a layer."""
        padding_inputs = self._step.padding_inputs.sites[layer]
        if padding_inputs not in self._valid:
            self._valid[padding_inputs] = self._emit_valid([self.column(holder) for holder in padding_inputs])
        return self._valid[padding_inputs]

    def _emit_valid(self, columns: list[fx.Node]) -> fx.Node:
        step = self._step
        shape, device = (step.batch, step.queries), step.device

        def function(*columns: Tensor) -> list[Tensor]:
            valid = torch.ones(shape, dtype=torch.bool, device=device)
            for column in columns:
                valid = valid & (column != 0)
            return [valid]

        node = self._compute(function, columns, step.length.next, f"kvpass_valid_{len(self._valid)}")[0]
        node.meta["example_value"] = step.of_shape(shape, torch.bool)
        return node

    @property
    def some_valid(self) -> fx.Node:
        """The first that was asked for of what `valid` gives."""
        return next(iter(self._valid.values()))

    def looked_up(self) -> tuple[list[GatheredInput], list[fx.Node]]:
        """Where entries are looked up, and the nodes among that which are computed beside the graph."""
        made, computed = [], list[fx.Node]()
        for layer, entry in self.entries:
            node = entry.node
            if node.op == "placeholder":
                made.append(GatheredInput(layer, entry, True, self._step.holders.index(node)))
                continue
            if node not in computed:
                computed.append(node)
            made.append(GatheredInput(layer, entry, False, computed.index(node)))
        return made, computed

    def _new(self, name: str, shape: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        return self._like(name, self._step.of_shape(shape, dtype))

    def _like(self, name: str, example: Tensor) -> fx.Node:
        with self._step.graph.inserting_after(self._step.holders[-1]):
            node = self._step.graph.placeholder(name)
        dynamo.as_new_input(node, example, in_place=False)
        return node
