"""Rewritten step graphs: one for each kind of call, or one for many whose sizes stay open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvpass.cache.handle import LayerCache
from kvpass.cache.slots import Layout
from kvpass.errors import UnsupportedGraph
from kvpass.fx import splicing
from kvpass.rewrite.result import StepRewrite
from kvpass.runtime.compiler import Compiler
from kvpass.torch_private import dynamo, fx_nodes, inductor, symbolic_shapes

MOST_OPEN = 4  # graphs with open sizes for calls that differ in nothing else


@dataclasses.dataclass(frozen=True)
class DynamicDims:
    """Open sizes, and the places among `ShapeKey.all` that they stand for."""

    sizes: symbolic_shapes.SymbolicSizes
    free: tuple[int, ...]

    @property
    def symbols(self) -> dict[int, Any]:
        """By place."""
        return dict(zip(self.free, self.sizes.symbols, strict=True))

    @property
    def by_place(self) -> dict[int, Any]:
        """The sizes, by place."""
        return {index: self.sizes.size(symbol) for index, symbol in self.symbols.items()}


Rewrite = Callable[[DynamicDims | None], StepRewrite]
"""Rewrites a step graph for the call at hand, with some of its `ShapeKey` as open sizes."""


@dataclasses.dataclass(frozen=True)
class ShapeKey:
    """The numbers that differ between calls that one rewritten graph can serve.

    Attributes:
        numbers: those of `StepRunner.sizes`, such as rows and new tokens.
        capacities: of each of `exact_layers`, or else the one of all layers; 1 if they do not have the same one.
        budget: likewise, one for all; 1 where it is the capacity or one less.
        exact_layers: the layers whose layouts have `exact_capacity`, so that each has a capacity of its own.
    """

    numbers: tuple[int, ...]
    capacities: tuple[int, ...] = (1,)
    budget: int = 1
    exact_layers: tuple[int, ...] = ()

    @staticmethod
    def of(caches: list[LayerCache], numbers: tuple[int, ...]) -> ShapeKey:
        if any(cache.slots.capacity != cache.layout.capacity for cache in caches):
            return ShapeKey(numbers)
        exact_layers = tuple(index for index, cache in enumerate(caches) if cache.layout.exact_capacity)
        if exact_layers:
            layouts = [caches[index].layout for index in exact_layers]
            return ShapeKey(numbers, tuple(layout.capacity for layout in layouts), layouts[0].budget, exact_layers)
        sizes = {(cache.layout.budget, cache.layout.capacity) for cache in caches}
        budget, capacity = next(iter(sizes))
        if len(sizes) > 1:
            return ShapeKey(numbers)
        return ShapeKey(numbers, (capacity,), 1 if capacity - budget <= 1 else budget)

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.numbers, *self.capacities, self.budget)

    @property
    def free(self) -> tuple[int, ...]:
        """Which of them can be open: a size of one is something else to a compiler."""
        return tuple(index for index, number in enumerate(self.all) if number > 1)

    @property
    def free_numbers(self) -> tuple[int, ...]:
        """Those among `numbers`."""
        return tuple(index for index in self.free if index < len(self.numbers))

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Those beside `numbers`."""
        return tuple(index for index in self.free if index >= len(self.numbers))

    @property
    def alike(self) -> tuple[int, ...]:
        """The capacities of layers that have their own."""
        return tuple(range(len(self.numbers), len(self.numbers) + len(self.exact_layers)))

    def layout(self, layer: int, layout: Layout, sizes: dict[int, Any]) -> Layout:
        """A layer's layout with open sizes, by place, for capacity and budget."""
        first = len(self.numbers)
        place = first + (self.exact_layers.index(layer) if layer in self.exact_layers else 0)
        if place not in sizes or bool(self.exact_layers) != layout.exact_capacity:
            return layout
        capacity = sizes[place]
        otherwise = layout.budget if layout.exact_capacity else capacity - (layout.capacity - layout.budget)
        budget = sizes.get(first + len(self.capacities), otherwise)
        return dataclasses.replace(layout, capacity=capacity, budget=budget)

    def common(self, layout: Layout) -> Layout:
        """What a layout shares with those of other rows, and of another capacity where that can be open."""
        if self.capacities == (1,) or bool(self.exact_layers) != layout.exact_capacity:
            return dataclasses.replace(layout, batch=0)
        beside = layout.budget if layout.exact_capacity else layout.budget - layout.capacity
        return dataclasses.replace(layout, batch=0, budget=beside if self.budget == 1 else 0, capacity=0)


