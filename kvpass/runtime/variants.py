"""Rewritten step graphs, each for one kind of call or, with dynamic sizes, for many calls."""

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

MOST_OPEN = 4  # graphs with dynamic sizes for calls that differ in nothing but sizes


@dataclasses.dataclass(frozen=True)
class DynamicDims:
    """Dynamic sizes, and the indices in `ShapeKey.all` of the numbers that they replace."""

    sizes: symbolic_shapes.SymbolicSizes
    free: tuple[int, ...]

    @property
    def symbols(self) -> dict[int, Any]:
        """Symbols by index in `ShapeKey.all`."""
        return dict(zip(self.free, self.sizes.symbols, strict=True))

    @property
    def by_place(self) -> dict[int, Any]:
        """Dynamic sizes by index in `ShapeKey.all`."""
        return {index: self.sizes.size(symbol) for index, symbol in self.symbols.items()}


Rewrite = Callable[[DynamicDims | None], StepRewrite]
"""A function that rewrites a step graph for the present call, with some numbers of its `ShapeKey` as dynamic sizes."""


@dataclasses.dataclass(frozen=True)
class ShapeKey:
    """Numbers that differ between calls which one rewritten graph can serve.

    Attributes:
        numbers: those of `StepRunner.sizes`, such as rows and new tokens.
        capacities: of each of `exact_layers`, or else the common capacity of all layers; 1 if layers differ.
        budget: the common budget of all layers; 1 where it equals the capacity or the capacity minus one.
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
        """Indices in `all` that can be dynamic: compilers specialise on a size of 1."""
        return tuple(index for index, number in enumerate(self.all) if number > 1)

    @property
    def free_numbers(self) -> tuple[int, ...]:
        """Indices in `free` that belong to `numbers`."""
        return tuple(index for index in self.free if index < len(self.numbers))

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Indices in `free` that belong to capacities and the budget."""
        return tuple(index for index in self.free if index >= len(self.numbers))

    @property
    def alike(self) -> tuple[int, ...]:
        """Indices in `all` of the capacities of `exact_layers`."""
        return tuple(range(len(self.numbers), len(self.numbers) + len(self.exact_layers)))

    def layout(self, layer: int, layout: Layout, sizes: dict[int, Any]) -> Layout:
        """Return a layer's layout with dynamic sizes, by index in `all`, as capacity and budget."""
        first = len(self.numbers)
        place = first + (self.exact_layers.index(layer) if layer in self.exact_layers else 0)
        if place not in sizes or bool(self.exact_layers) != layout.exact_capacity:
            return layout
        capacity = sizes[place]
        otherwise = layout.budget if layout.exact_capacity else capacity - (layout.capacity - layout.budget)
        budget = sizes.get(first + len(self.capacities), otherwise)
        return dataclasses.replace(layout, capacity=capacity, budget=budget)

    def common(self, layout: Layout) -> Layout:
        """Return the parts of a layout that calls must share: not the rows, nor a capacity that can be dynamic."""
        if self.capacities == (1,) or bool(self.exact_layers) != layout.exact_capacity:
            return dataclasses.replace(layout, batch=0)
        beside = layout.budget if layout.exact_capacity else layout.budget - layout.capacity
        return dataclasses.replace(layout, batch=0, budget=beside if self.budget == 1 else 0, capacity=0)


