"""Hold the state that passes over a step graph share, with the typed result of each pass."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import AnySlots, Slots
from kvpass.fx.walk import value
from kvpass.rewrite.mask_slice import PerTokenInput
from kvpass.rewrite.rotary_slice import RotarySlice
from kvpass.rewrite.step_graph import StepCall, StepGraph
from kvpass.torch_private import dynamo


@dataclasses.dataclass
class PassRecord:
    """The record of a pass over one graph.

    Attributes:
        matched: the nodes that it rewrote or inserted.
        left: the nodes that it left unchanged, each with the reason.
        name: the name of the pass.
        milliseconds: its duration.
    """

    matched: list[str] = dataclasses.field(default_factory=list)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = ""
    milliseconds: float = 0.0

    def __str__(self) -> str:
        unchanged = "".join(f"; left {name}, as {why}" for name, why in self.left.items())
        return f"{self.name}: {len(self.matched)} rewritten in {self.milliseconds:.1f} ms{unchanged}"


@dataclasses.dataclass(frozen=True)
class PolicyWeights:
    """The policy's own tensors as inputs of the graph: the result of `take_slots`.

    Attributes:
        tensors: on the device of the slots, in the order of their placeholders.
        of_layers: for each layer the placeholders that it reads: those that all layers share, then its own.
    """

    tensors: list[Tensor]
    of_layers: list[list[fx.Node]]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The values that the graph computes from the cache's length: the result of `put_length_on_device`.

    Attributes:
        nodes: nodes computed from `length`, each with its expression.
        key_indices: for each window, the nodes that hold the indices of the keys.
    """

    nodes: dict[fx.Node, sympy.Expr]
    key_indices: dict[int | None, list[fx.Node]]