@dataclasses.dataclass
class CompiledVariant:
    """A step graph that has been rewritten.

    Attributes:
        measures: of the call that it was rewritten for.
        free: which of them are open in it.
        run: what runs it, None until it is compiled.
        came: whether it has run uncompiled.
        described: `rewrite` for calls that there were.
    """

    rewrite: StepRewrite
    measures: ShapeKey
    free: tuple[int, ...] = ()
    run: inductor.Compiled | None = None
    came: bool = False
    described: dict[ShapeKey, StepRewrite] = dataclasses.field(default_factory=dict)

    def at(self, measures: ShapeKey) -> StepRewrite:
        """What the graph was rewritten to, for a call of these measures."""
        if measures not in self.described:
            self.described[measures] = self.rewrite.at([measures.all[index] for index in self.free])
        return self.described[measures]

    def serves(self, measures: ShapeKey) -> bool:
        """Whether it is right for such a call."""
        if measures == self.measures:
            return True
        pairs = enumerate(zip(measures.all, self.measures.all, strict=True))
        same = all(one == other for index, (one, other) in pairs if index not in self.free)
        sizes = self.rewrite.open
        return same and (sizes is None or sizes.hold([measures.all[index] for index in self.free]))

    def runner(self, backend: Compiler, flat: list[Any], ranked: bool, chunk: bool) -> inductor.Compiled:
        """What is to run on these arguments.

        A chunk may come once, as the rest of a prompt or a turn does, and compiling takes half a minute: the rewritten
        graph itself runs, and is compiled when another chunk comes.
        """
        if chunk and not self.came and not backend.compiles_at_once:
            self.came = True
            return fx_nodes.code_of(self.rewrite.gm)
        with dynamo.one_at_a_time():
            if self.run is None:
                given = (self.rewrite.gm, self.rewrite.examples or flat, ranked, chunk, self.rewrite.open)
                self.run = backend.compile_step(*given)
                splicing.let_go_of_data(self.rewrite.gm.graph)
        return self.run


class VariantCache:
    """What one step graph was rewritten to.

    The first number of rows, and the first capacity, get code of their own, which is faster; the second of either gets
    code for all others.  Rows that are open in Dynamo's graph are a second number already: it was made for one that had
    the first.  Chunks of any length share theirs from the first, and so do layers whose capacities are their own: as
    numbers, these would make each layer another piece of code.
    """

    def __init__(self, symbols: set[str]) -> None:
        """
        Args:
            symbols: the names of all that are in the graph.
        """
        self._symbols = symbols
        self._ready: dict[Any, CompiledVariant] = {}
        self._opened: dict[Any, list[CompiledVariant]] = {}
        self._met: dict[Any, ShapeKey] = {}

    def known(self, call: Any, measures: ShapeKey) -> CompiledVariant | None:
        """What served a call before, if it still does: compiling may have asked more of the sizes since.

        Args:
            call: all that it depends on, the measures included.
        """
        ready = self._ready.get(call)
        return ready if ready is not None and ready.serves(measures) else None

    def made(self, call: Any, alike: Any, measures: ShapeKey, decodes: bool, rewrite: Rewrite) -> CompiledVariant:
        """What serves a call from now on.

        Args:
            alike: what it depends on beside its measures; None if these are to be numbers.
            decodes: it has one token.
        """
        shared = alike is not None and self._shared((alike, measures.free), measures, decodes, rewrite)
        self._ready[call] = shared or CompiledVariant(rewrite(None), measures)
        return self._ready[call]

    def _shared(self, kind: Any, measures: ShapeKey, decodes: bool, rewrite: Rewrite) -> CompiledVariant | None:
        """A rewritten graph with open sizes; None if the call is to have its own."""
        made = self._opened.setdefault(kind, [])
        known = next((ready for ready in made if ready.serves(measures)), None)
        fixed = decodes and not measures.free_numbers  # all that can be open is that of slots
        first = fixed and self._met.setdefault(kind, measures) == measures
        if known or (first and not measures.exact_layers) or len(made) == MOST_OPEN:
            return known
        for free in dict.fromkeys((measures.free_slots if first else measures.free, measures.free_numbers)):
            found = self._dynamic_dims_for(measures, free, rewrite)
            if found:
                made.append(found)
                return found
        return None

    def _dynamic_dims_for(self, measures: ShapeKey, free: tuple[int, ...], rewrite: Rewrite) -> CompiledVariant | None:
        """The graph with these measures open; None where it cannot be said for sizes that are no numbers."""
        if not free:
            return None
        alike = [free.index(place) for place in measures.alike if place in free]
        sizes = symbolic_shapes.SymbolicSizes([measures.all[place] for place in free], self._symbols, alike)
        try:
            return CompiledVariant(rewrite(DynamicDims(sizes, free)), measures, free)
        except UnsupportedGraph:  # what is refused whatever the sizes is refused again without them
            return None
