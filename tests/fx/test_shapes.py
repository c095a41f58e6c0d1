"""Test sizes as expressions of symbols."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.fx import shapes
from kvpass.torch_private.symbolic_shapes import SymbolicSizes

COUNTS = st.lists(st.integers(3, 40), min_size=1, max_size=4)


def symbols_of(hints: list[int]) -> list[Any]:
    """Return symbolic sizes with these values in the current call."""
    dynamic_sizes = SymbolicSizes(hints, set())
    return [dynamic_sizes.size(symbol) for symbol in dynamic_sizes.symbols]


def graph_of(examples: list[Any]) -> fx.Graph:
    graph = fx.Graph()
    for number, example in enumerate(examples):
        graph.placeholder(f"input_{number}").meta["example_value"] = example
    return graph


@settings(max_examples=40, deadline=None)
@given(COUNTS, st.data())
def test_symbols_measured_from_arguments_give_the_sizes_of_the_call(hints: list[int], data: st.DataObject) -> None:
    """Test sizes that are inputs, and sizes of tensors."""
    dynamic_sizes = SymbolicSizes(hints, set())
    sizes = [dynamic_sizes.size(symbol) for symbol in dynamic_sizes.symbols]
    counts = [data.draw(st.integers(3, 40)) for _ in hints]
    alone = [data.draw(st.booleans()) for _ in hints]
    examples = [size if a else dynamic_sizes.like((2, size), None) for size, a in zip(sizes, alone, strict=True)]
    arguments = [count if a else torch.ones(2, count) for count, a in zip(counts, alone, strict=True)]
    known = shapes.measure_symbols(graph_of([*examples, 7, "else"]), [*arguments, 7, "else"])
    assert known == dict(zip(dynamic_sizes.symbols, counts, strict=True))
    total = shapes.expr(sizes[0]) * 2 + sum(map(shapes.expr, sizes[1:]))
    assert shapes.number(dynamic_sizes.size(total), known) == counts[0] * 2 + sum(counts[1:])


@settings(max_examples=40, deadline=None)
@given(COUNTS)
def test_shapes_are_equal_as_expressions(hints: list[int]) -> None:
    sizes = symbols_of(hints)
    assert shapes.same_shape(sizes, list(sizes))
    assert shapes.same_shape([size + 1 for size in sizes], (1 + size for size in sizes))
    assert not shapes.same_shape(sizes, hints)
    assert not shapes.same_shape(sizes, [*sizes, 1])


def test_a_size_as_text_with_another_symbol() -> None:
    (size,) = symbols_of([5])
    (other,) = shapes.expr(size).free_symbols
    assert shapes.text(size + 1, {}) == f"{other} + 1"
    assert shapes.text(size + 1, {other: shapes.LENGTH}) == "length + 1"
    assert shapes.text(4, {other: shapes.LENGTH}) == "4"


@pytest.mark.parametrize(
    ("shape", "dim"), [((5,), 0), ((1, 5), 1), ((5, 5), 1), ((5, 1), 1), ((3, 2, 5), 2), ((2, 5, 3), 1), ((2, 3), 1)]
)
def test_the_dimension_of_the_new_tokens(shape: tuple[int, ...], dim: int) -> None:
    assert shapes.token_dim(shape, 5) == dim
