"""Test which calls of a step graph share a rewrite, against a list of the calls that came before."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import example, given
from hypothesis import strategies as st

import kvpass
import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.cache.slots import empty_slots
from kvpass.errors import KVPassWarning, PolicyError, UnsupportedGraph
from kvpass.runtime import lru_cache, variants
from kvpass.runtime.step_execution import BoundStep
from kvpass.runtime.variants import CompiledVariant, DynamicDims, ShapeKey, VariantCache

SHARED = "equal layouts"


class Rewriter:
    """Counts rewrites and returns stand-ins for them.

    Attributes:
        made: the dynamic sizes of each rewrite, None for a static one.
        refuses: the indices of sizes that the model cannot have as symbols.
    """

    def __init__(self, refuses: frozenset[int] = frozenset()) -> None:
        self.made: list[tuple[int, ...] | None] = []
        self.refuses = refuses

    def __call__(self, dims: DynamicDims | None) -> Any:
        if dims is not None and self.refuses.intersection(dims.indices):
            raise PolicyError("a symbol where the policy needs a number")
        self.made.append(None if dims is None else dims.indices)
        sizes = None if dims is None else dims.sizes
        return SimpleNamespace(dynamic=sizes, signature=None)


class Calls:
    """The calls on one step graph, with the variant that each of them gets."""

    def __init__(self, refuses: frozenset[int] = frozenset()) -> None:
        self.cache, self.rewriter = VariantCache(set()), Rewriter(refuses)

    def run(self, key: ShapeKey, decodes: bool = True, shared: Any = SHARED) -> CompiledVariant:
        call_key = (shared, key)
        found = self.cache.find(call_key, key)
        variant = found or self.cache.make(call_key, shared, key, decodes, self.rewriter)
        assert variant.serves(key)
        return variant


keys = st.builds(
    lambda rows, capacity, budget: ShapeKey((rows, 1), (capacity,), budget),
    st.integers(1, 3), st.sampled_from([1, 9, 17, 33]), st.sampled_from([1, 8]),
)  # fmt: skip
"""Decode steps: rows, one new token, a capacity and a budget."""


@given(steps=st.lists(keys, min_size=1, max_size=12))
def test_a_second_size_of_decode_steps_gets_code_for_all_sizes(steps: list[ShapeKey]) -> None:
    """Expect numbers for the first key of a kind, and one variant for all other keys.

    Sizes of one are no symbols, so a kind has the same sizes of one.  Several rows are dynamic in Dynamo's graph.
    """
    calls, served = Calls(), dict[ShapeKey, CompiledVariant]()
    first, dynamic = dict[Any, ShapeKey](), dict[Any, CompiledVariant]()
    for key in steps:
        variant, kind = calls.run(key), key.dynamic_indices
        if key in served:
            assert variant is served[key]
            continue
        first.setdefault(kind, key)
        rows_are_numbers = key.numbers[0] == 1
        is_static = kind == () or (rows_are_numbers and key == first[kind])
        if is_static:
            assert (variant.key, variant not in dynamic.values()) == (key, True)
        else:
            assert variant is dynamic.setdefault(kind, variant)
        served[key] = variant
    assert calls.rewriter.made.count(None) == len({id(v) for v in served.values()} - {id(v) for v in dynamic.values()})
    assert sorted(made for made in calls.rewriter.made if made is not None) == sorted(dynamic)


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=8), rows=st.integers(1, 3))
def test_chunks_share_code_from_the_first_one_on(lengths: list[int], rows: int) -> None:
    calls = Calls()
    used = {id(calls.run(ShapeKey((rows, length), (33,), 1), decodes=False)) for length in lengths}
    assert (len(used), len(calls.rewriter.made)) == (1, 1)


@given(capacities=st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=6))
def test_layers_of_exact_capacities_share_code_from_the_first_step_on(capacities: list[tuple[int, int]]) -> None:
    calls = Calls()
    used = {id(calls.run(ShapeKey((1, 1), pair, 1, exact_layers=(0, 2)))) for pair in capacities}
    assert (len(used), calls.rewriter.made) == (1, [(2, 3)])


@given(steps=st.lists(keys, min_size=1, max_size=8))
def test_calls_that_share_nothing_get_numbers(steps: list[ShapeKey]) -> None:
    calls = Calls()
    variants_by_key = {key: calls.run(key, shared=None) for key in steps}
    assert {variant.key for variant in variants_by_key.values()} == set(steps)
    assert calls.rewriter.made == [None] * len(variants_by_key)


def test_a_layout_of_another_kind_gets_a_variant_of_its_own() -> None:
    calls, key = Calls(), ShapeKey((2, 5), (9,), 1)
    one, other = (calls.run(key, decodes=False, shared=shared) for shared in ("h2o", "tova"))
    assert one is not other


def test_a_size_that_fails_as_a_symbol_stays_a_number() -> None:
    calls = Calls(refuses=frozenset({2}))
    short, long = (calls.run(ShapeKey((3, 1), (capacity,), 1)) for capacity in (9, 17))
    assert short is not long
    assert calls.rewriter.made == [(0,), (0,)]
    assert calls.run(ShapeKey((2, 1), (9,), 1)) is short
    calls = Calls(refuses=frozenset({0, 2}))
    assert calls.run(ShapeKey((3, 1), (9,), 1)).key.numbers == (3, 1)
    assert calls.rewriter.made == [None]


def test_an_error_of_another_kind_is_raised() -> None:
    def refuse(dims: DynamicDims | None) -> Any:
        raise UnsupportedGraph("no step at all")

    with pytest.raises(UnsupportedGraph, match="no step at all"):
        VariantCache(set()).make("call", SHARED, ShapeKey((3, 1)), True, refuse)


def test_a_guard_that_a_call_fails_makes_another_variant_up_to_a_number() -> None:
    calls = Calls()
    used = []
    for length in range(2, 2 + variants.MAX_DYNAMIC_VARIANTS):
        variant = calls.run(ShapeKey((1, length), (33,), 1), decodes=False)
        sizes = variant._rewrite.dynamic
        if sizes is not None:
            assert sizes.size(sizes.symbols[0]) == length  # a comparison, by which the code is for this length alone
        used.append(variant)
    with pytest.warns(KVPassWarning, match="sizes in more than 4 ways, so each further size is compiled separately"):
        used.append(calls.run(ShapeKey((1, 2 + variants.MAX_DYNAMIC_VARIANTS), (33,), 1), decodes=False))
    assert len(set(map(id, used))) == len(used)
    assert calls.rewriter.made.count(None) == 1
    assert used[-1]._rewrite.dynamic is None


def test_a_variant_that_gets_a_guard_later_serves_only_the_calls_within_it() -> None:
    """Test a guard of the compiler, which comes after the variant has served a call."""
    calls, short, long = Calls(), ShapeKey((1, 4), (33,), 1), ShapeKey((1, 9), (33,), 1)
    variant = calls.run(short, decodes=False)
    assert calls.run(long, decodes=False) is variant
    sizes: Any = variant._rewrite.dynamic
    assert sizes.size(sizes.symbols[0]) == 4
    assert calls.run(short, decodes=False) is variant
    assert calls.run(long, decodes=False) is not variant


# -- keys --------------------------------------------------------------------------------------------------------------


def layer_cache(capacity: int, budget: int = 8, exact: bool = False) -> LayerCache:
    backend = kvpass.backend("streaming", budget=budget)
    sizes = dict(budget=budget, capacity=capacity, batch=2, heads=1, key_dim=2, value_dim=2)
    device = torch.device("cpu")
    layout = Layout(backend.policy, **sizes, dtype=torch.float32, device=device, stores_unrotated_keys=False)
    layout = dataclasses.replace(layout, exact_capacity=exact)
    return LayerCache(backend, 0, layout, empty_slots(layout), 12, 1)


def test_a_key_has_the_capacity_that_all_layers_share() -> None:
    assert ShapeKey.of([layer_cache(8), layer_cache(8)], (2, 1)) == ShapeKey((2, 1), (8,), 1)
    assert ShapeKey.of([layer_cache(9)], (2, 1)) == ShapeKey((2, 1), (9,), 1)
    assert ShapeKey.of([layer_cache(10)], (2, 1)) == ShapeKey((2, 1), (10,), 8)
    assert ShapeKey.of([layer_cache(9), layer_cache(10)], (2, 1)) == ShapeKey((2, 1))
    exact = [layer_cache(10, exact=True), layer_cache(9), layer_cache(12, exact=True)]
    assert ShapeKey.of(exact, (2, 1)) == ShapeKey((2, 1), (10, 12), 8, (0, 2))


@given(
    capacities=st.tuples(st.integers(12, 40), st.integers(12, 40)),
    surplus=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    exact=st.booleans(),
)
@example(capacities=(20, 20), surplus=(0, 1), exact=False)
@example(capacities=(20, 30), surplus=(2, 3), exact=False)
def test_layouts_that_share_code_are_equal_once_their_sizes_are_symbols(
    capacities: tuple[int, int], surplus: tuple[int, int], exact: bool
) -> None:
    """Give two calls the same symbols: their layouts are then equal exactly if they are said to share code."""
    pairs = zip(capacities, surplus, strict=True)
    caches = [layer_cache(capacity, capacity - spare, exact) for capacity, spare in pairs]
    keyed = [ShapeKey.of([cache], (2, 1)) for cache in caches]
    kinds = [(key.shared_layout(cache.layout), key.dynamic_indices) for key, cache in zip(keyed, caches, strict=True)]
    symbols: dict[int, Any] = {2: 1000, 3: 700}
    layouts = []
    for key, cache in zip(keyed, caches, strict=True):
        sizes = {index: symbols[index] for index in key.dynamic_indices if index in symbols}
        layouts.append(key.dynamic_layout(0, cache.layout, sizes))
    assert (kinds[0] == kinds[1]) == (layouts[0] == layouts[1])
    for layout, spare in zip(layouts, surplus, strict=True):
        assert (layout.capacity, layout.budget) == (1000, 700 if exact or spare > 1 else 1000 - spare)


# -- compiled code -----------------------------------------------------------------------------------------------------


class CountingBackend:
    """Counts what it compiles; the code answers with its number."""

    def __init__(self, compiles_at_once: bool = False) -> None:
        self.compiles_at_once, self.compiled = compiles_at_once, 0

    def compile_step(self, *_: Any) -> Any:
        self.compiled += 1
        return lambda *_: self.compiled


def doubling() -> Any:
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (node, node)),))
    rewritten_gm = fx.GraphModule(torch.nn.Module(), graph)
    return SimpleNamespace(rewritten_gm=rewritten_gm, signature=None, layers=[], examples=[], dynamic=None)


@pytest.mark.parametrize(("chunk", "at_once", "uncompiled"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_chunk_is_compiled_for_when_it_comes_again(chunk: bool, at_once: bool, uncompiled: int) -> None:
    rewrite, backend = doubling(), CountingBackend(at_once)
    variant, graph = CompiledVariant(rewrite, ShapeKey((1, 4))), weakref.ref(rewrite.rewritten_gm)
    del rewrite
    for call in range(3):
        code: Any = variant.code_for(backend, [], False, chunk)  # type: ignore[arg-type]
        assert backend.compiled == (call >= uncompiled)
        if call < uncompiled:
            assert code(torch.ones(2))[0].tolist() == [2, 2]
    gc.collect()
    assert graph() is None  # it is released


class AddingRewrite:
    """A rewrite whose code may fail."""

    def __init__(self) -> None:
        self.counted: list[Any] = []

    def fixed_arguments(self, slots: list[Any]) -> list[Any]:
        return [len(slots)]

    def call_arguments(self, arguments: Any, host_values: Any, slots: list[Any], seen: int) -> list[Any]:
        return [seen, *arguments]

    def count_tokens(self, slots: list[Any], results: Any) -> None:
        self.counted.append(results)


def counts_of(cache: LayerCache) -> tuple[int, Any, bool]:
    return cache.length, cache.clocks, cache.interrupted


def test_a_repeated_step_counts_its_token_unless_it_fails() -> None:
    caches, rewrite = [layer_cache(9), layer_cache(9)], AddingRewrite()

    def run(*arguments: Any) -> list[Any]:
        assert all(cache.interrupted for cache in caches)
        if arguments[-1] == "fail":
            raise RuntimeError("out of memory")
        return list(arguments)

    step = BoundStep(caches, rewrite, run)  # type: ignore[arg-type]
    assert step(("token",), [(3,), (4,)]) == [2, 12, "token"]
    assert [(cache.length, cache.clocks, cache.interrupted) for cache in caches] == [
        (13, (3,), False),
        (13, (4,), False),
    ]
    assert rewrite.counted == [[2, 12, "token"]]
    with pytest.raises(RuntimeError, match="out of memory"):
        step(("fail",), [(4,), (5,)])
    assert [counts_of(cache) for cache in caches] == [(13, (3,), True), (13, (4,), True)]
    assert len(rewrite.counted) == 1


def test_variants_of_the_kinds_of_calls_that_came_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect the same number of variants however many kinds come, such as lengths of an encoder's input."""
    monkeypatch.setattr(lru_cache, "MAX_ENTRIES", 4)
    calls, key = Calls(), ShapeKey((2, 1), (9,), 1)
    made = [weakref.ref(calls.run(key, shared=("h2o", length))) for length in range(20)]
    gc.collect()
    assert [variant() is not None for variant in made] == [False] * 16 + [True] * 4
