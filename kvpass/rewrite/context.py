"""What the passes over a step graph share: the graph, the call that it is rewritten for, and what each pass leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass import compat, graphs
from kvpass.capture.sites import AttentionSite
from kvpass.errors import UnsupportedGraph
from kvpass.graphs import Sizes, value
from kvpass.layer.slots import Layout, Slots
from kvpass.rewrite.inputs import FurtherInputs
from kvpass.rewrite.open import OpenNodes
from kvpass.rewrite.record import Record
from kvpass.rewrite.result import Outputs
from kvpass.rewrite.rotary_slice import RotarySlice


@dataclasses.dataclass(frozen=True)
class Telling:
    """Which inputs tell padding from real tokens, see `kvpass.capture.hiding`.

    Attributes:
        sites: for each site those that do in all masks on its cache.
        known: those of which every held token is known to have an entry of one.
    """

    sites: tuple[tuple[fx.Node, ...], ...]
    known: frozenset[fx.Node]

    def moved(self, to: dict[fx.Node, fx.Node]) -> Telling:
        """The same in a copy of the graph."""
        sites = tuple(tuple(to[node] for node in told) for told in self.sites)
        return Telling(sites, frozenset(to[node] for node in self.known))


@dataclasses.dataclass(frozen=True)
class StepCall:
    """A canonical step graph and the call that it is rewritten for.

    Attributes:
        gm, sites: the graph, which stays as it is, and its attention on caches.
        layouts, slots: of each layer.
        arguments: Dynamo's.
        sizes: how the graph's symbols are to be read in this call.
        seen: tokens before it.
        windows: for each layer how many tokens the model stores, None for all.
        telling: the inputs that tell padding.
        sweep: whether it is a step with the policy's sweep.
        opened: the layouts with open sizes for what other calls may differ in, if there are any.
    """

    gm: fx.GraphModule
    sites: list[AttentionSite]
    layouts: list[Layout]
    slots: list[Slots]
    arguments: tuple[Any, ...]
    sizes: Sizes
    seen: int
    windows: tuple[int | None, ...]
    telling: Telling
    sweep: bool = False
    opened: list[Layout] = dataclasses.field(default_factory=list)

    def of(self, change: Callable[[Layout], Layout]) -> StepCall:
        """The same call on slots that are laid out otherwise; their rows hold no data."""
        layouts, opened = [change(each) for each in self.layouts], [change(each) for each in self.opened]
        slots = [each.described(layout) for each, layout in zip(self.slots, layouts, strict=True)]
        return dataclasses.replace(self, layouts=layouts, opened=opened, slots=slots)


class StepContext:
    """A copy of a step graph while it is rewritten.

    Attributes:
        call: what it is rewritten for.
        gm, graph: the copy; sites, holders, telling: the call's sites, the placeholders and the inputs that tell
            padding, in the copy.
        actual: Dynamo's argument at each placeholder.
        rows, queries: B and q, which may be open sizes.
        layouts, capacities: of each layer the layout, and how many slots there are; capacities and budgets may be open.
        decodes: one token goes to a slot that is free, and not, as a chunk does, beside the slots.
        ranked: keys are stored before their rotary embedding and numbered by rank.
        whole: masks look up entries in the tensors that have one for every token; by default a graph is given those
            of its slots alone.
        inputs: what it takes beside slots and Dynamo's arguments.
        open: the nodes of sizes that stay open.

    And what passes leave for those after them:
        slot_inputs: for each layer the placeholders of its slots' tensors, in the order of `Slots.names`.
        weights, weight_inputs: the policy's own tensors and their placeholders.
        own: all of these placeholders.
        length: int64 of no dimensions, the tokens seen, padding included.
        on_length: nodes that are computed from it, and what each is.
        counts: for each window the nodes that count the keys.
        rotaries, raw_keys: for each layer the rotary embedding of its keys, and these before it; none where keys are
            stored as they are attended to.
        given_positions: the places of Dynamo's arguments that ranks have taken the place of.
        places: for each layer a copy of the slot that it writes to, none where it needs none.
        replaced: what stands for the model's own attention, by the name of its node.
        chunks: for each layer stored key, value, real and statistics of a chunk.
        unread: outputs that grow and that nothing reads on slots: the argument that each is longer than, and the
            dimension.
        counted: bool [B, 1], which of the tokens were real, if the caller counts.
        outputs: where the rewritten graph has what.
        records: what the passes did.
    """

    def __init__(self, call: StepCall, whole: bool = False) -> None:
        copy, moved = compat.copy_graph_module(call.gm)
        self.call, self.gm, self.graph = call, copy, copy.graph
        self.sites = [site.moved(moved) for site in call.sites]
        self.slots, self.sizes, self.windows = call.slots, call.sizes, call.windows
        self.layouts = call.opened or call.layouts
        self.holders = graphs.placeholders(self.graph)
        self.actual = dict(zip(self.holders, call.arguments, strict=True))
        self.telling = call.telling.moved(moved)
        self.rows = call.sizes.fixed(value(call.sites[0].key).shape[0]) if call.sizes.open else call.layouts[0].rows
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
        self.open = OpenNodes(self)
        self.inputs = FurtherInputs(self)

        self.slot_inputs: list[list[fx.Node]] = []
        self.weights: list[Tensor] = []
        self.weight_inputs: list[fx.Node] = []
        self.own: set[fx.Node] = set()
        self.length: fx.Node
        self.on_length: dict[fx.Node, sympy.Expr] = {}
        self.counts: dict[int | None, list[fx.Node]] = {}
        self.rotaries: list[RotarySlice] = []
        self.raw_keys: list[fx.Node] = []
        self.given_positions: list[int] = []
        self.places: list[fx.Node] = []
        self.replaced: dict[str, fx.Node] = {}
        self.chunks: list[list[fx.Node]] = []
        self.unread: dict[int, tuple[int, int]] = {}
        self.counted: fx.Node | None = None
        self.outputs: Outputs
        self.records: list[Record] = []

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
        return graphs.source_line(self.sites[layer].call)

    # -- what nodes will be --------------------------------------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        """The shape of a node's tensor in this call."""
        return tuple(size if isinstance(size, int) else self.sizes.fixed(size) for size in value(node).shape)

    def example(self, node: fx.Node) -> Any:
        """A tensor like the one that the node will be, strides included; or the size that it is."""
        if graphs.is_size(node):
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
        ours = value(node).device.type == "meta" or node in self.own
        return self.device if ours else value(node).device

    # -- new nodes -----------------------------------------------------------------------------------------------

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
        with compat.fake_mode(self.sizes.open) as fake:
            examples = [fake(self.example(node)) for node in given]
            return compat.trace(lambda *values: function(*values[:count]), examples)

    def spliced(
        self, traced: fx.GraphModule, nodes: list[fx.Node], before: fx.Node, name: str, layer: int | None = None
    ) -> list[fx.Node]:
        """What `traced` made, before another node; what it made for a layer serves one that is like it."""
        return graphs.splice(self.gm, traced, [*nodes, *self._open_for(layer)], before, name)

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
        what = value(node) if graphs.is_size(node) else "a tensor that grows with it"
        raise UnsupportedGraph(
            f"{graphs.source_line(node)}: {graphs.name_of(node)!r} still depends on the length of the cache ({what}); "
            "it is not a mask, a rotary embedding or position arithmetic that kvpass can express on slots"
        )


class Pass(Protocol):
    """A step of the rewrite, which changes the graph of a context and leaves there what later ones need."""

    __name__: str

    def __call__(self, step: StepContext, /) -> Record: ...


def has_loose_strides(tensor: Any) -> bool:
    """Whether a tensor's strides may change from call to call."""
    return isinstance(tensor, Tensor) and any(isinstance(stride, torch.SymInt) for stride in tensor.stride())