@dataclasses.dataclass
class CompiledVariant:
    """A rewritten step graph and its compiled code.

    Attributes:
        rewrite: the rewrite of the graph.
        measures: the shape key of the call that the graph was rewritten for.
        free: the indices in `measures.all` that are dynamic in the graph.
        run: the compiled code; None until the graph is compiled.
        came: whether the graph has run uncompiled.
        described: `rewrite` with numbers for dynamic sizes, by the shape key of earlier calls.
    """

    rewrite: StepRewrite
    measures: ShapeKey
    free: tuple[int, ...] = ()
    run: inductor.Compiled | None = None
    came: bool = False
    described: dict[ShapeKey, StepRewrite] = dataclasses.field(default_factory=dict)

    def at(self, measures: ShapeKey) -> StepRewrite:
        """Return the rewrite with numbers for its dynamic sizes, for a call with this shape key."""
        if measures not in self.described:
            self.described[measures] = self.rewrite.at([measures.all[index] for index in self.free])
        return self.described[measures]

    def serves(self, measures: ShapeKey) -> bool:
        """Return whether the graph is valid for a call with this shape key."""
        if measures == self.measures:
            return True
        pairs = enumerate(zip(measures.all, self.measures.all, strict=True))
        same = all(one == other for index, (one, other) in pairs if index not in self.free)
        sizes = self.rewrite.open
        return same and (sizes is None or sizes.hold([measures.all[index] for index in self.free]))

    def runner(self, backend: Compiler, flat: list[Any], ranked: bool, chunk: bool) -> inductor.Compiled:
        """Return the code to run on these arguments; it compiles the graph if necessary.

        A chunk may be the only one, as the rest of a prompt or a turn often is, and compiling takes half a minute.  So
        the first chunk runs on the uncompiled graph, which is compiled when a second chunk arrives.
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
    """The rewrites of one step graph.

    The first number of rows, and the first capacity, get static code of their own, which is faster.  The second value
    of either gets code with dynamic sizes for all further values.  Rows that are dynamic in Dynamo's graph are a second
    value already, because Dynamo made the graph after a static one.  Chunks of any length share dynamic code from the
    first one on, and so do layers with exact capacities: as static numbers, these would give each layer code of its
    own.
    """

    def __init__(self, symbols: set[str]) -> None:
        """
        Args:
            symbols: the names of all symbols in the graph.
        """
        self._symbols = symbols
        self._ready: dict[Any, CompiledVariant] = {}
        self._opened: dict[Any, list[CompiledVariant]] = {}
        self._met: dict[Any, ShapeKey] = {}

    def known(self, call: Any, measures: ShapeKey) -> CompiledVariant | None:
        """Return the variant that served an equal call, if it still does: compiling may have added guards on sizes.

        Args:
            call: the key of all that the variant depends on, including the shape key.
        """
        ready = self._ready.get(call)
        return ready if ready is not None and ready.serves(measures) else None

    def with_rewrite(self, rewrite: StepRewrite) -> CompiledVariant:
        """Return the variant that a rewrite of a call belongs to."""
        return next(ready for ready in self._ready.values() if any(rewrite is x for x in ready.described.values()))

    def made(self, call: Any, alike: Any, measures: ShapeKey, decodes: bool, rewrite: Rewrite) -> CompiledVariant:
        """Return a variant for a call, from an existing one with dynamic sizes or from a new rewrite.

        Args:
            call: as of `known`.
            alike: the key of what the variant depends on beside its shape key; None for static sizes only.
            decodes: whether the call has a single new token.
        """
        shared = alike is not None and self._shared((alike, measures.free), measures, decodes, rewrite)
        self._ready[call] = shared or CompiledVariant(rewrite(None), measures)
        return self._ready[call]

    def _shared(self, kind: Any, measures: ShapeKey, decodes: bool, rewrite: Rewrite) -> CompiledVariant | None:
        """Return a variant with dynamic sizes; None if the call gets a static one."""
        made = self._opened.setdefault(kind, [])
        known = next((ready for ready in made if ready.serves(measures)), None)
        fixed = decodes and not measures.free_numbers  # only capacities and the budget can be dynamic
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
        """Return a variant with these indices dynamic; None if the graph cannot be rewritten for dynamic sizes."""
        if not free:
            return None
        alike = [free.index(place) for place in measures.alike if place in free]
        sizes = symbolic_shapes.SymbolicSizes([measures.all[place] for place in free], self._symbols, alike)
        try:
            return CompiledVariant(rewrite(DynamicDims(sizes, free)), measures, free)
        except UnsupportedGraph:  # a refusal that does not depend on sizes is raised again by the static rewrite
            return None