@dataclasses.dataclass(frozen=True)
class Rotations:
    """The rotary embeddings of keys: the result of `rank_positions`, empty if keys are stored as they are attended to.

    Attributes:
        slices, raw_keys: for each layer, its embedding as a function, and the keys before it.
        positions: indices of Dynamo's arguments that ranks replaced.
    """

    slices: list[RotarySlice] = dataclasses.field(default_factory=list)
    raw_keys: list[fx.Node] = dataclasses.field(default_factory=list)
    positions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class AttentionResults:
    """The nodes that replace the attention calls: the result of `attend_on_slots`, which adds them call by call.

    Attributes:
        replaced: the node that replaces the model's attention, by the name of its node.
        masks: for each attention call, by its name, the slots that it sees and the bias on them, if any, of each class
            of heads.
        admitted_outputs: for each layer, stored key, value, valid and statistics of a chunk.
        dropped_outputs: outputs that grow and that nothing reads on slots: the index of the argument that each
            extends, and the dimension.
    """

    replaced: dict[str, fx.Node] = dataclasses.field(default_factory=dict)
    masks: dict[str, list[tuple[fx.Node, fx.Node | None]]] = dataclasses.field(default_factory=dict)
    admitted_outputs: list[list[fx.Node]] = dataclasses.field(default_factory=list)
    dropped_outputs: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a rewritten graph, by the names of `StepRewrite`: the result of `drop_growing_outputs`."""

    outputs: list[int | None]
    length_outputs: dict[int, Any]
    grown: list[int]
    admitted_outputs: list[list[int]]
    valid_output: int | None


class StepContext(StepGraph):
    """A step graph during its rewrite, with all that the passes insert.

    Attributes:
        inputs: inputs besides slots and Dynamo's arguments.
        records: of the passes that have run.

    Each of the others is set by one pass, and cannot be read before it:
        policy_weights, lengths, rotations, attention, outputs: see their classes.
        write_indices: of `copy_write_indices`, for each layer a copy of the index of the slot that it writes to; empty
            if none is needed.
        valid_output: of `move_counters_to_caller`, bool [B, 1], which tokens are real; None if the graph counts tokens.
    """

    policy_weights: PolicyWeights
    length_nodes: Lengths
    rotations: Rotations
    write_indices: list[fx.Node]
    attention: AttentionResults
    valid_output: fx.Node | None
    outputs: Outputs

    def __init__(self, call: StepCall, gathers_all_tokens: bool = False) -> None:
        super().__init__(call, gathers_all_tokens)
        self.inputs = AddedInputs(self)
        self.records: list[PassRecord] = []

    def copy_slots(self, layer: int) -> list[fx.Node]:
        """Return a layer's slots with copies of their metadata, everything besides K and V, from before the step."""
        names, stored = self.slots[layer].names, self.slots[layer].kv_names
        nodes = zip(names, self.slot_inputs[layer], strict=True)
        return [node if name in stored else self._copy(node) for name, node in nodes]

    def _copy(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_after(self.length):
            copied = self.graph.call_method("clone", (node,))
        copied.meta["example_value"] = value(node)
        return copied


class Pass(Protocol):
    """A graph pass: it changes the graph of a context, and records there what later passes need."""

    __name__: str

    def __call__(self, step: StepContext, /) -> PassRecord: ...


@dataclasses.dataclass(frozen=True)
class GatheredInput:
    """An input with one entry for each slot of a layer, see `PerTokenInput`.

    Attributes:
        layer: the layer whose slots select the entries; None for the whole tensor, from which a reference gathers.
        is_argument: whether the tensor is one of Dynamo's arguments; otherwise it is precomputed on the host.
        tensor_index: its index among Dynamo's arguments or among the precomputed tensors.
    """

    layer: int | None
    entry: PerTokenInput
    is_argument: bool
    tensor_index: int

    def gather(self, tensor: Tensor, slots: AnySlots, queries: int) -> Tensor:
        """Return the entries [B, H', C + q, ...]: of the slots, then of the new tokens."""
        assert isinstance(slots, Slots)  # the pass that attends refuses such inputs for slots in classes
        new_index = slots.length[:, None] + torch.arange(queries, device=slots.length.device)
        index = torch.cat([slots.index, new_index[:, None].expand(-1, slots.index.shape[1], -1)], -1)
        return self.entry.gather(tensor, index.to(tensor.device))


class AddedInputs:
    """Create the further placeholders of a step graph on demand, each once.

    Attributes:
        columns: for Dynamo's placeholders, the inputs with the columns of the new tokens.
        entries: for layers and per-token inputs, the inputs with the entries of the slots.
        host_inputs: for nodes that read all tokens, the inputs with their values, which are precomputed on the host.
    """

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self.columns: dict[fx.Node, fx.Node] = {}
        self.entries: dict[tuple[int | None, PerTokenInput], fx.Node] = {}
        self.host_inputs: dict[fx.Node, fx.Node] = {}
        self._valid: dict[tuple[fx.Node, ...], fx.Node] = {}

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.columns.values(), *self.entries.values(), *self.host_inputs.values()]

    def column(self, argument: fx.Node) -> fx.Node:
        """Return the input with the new tokens' columns of an argument that has a column for every token."""
        if argument not in self.columns:
            shape = (*map(self._step.sizes.fixed_size, value(argument).shape[:-1]), self._step.queries)
            self.columns[argument] = self._new(f"{argument.name}_now", shape, value(argument).dtype)
        return self.columns[argument]

    def entry(self, layer: int, entry: PerTokenInput) -> fx.Node:
        """Return the input with the entry of each slot's token in a layer, with `gathers_all_tokens` for all tokens."""
        step, name = self._step, entry.node.name
        if step.gathers_all_tokens:
            if (None, entry) not in self.entries:
                self.entries[None, entry] = self._like(f"{name}_whole", value(entry.node))
            return self.entries[None, entry]
        if (layer, entry) not in self.entries:
            count = step.capacities[layer] + step.queries
            shape = (step.batch, step.layouts[layer].metadata_heads, count, *entry.entry_shape)
            self.entries[layer, entry] = self._new(f"{name}_at_{layer}", shape, value(entry.node).dtype)
        return self.entries[layer, entry]

    def host_input(self, node: fx.Node) -> fx.Node:
        """Return the input with the value of a node that reads all tokens."""
        if node not in self.host_inputs:
            self.host_inputs[node] = self._new(f"{node.name}_on_host", self._step.shape(node), value(node).dtype)
        return self.host_inputs[node]

    def valid(self, layer: int) -> fx.Node:
        """Return the node bool [B, q], false where a new token is padding, for a layer."""
        step, padding_inputs = self._step, self._step.padding_inputs.sites[layer]
        if padding_inputs in self._valid:
            return self._valid[padding_inputs]
        shape, device = (step.batch, step.queries), step.device

        def function(*columns: Tensor) -> list[Tensor]:
            valid = torch.ones(shape, dtype=torch.bool, device=device)
            for column in columns:
                valid = valid & (column != 0)
            return [valid]

        inputs = [self.column(argument) for argument in padding_inputs]
        node = step.compute(function, inputs, step.length.next, f"kvpass_valid_{len(self._valid)}")[0]
        node.meta["example_value"] = step.empty_of_shape(shape, torch.bool)
        self._valid[padding_inputs] = node
        return node

    @property
    def some_valid(self) -> fx.Node:
        """The result of the first call of `valid`."""
        return next(iter(self._valid.values()))

    def gathered_inputs(self) -> tuple[list[GatheredInput], list[fx.Node]]:
        """Return the inputs of `entries`, and the nodes whose values they gather from if these are precomputed."""
        found, computed = [], list[fx.Node]()
        for layer, entry in self.entries:
            node = entry.node
            if node.op == "placeholder":
                found.append(GatheredInput(layer, entry, True, self._step.placeholders.index(node)))
                continue
            if node not in computed:
                computed.append(node)
            found.append(GatheredInput(layer, entry, False, computed.index(node)))
        return found, computed

    def _new(self, name: str, shape: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        return self._like(name, self._step.empty_of_shape(shape, dtype))

    def _like(self, name: str, example: Tensor) -> fx.Node:
        with self._step.graph.inserting_after(self._step.placeholders[-1]):
            node = self._step.graph.placeholder(name)
        dynamo.as_new_input(node, example, in_place=False)
        return node
