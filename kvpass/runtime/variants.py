"""Keep rewritten step graphs, each for one kind of call or, with dynamic sizes, for many calls."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.errors import KVPassWarning, PolicyError, UnsupportedGraph
from kvpass.fx import shapes, splicing
from kvpass.rewrite.pipeline import StepRewrite, StepSignature
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.deferred_code import DeferredCode
from kvpass.runtime.lru_cache import LruCache
from kvpass.torch_private import dynamo, inductor, processor, symbolic_shapes

MAX_DYNAMIC_VARIANTS = 4  # variants with dynamic sizes for calls that differ only in sizes
SIZE_BY_SIZE = (
    f"code for a step depends on its sizes in more than {MAX_DYNAMIC_VARIANTS} ways, so each further size is compiled "
    "separately: a hook of the policy, or the model, compares sizes such as the budget with constants"
)


@dataclasses.dataclass(frozen=True)
class ShapeKey:
    """Numbers that differ between calls that one rewritten graph can serve.

    Attributes:
        numbers: the values of `StepSizeReader.sources`, such as the numbers of rows and of new tokens.
        capacities: the capacities of `exact_layers`, or the common one of all layers; 1 if layers or heads differ.
        budget: the common budget of all layers; 1 if the capacity determines the budget.
        exact_layers: the layers whose layouts have `exact_capacity`, so that each has its own capacity.
    """

    numbers: tuple[int, ...]
    capacities: tuple[int, ...] = (1,)
    budget: int = 1
    exact_layers: tuple[int, ...] = ()

    @staticmethod
    def of(caches: list[LayerCache], numbers: tuple[int, ...]) -> ShapeKey:
        if any(cache.layout.classes for cache in caches):
            return ShapeKey(numbers)
        exact_layers = tuple(index for index, cache in enumerate(caches) if cache.layout.exact_capacity)
        if exact_layers:
            layouts = [caches[index].layout for index in exact_layers]
            return ShapeKey(numbers, tuple(layout.capacity for layout in layouts), layouts[0].budget, exact_layers)
        sizes = {(cache.layout.budget, cache.layout.capacity) for cache in caches}
        if len(sizes) > 1:
            return ShapeKey(numbers)
        ((budget, capacity),) = sizes
        return ShapeKey(numbers, (capacity,), 1 if capacity - budget <= 1 else budget)

    @property
    def all_numbers(self) -> tuple[int, ...]:
        return (*self.numbers, *self.capacities, self.budget)

    @property
    def dynamic_indices(self) -> tuple[int, ...]:
        """Indices in `all_numbers` that can be dynamic: compilers specialise on a size of 1."""
        return tuple(index for index, number in enumerate(self.all_numbers) if number > 1)

    def dynamic_layout(self, layer: int, layout: Layout, sizes: dict[int, Any]) -> Layout:
        """Return a layer's layout whose capacity and budget are dynamic `sizes`, by index in `all_numbers`."""
        start = len(self.numbers)  # the index of the first capacity
        index = start + (self.exact_layers.index(layer) if layer in self.exact_layers else 0)
        if index not in sizes or bool(self.exact_layers) != layout.exact_capacity:
            return layout
        capacity = sizes[index]
        otherwise = layout.budget if layout.exact_capacity else capacity - (layout.capacity - layout.budget)
        budget = sizes.get(start + len(self.capacities), otherwise)
        return dataclasses.replace(layout, capacity=capacity, budget=budget)

    def shared_layout(self, layout: Layout) -> Layout:
        """Return the fields of a layout that calls must share: no batch size, and no dynamic capacity."""
        if self.capacities == (1,) or bool(self.exact_layers) != layout.exact_capacity:
            return dataclasses.replace(layout, batch=0)
        budget = layout.budget if layout.exact_capacity else layout.budget - layout.capacity
        return dataclasses.replace(layout, batch=0, budget=budget if self.budget == 1 else 0, capacity=0)


@dataclasses.dataclass(frozen=True)
class DynamicDims:
    """Dynamic sizes, and the indices in `ShapeKey.all_numbers` of the numbers that they replace."""

    sizes: symbolic_shapes.SymbolicSizes
    indices: tuple[int, ...]

    @property
    def symbols(self) -> dict[int, Any]:
        """Symbols by index in `ShapeKey.all_numbers`."""
        return dict(zip(self.indices, self.sizes.symbols, strict=True))

    @property
    def by_index(self) -> dict[int, Any]:
        """Dynamic sizes by index in `ShapeKey.all_numbers`."""
        return {index: self.sizes.size(symbol) for index, symbol in self.symbols.items()}


Rewrite = Callable[[DynamicDims | None], StepRewrite]
"""A function that rewrites a step graph for the present call, with some numbers of its `ShapeKey` as dynamic sizes."""


