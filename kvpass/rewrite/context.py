"""Hold the state that passes over a step graph share: the graph, the call, and results of earlier passes."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import sympy  # type: ignore[import-untyped]
import torch.fx as fx
from torch import Tensor

from kvpass.errors import UnsupportedGraph
from kvpass.fx import walk
from kvpass.fx.walk import value
from kvpass.rewrite.inputs import FurtherInputs
from kvpass.rewrite.logs import Record
from kvpass.rewrite.rotary_slice import RotarySlice
from kvpass.rewrite.step_graph import StepCall, StepGraph


@dataclasses.dataclass
class Outputs:
    """The outputs of a rewritten graph, with the names that `StepRewrite` uses."""

    outputs: list[int | None]
    lengths: dict[int, Any]
    grown: list[int]
    chunks: list[list[int]]
    valid: int | None


class StepContext(StepGraph):
    """A step graph during its rewrite, with all that the passes insert.

    Attributes:
        inputs: inputs besides slots and Dynamo's arguments.

    Results of passes for later passes, besides those of `StepGraph`:
        weights, weight_inputs: the policy's own tensors and their placeholders; `layer_weight_inputs` lists those that
            each layer reads.
        length_nodes: nodes computed from `length`, each with its expression.
        key_indices: for each window, the nodes that hold the indices of the keys.
        rotaries, raw_keys: for each layer, the rotary embedding of its keys, and the keys before it; empty if keys are
            stored as they are attended to.
        replaced_positions: indices of Dynamo's arguments that ranks replaced.
        write_indices: for each layer, a copy of the index of the slot that it writes to; empty if none is needed.
        replaced: the node that replaces the model's attention, by the name of its node.
        masks: for each attention call, by its name, the slots that it sees and the bias on them, if any, of each class
            of heads.
        chunks: for each layer, stored key, value, valid and statistics of a chunk.
        unread: outputs that grow and that nothing reads on slots: the index of the argument that each extends, and the
            dimension.
        valid_output: bool [B, 1], which tokens are real, if the caller counts tokens.
        outputs: the outputs of the rewritten graph.
        records: what the passes did.
    """

    def __init__(self, call: StepCall, whole: bool = False) -> None:
        super().__init__(call, whole)
        self.inputs = FurtherInputs(self)
        self.weights: list[Tensor] = []
        self.weight_inputs: list[fx.Node] = []
        self.layer_weight_inputs: list[list[fx.Node]] = []
        self.length_nodes: dict[fx.Node, sympy.Expr] = {}
        self.key_indices: dict[int | None, list[fx.Node]] = {}
        self.rotaries: list[RotarySlice] = []
        self.raw_keys: list[fx.Node] = []
        self.replaced_positions: list[int] = []
        self.write_indices: list[fx.Node] = []
        self.replaced: dict[str, fx.Node] = {}
        self.masks: dict[str, list[tuple[fx.Node, fx.Node | None]]] = {}
        self.chunks: list[list[fx.Node]] = []
        self.unread: dict[int, tuple[int, int]] = {}
        self.valid_output: fx.Node | None = None
        self.outputs: Outputs
        self.records: list[Record] = []

    def copied_slots(self, layer: int) -> list[fx.Node]:
        """Return a layer's slots with copies of their metadata, everything besides K and V, from before the step."""
        names, stored = self.slots[layer].names, self.slots[layer].stored
        nodes = zip(names, self.slot_inputs[layer], strict=True)
        return [node if name in stored else self._copy(node) for name, node in nodes]

    def _copy(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_after(self.length):
            copied = self.graph.call_method("clone", (node,))
        copied.meta["example_value"] = value(node)
        return copied

    def refuse_growth(self, node: fx.Node) -> None:
        """Raise UnsupportedGraph: a node depends on the cache's length in a way that kvpass cannot express."""
        found = value(node) if walk.is_size(node) else "a tensor that grows with it"
        raise UnsupportedGraph(
            f"{walk.source_line(node)}: {walk.name_of(node)!r} still depends on the length of the cache ({found}); "
            "it is not a mask, a rotary embedding or position arithmetic that kvpass can express on slots"
        )


class Pass(Protocol):
    """A step of the rewrite: it changes the graph of a context and records there what later passes need."""

    __name__: str

    def __call__(self, step: StepContext, /) -> Record: ...
