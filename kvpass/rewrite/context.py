"""What the passes over a step graph share: the graph, the call that it is rewritten for, and what each pass leaves."""

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
    """A step graph while it is rewritten, with what is put into it.

    Attributes:
        inputs: what it takes beside slots and Dynamo's arguments.
        open: the nodes of sizes that stay open.

    And what passes leave for those after them, beside what `StepGraph` has:
        weights, weight_inputs: the policy's own tensors and their placeholders.
        on_length: nodes that are computed from `length`, and what each is.
        counts: for each window the nodes that count the keys.
        rotaries, raw_keys: for each layer the rotary embedding of its keys, and these before it; none where keys are
            stored as they are attended to.
        given_positions: the places of Dynamo's arguments that ranks have taken the place of.
        places: for each layer a copy of the slot that it writes to, none where it needs none.
        replaced: what stands for the model's own attention, by the name of its node.
        masks: for each attention call, by its name, which slots it sees and the bias on them, if there is one.
        chunks: for each layer stored key, value, valid and statistics of a chunk.
        unread: outputs that grow and that nothing reads on slots: the argument that each is longer than, and the
            dimension.
        counted: bool [B, 1], which of the tokens were real, if the caller counts.
        outputs: where the rewritten graph has what.
        records: what the passes did.
    """

    def __init__(self, call: StepCall, whole: bool = False) -> None:
        super().__init__(call, whole)
        self.open = SizeNodes(self)
        self.inputs = FurtherInputs(self, self.compute)

        self.weights: list[Tensor] = []
        self.weight_inputs: list[fx.Node] = []
        self.on_length: dict[fx.Node, sympy.Expr] = {}
        self.counts: dict[int | None, list[fx.Node]] = {}
        self.rotaries: list[RotarySlice] = []
        self.raw_keys: list[fx.Node] = []
        self.given_positions: list[int] = []
        self.places: list[fx.Node] = []
        self.replaced: dict[str, fx.Node] = {}
        self.masks: dict[str, tuple[fx.Node, fx.Node | None]] = {}
        self.chunks: list[list[fx.Node]] = []
        self.unread: dict[int, tuple[int, int]] = {}
        self.counted: fx.Node | None = None
        self.outputs: Outputs
        self.records: list[Record] = []

    def compute(
        self, function: Callable[..., list[Tensor]], nodes: list[fx.Node], before: fx.Node, name: str
    ) -> list[fx.Node]:
        """The nodes of what a function computes from the values of nodes, spliced in before another node."""
        return self.spliced(self.traced(function, nodes), nodes, before, name)

    def traced(self, function: Callable[..., Any], nodes: list[fx.Node], layer: int | None = None) -> fx.GraphModule:
        """The operators of a function of the values of nodes, for `spliced`.

        Open sizes are inputs as well, as the function may know them from elsewhere: those of a layer if it is given.
        """
        count, given = len(nodes), [*nodes, *self._open_for(layer)]
        with fake_tensors.fake_mode(self.sizes.open) as fake:
            examples = [fake(self.example(node)) for node in given]
            return fake_tensors.trace(lambda *values: function(*values[:count]), examples)

    def spliced(
        self, traced: fx.GraphModule, nodes: list[fx.Node], before: fx.Node, name: str, layer: int | None = None
    ) -> list[fx.Node]:
        """What `traced` made, before another node; what it made for a layer serves one that is like it."""
        return splicing.splice(self.gm, traced, [*nodes, *self._open_for(layer)], before, name)

    def _open_for(self, layer: int | None) -> list[fx.Node]:
        return self.open.all if layer is None else self.open.for_layer(layer)

    def copied_slots(self, layer: int) -> list[fx.Node]:
        """A layer's slots with their metadata, all beside K and V, as it is before the step."""
        names, stored = self.slots[layer].names, self.slots[layer].stored
        nodes = zip(names, self.slot_inputs[layer], strict=True)
        return [node if name in stored else self._copy(node) for name, node in nodes]

    def _copy(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_after(self.length):
            copied = self.graph.call_method("clone", (node,))
        copied.meta["example_value"] = value(node)
        return copied

    def refuse_growth(self, node: fx.Node) -> None:
        """Raises: UnsupportedGraph: a node depends on the cache's length in a way that is not understood."""
        what = value(node) if walk.is_size(node) else "a tensor that grows with it"
        raise UnsupportedGraph(
            f"{walk.source_line(node)}: {walk.name_of(node)!r} still depends on the length of the cache ({what}); "
            "it is not a mask, a rotary embedding or position arithmetic that kvpass can express on slots"
        )


class Pass(Protocol):
    """A step of the rewrite, which changes the graph of a context and leaves there what later ones need."""

    __name__: str

    def __call__(self, step: StepContext, /) -> Record: ...
