"""Hold the state that passes over a step graph share, with the typed result of each pass."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import sympy  # type: ignore[import-untyped]
import torch.fx as fx
from torch import Tensor

from kvpass.fx import splicing
from kvpass.fx.walk import example_value
from kvpass.rewrite.inputs import AddedInputs
from kvpass.rewrite.rotary_subgraph import RotarySubgraph
from kvpass.rewrite.step_graph import StepGraph, StepRewriteInput


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
        of_layers: the placeholders of each layer's weights; layers that share a tensor share its placeholder.
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
class RotaryResults:
    """The rotary embeddings of keys: the result of `rank_positions`, empty if keys are stored as attention reads them.

    Attributes:
        subgraphs, raw_keys: for each layer, its embedding as a function, and the keys before it.
        positions: indices of Dynamo's arguments that ranks replaced.
    """

    subgraphs: list[RotarySubgraph] = dataclasses.field(default_factory=list)
    raw_keys: list[fx.Node] = dataclasses.field(default_factory=list)
    positions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class AttentionResults:
    """The nodes that replace the attention calls: the result of `attend_on_slots`.

    Attributes:
        replaced: the node that replaces the model's attention, by the name of its node.
        masks: for each attention call, by its name, the slots that it sees and the bias on them, if any, of each class
            of heads.
        admitted_nodes: for each layer, stored key, value, valid and statistics of a chunk.
        dropped_outputs: see `DynamoOutputs.dropped`.
    """

    replaced: dict[str, fx.Node]
    masks: dict[str, list[tuple[fx.Node, fx.Node | None]]]
    admitted_nodes: list[list[fx.Node]]
    dropped_outputs: dict[int, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class DynamoOutputs:
    """How the outputs of Dynamo's graph are made from the outputs of the rewritten graph.

    Attributes:
        indices: for each output, its index in the rewritten graph; None for a cache, and for the outputs below.
        lengths: outputs that are the tokens seen before plus a number, with that number, which may be a dynamic size.
        grown: outputs that grow, such as a mask that another graph reads; the host graph computes them.
        dropped: outputs that grow and that nothing reads on slots: the index of the argument that each extends, and
            the dimension.
    """

    indices: list[int | None] = dataclasses.field(default_factory=list)
    lengths: dict[int, Any] = dataclasses.field(default_factory=dict)
    grown: list[int] = dataclasses.field(default_factory=list)
    dropped: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a rewritten graph, by the names of `StepSignature`: the result of `drop_growing_outputs`."""

    dynamo_outputs: DynamoOutputs
    admitted_outputs: list[list[int]]
    valid_output: int | None


class StepContext(StepGraph):
    """A step graph during its rewrite, with all that the passes insert.

    Attributes:
        inputs: inputs other than slots and Dynamo's arguments.
        records: of the passes that have run.

    Each of the others is set by one pass, and cannot be read before it:
        policy_weights, lengths, rotations, attention, outputs: see their classes.
        write_indices: by `copy_write_indices`, for each layer a copy of the index of the slot that it writes to; empty
            if none is needed.
        host_checks: by `drop_growing_outputs`, the calls that check tensors which grow; they have left the graph.
        valid_node: by `move_counters_to_caller`, bool [B, 1], which tokens are real; None if the graph counts tokens.
    """

    policy_weights: PolicyWeights
    lengths: Lengths
    rotations: RotaryResults
    write_indices: list[fx.Node]
    attention: AttentionResults
    valid_node: fx.Node | None
    host_checks: list[fx.Node]
    outputs: Outputs

    def __init__(self, given: StepRewriteInput) -> None:
        super().__init__(given)
        self.inputs = AddedInputs(self)
        self.records: list[PassRecord] = []

    def copy_slots(self, layer: int) -> list[fx.Node]:
        """Return a layer's slots with copies of their metadata (all but K and V) from before the step."""
        names, stored = self.slots[layer].names, self.slots[layer].kv_names
        nodes = zip(names, self.slot_inputs[layer], strict=True)
        return [node if name in stored else self._copy(node) for name, node in nodes]

    def _copy(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_after(self.length):
            return splicing.emit(self.graph, "clone", node, value=example_value(node))


class Pass(Protocol):
    """A graph pass: it changes the graph of a context, and records there the values that later passes need."""

    __name__: str

    def __call__(self, context: StepContext, /) -> PassRecord: ...
