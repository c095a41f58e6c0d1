"""Hold the state that passes over a step graph share: the graph, the call, and results of earlier passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import sympy  # type: ignore[import-untyped]
import torch.fx as fx
from torch import Tensor

from kvpass.errors import UnsupportedGraph
from kvpass.fx import splicing, walk
from kvpass.fx.walk import value
from kvpass.rewrite.call import StepCall
from kvpass.rewrite.inputs import FurtherInputs
from kvpass.rewrite.record import Record
from kvpass.rewrite.result import Outputs
from kvpass.rewrite.rotary_slice import RotarySlice
from kvpass.rewrite.step_graph import StepGraph
from kvpass.rewrite.symbolic_sizes import SizeNodes
from kvpass.torch_private import fake_tensors


class StepContext(StepGraph):
    """A step graph during its rewrite, with all that the passes insert.

    Attributes:
        inputs: inputs besides slots and Dynamo's arguments.
        size_nodes: the nodes of sizes that stay dynamic.

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
        masks: for each attention call, by its name, the slots that it sees and the bias on them, if any.
        chunks: for each layer, stored key, value, valid and statistics of a chunk.
        unread: outputs that grow and that nothing reads on slots: the index of the argument that each extends, and the
            dimension.
        valid_output: bool [B, 1], which tokens are real, if the caller counts tokens.
        outputs: the outputs of the rewritten graph.
        records: what the passes did.
    """

    def __init__(self, call: StepCall, whole: bool = False) -> None:
        super().__init__(call, whole)
        self.size_nodes = SizeNodes(self)
        self.inputs = FurtherInputs(self, self.compute)

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
        self.masks: dict[str, tuple[fx.Node, fx.Node | None]] = {}
        self.chunks: list[list[fx.Node]] = []
        self.unread: dict[int, tuple[int, int]] = {}
        self.valid_output: fx.Node | None = None
        self.outputs: Outputs
        self.records: list[Record] = []

    def compute(
        self, function: Callable[..., list[Tensor]], nodes: list[fx.Node], before: fx.Node, name: str
    ) -> list[fx.Node]:
        """Splice a function of the values of nodes in before another node; return its result nodes."""
        return self.splice(self.trace(function, nodes), nodes, before, name)

    def trace(self, function: Callable[..., Any], nodes: list[fx.Node], layer: int | None = None) -> fx.GraphModule:
        """Trace a function of the values of nodes, for `splice`.

        Dynamic sizes become inputs as well, because the function may read them elsewhere: those of `layer` if it is
        given.
        """
        count, inputs = len(nodes), [*nodes, *self._size_nodes_of(layer)]
        with fake_tensors.fake_mode(self.sizes.open) as fake:
            examples = [fake(self.example(node)) for node in inputs]
            return fake_tensors.trace(lambda *values: function(*values[:count]), examples)

    def splice(
        self, traced: fx.GraphModule, nodes: list[fx.Node], before: fx.Node, name: str, layer: int | None = None
    ) -> list[fx.Node]:
        """Splice a traced function in before a node; return its result nodes.  Equal layers may share a trace."""
        return splicing.splice(self.gm, traced, [*nodes, *self._size_nodes_of(layer)], before, name)

    def _size_nodes_of(self, layer: int | None) -> list[fx.Node]:
        return self.size_nodes.all if layer is None else self.size_nodes.for_layer(layer)

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
