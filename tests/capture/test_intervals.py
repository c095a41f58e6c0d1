"""Test that the bounds of operators hold for the results of torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.capture import intervals
from kvpass.capture.intervals import EVERYTHING, FALSE, LARGE, TRUE, Interval, evaluate, has_rule, unknown_bounds

LOWEST = torch.finfo(torch.float32).min
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
]
NUMBERS = [
    True,
    0,
    1,
    -1,
    2,
    300,
    2**31,
    16777217,
    0.1,
    1e-3,
    3.7,
    -1e4,
    -1e9,
    -16777216.0,
    LOWEST,
    torch.inf,
    -torch.inf,
]
BINARY: list[Callable[..., Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, torch.rsub),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
]
ELEMENTS = [0.0, 1.0, -1.0, 2.0, 200.0, 256.0, 0.1, -3.7, 65504.0, 16777217.0, 2.0**31]


class Graph:
    """A graph with the recorded value and the bounds of each node."""

    def __init__(self) -> None:
        self.graph, self.bounds = fx.Graph(), dict[fx.Node, Interval]()

    def tensor(self, value: Tensor) -> fx.Node:
        """Add an input with the bounds of its elements."""
        node = self.graph.placeholder(f"input_{len(self.bounds)}")
        node.meta["example_value"] = value
        self.bounds[node] = Interval(float(value.double().min()), float(value.double().max()))
        return node

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Interval:
        """Add a call of a function, or of a method by its name, and return its bounds."""
        is_method = isinstance(function, str)
        node = self.graph.create_node("call_method" if is_method else "call_function", function, args, kwargs)
        first, *others = fx.node.map_arg(args, lambda each: each.meta["example_value"])
        called = getattr(first, function) if isinstance(function, str) else function
        node.meta["example_value"] = called(*([] if is_method else [first]), *others, **kwargs)
        self.bounds[node] = evaluate(node, self.bounds.__getitem__) if has_rule(node) else unknown_bounds(node)
        return self.bounds[node]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(), (3,)]))
    elements = draw(st.lists(st.sampled_from(ELEMENTS), min_size=3, max_size=3))
    return torch.tensor(elements, dtype=torch.float64)[: 3 if shape else 1].reshape(shape).to(dtype)


def add_call(draw: st.DrawFn, made: Graph) -> None:
    """Add a random call on the nodes of a graph."""
    node = st.sampled_from(list(made.bounds))
    one, other, number = draw(node), draw(node), draw(st.sampled_from(NUMBERS))
    kind = draw(st.sampled_from(["binary", "number", "swapped", "where", "fill", "clamp", "to", "alpha", "ends"]))
    function = draw(st.sampled_from(BINARY))
    if kind == "binary":
        made.call(function, one, other)
    elif kind == "number":
        made.call(function, one, number)
    elif kind == "swapped" and function is not torch.rsub:
        made.call(function, number, one)
    elif kind == "where":
        conditions = [each for each in made.bounds if each.meta["example_value"].dtype == torch.bool]
        made.call(torch.where, draw(st.sampled_from(conditions)), one, draw(st.sampled_from([other, number])))
    elif kind == "fill":
        made.call("masked_fill", one, other, number)
    elif kind == "clamp":
        made.call("clamp", one, min=number)
    elif kind == "to":
        made.call("to", one, draw(st.sampled_from(DTYPES)))
    elif kind == "alpha":
        made.call(torch.add, one, draw(st.sampled_from([other, number])), alpha=draw(st.sampled_from([2, 0.5, -1e4])))
    else:
        made.call(draw(st.sampled_from([torch.minimum, torch.maximum])), one, other)


@given(data=st.data())
def test_every_result_is_within_its_bounds(data: st.DataObject) -> None:
    """Check random graphs on tensors and numbers of all dtypes; NaN is outside of all bounds."""
    made = Graph()
    made.tensor(torch.tensor(data.draw(st.sampled_from([True, False]))))
    for _ in range(3):
        made.tensor(data.draw(tensors()))
    for _ in range(6):
        try:
            add_call(data.draw, made)
        except (RuntimeError, TypeError):  # torch has no such call
            continue
        node, bounds = list(made.bounds.items())[-1]
        values = node.meta["example_value"].double().flatten()
        if not has_rule(node) or (LARGE in map(abs, bounds) and values.abs().max() > LARGE) or values.isnan().any():
            break  # beyond the numbers that a model is taken to compute
        assert bounds.low <= values.min()
        assert values.max() <= bounds.high


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_an_integer_mask_times_the_lowest_number_is_exact(dtype: torch.dtype) -> None:
    made = Graph()
    assert made.call(operator.mul, made.tensor(torch.ones(3, dtype=dtype)), LOWEST) == Interval(LOWEST, LOWEST)


def test_a_tensor_without_dimensions_wraps_in_the_other_operands_dtype() -> None:
    made = Graph()
    small, number = made.tensor(torch.tensor([100], dtype=torch.uint8)), made.tensor(torch.tensor(256))
    assert made.call(operator.lt, small, number) == Interval(0.0, 1.0)
    assert made.call(operator.lt, small, made.tensor(torch.tensor(255))) == TRUE


def test_integers_are_compared_in_the_floating_point_dtype() -> None:
    made = Graph()
    half, number = made.tensor(torch.tensor([torch.inf], dtype=torch.float16)), made.tensor(torch.tensor([70000]))
    assert made.call(operator.eq, half, number) == Interval(0.0, 1.0)
    assert made.call(operator.eq, half, made.tensor(torch.tensor([60000]))) == FALSE


def test_zero_times_infinity_has_no_bounds() -> None:
    made = Graph()
    assert made.call(operator.mul, made.tensor(torch.tensor([0.0, 1.0])), -torch.inf) == EVERYTHING
    assert made.call(operator.mul, made.tensor(torch.tensor([1.0, 1.0])), -torch.inf) == Interval(
        -torch.inf, -torch.inf
    )


def test_complex_numbers_have_no_bounds() -> None:
    made = Graph()
    number = made.tensor(torch.tensor([2.0]))
    turned = made.graph.placeholder("turned")
    turned.meta["example_value"] = torch.tensor([1j])
    made.bounds[turned] = intervals.unknown_bounds(turned)
    assert made.call(operator.mul, number, turned) == Interval(-LARGE, LARGE)


def test_a_quotient_has_the_bounds_of_both_operands() -> None:
    made = Graph()
    above = made.tensor(torch.tensor([4.0, 8.0]))
    assert made.call(operator.truediv, above, made.tensor(torch.tensor([2.0, 4.0]))) == Interval(1.0, 4.0)
    assert made.call(operator.truediv, above, made.tensor(torch.tensor([-1.0, 1.0]))) == Interval(-LARGE, LARGE)