class CompiledVariant:
    """A rewritten step graph until it is compiled, then its code."""

    def __init__(self, rewrite: StepRewrite, key: ShapeKey, dynamic_indices: tuple[int, ...] = ()) -> None:
        """Take the key of the call that the graph was rewritten for, and its indices that are dynamic."""
        self._rewrite: StepRewrite | None = rewrite  # None after it is compiled
        self._signature, self._sizes = rewrite.signature, rewrite.dynamic
        self.key, self._dynamic_indices, self.code = key, dynamic_indices, DeferredCode()
        self._by_key = LruCache[ShapeKey, StepSignature]()

    def signature(self, key: ShapeKey) -> StepSignature:
        """Return the signature with numbers for its dynamic sizes, for a call with this shape key."""
        if self._sizes is None:
            return self._signature
        if found := self._by_key.find(key):
            return found
        numbers = dict(zip(self._sizes.symbols, self._dynamic_numbers(key), strict=True))
        return self._by_key.put(key, self._signature.with_numbers(lambda size: shapes.number(size, numbers)))

    def _dynamic_numbers(self, key: ShapeKey) -> list[int]:
        return [key.all_numbers[index] for index in self._dynamic_indices]

    def serves(self, key: ShapeKey) -> bool:
        """Return whether the graph is valid for a call with this shape key."""
        if key == self.key:
            return True
        numbers = enumerate(zip(key.all_numbers, self.key.all_numbers, strict=True))
        same = all(one == other for index, (one, other) in numbers if index not in self._dynamic_indices)
        return same and (self._sizes is None or self._sizes.hold(self._dynamic_numbers(key)))

    def code_for(
        self, backend: BackendBase, flat: list[Any], stores_unrotated_keys: bool, chunk: bool
    ) -> inductor.Compiled:
        """Return the code to run on these arguments; it compiles the graph if necessary.

        The first chunk runs uncompiled, because it may be the only one and compiling takes half a minute.
        """
        rewrite = self._rewrite

        def compile() -> inductor.Compiled:
            assert rewrite is not None
            rewritten_gm, examples = rewrite.rewritten_gm, rewrite.examples or flat
            run = backend.compile_step(rewritten_gm, examples, rewrite.layers, stores_unrotated_keys, rewrite.dynamic)
            splicing.release_example_data(rewritten_gm.graph)  # code that runs the graph needs none
            self._rewrite = None
            dynamo.release_source_lines()
            processor.return_free_memory()
            return run

        waits = rewrite is not None and chunk and not backend.compiles_at_once
        return self.code.for_run(rewrite.rewritten_gm if rewrite and waits else None, compile)


class VariantCache:
    """The rewrites of one step graph.

    The first number of rows, and the first capacity, get static code, which is faster.  The second value of either gets
    code with dynamic sizes for all further values.  A number of rows that is already dynamic in Dynamo's graph counts
    as a second value, because Dynamo made a static graph for the first.  Chunks, and layers with exact capacities, get
    dynamic code at once: with static numbers, each length and each layer would need separate code.
    """

    def __init__(self, symbols: set[str]) -> None:
        """Take the names of all symbols in the graph."""
        self._symbols = symbols
        self._by_call = LruCache[Any, CompiledVariant]()
        self._dynamic = LruCache[Any, list[CompiledVariant]]()
        self._first_keys = LruCache[Any, ShapeKey]()

    def find(self, call_key: Any, key: ShapeKey) -> CompiledVariant | None:
        """Return the variant that served an equal call, if it still does: compiling may have added guards on sizes."""
        variant = self._by_call.find(call_key)
        return variant if variant is not None and variant.serves(key) else None

    def make(self, call_key: Any, shared: Any, key: ShapeKey, decodes: bool, rewrite: Rewrite) -> CompiledVariant:
        """Return a variant for a call, from an existing one with dynamic sizes or from a new rewrite.

        Args:
            call_key: all that the variant depends on, including the shape key.
            shared: the key of the other properties that the variant depends on; None for static sizes only.
            decodes: whether the call has a single new token.
        """
        dynamic = None if shared is None else self._find_dynamic((shared, key.dynamic_indices), key, decodes, rewrite)
        return self._by_call.put(call_key, dynamic or CompiledVariant(rewrite(None), key))

    def _find_dynamic(self, kind: Any, key: ShapeKey, decodes: bool, rewrite: Rewrite) -> CompiledVariant | None:
        """Return a variant with dynamic sizes; None if the call gets a static one."""
        variants = self._dynamic.find(kind)
        if variants is None:
            variants = self._dynamic.put(kind, [])
        has_first_sizes = self._has_first_sizes(kind, key, decodes)
        serving = next((variant for variant in variants if variant.serves(key)), None)
        if serving is not None or has_first_sizes:
            return serving
        if len(variants) == MAX_DYNAMIC_VARIANTS:
            warnings.warn(SIZE_BY_SIZE, KVPassWarning, stacklevel=2)
            return None
        return self._rewrite_dynamic(variants, key, rewrite)

    def _has_first_sizes(self, kind: Any, key: ShapeKey, decodes: bool) -> bool:
        """Return whether a step has the first sizes of slots of its kind, for which static code is made."""
        if not decodes or any(index < len(key.numbers) for index in key.dynamic_indices):
            return False
        first = self._first_keys.find(kind) or self._first_keys.put(kind, key)
        return first == key and not key.exact_layers

    def _rewrite_dynamic(
        self, variants: list[CompiledVariant], key: ShapeKey, rewrite: Rewrite
    ) -> CompiledVariant | None:
        """Return a new variant with as many dynamic sizes as the policy and the graph allow; None without any."""
        number_indices = tuple(index for index in key.dynamic_indices if index < len(key.numbers))
        exact_indices = range(len(key.numbers), len(key.numbers) + len(key.exact_layers))
        for indices in dict.fromkeys((key.dynamic_indices, number_indices)):
            exchangeable = [i for i, index in enumerate(indices) if index in exact_indices]
            if indices:
                numbers = [key.all_numbers[index] for index in indices]
                sizes = symbolic_shapes.SymbolicSizes(numbers, self._symbols, exchangeable)
                try:
                    variants.append(CompiledVariant(rewrite(DynamicDims(sizes, indices)), key, indices))
                except (PolicyError, UnsupportedGraph):
                    continue  # an error that does not depend on sizes is raised again by the static rewrite
                return variants[-1]
        return None
