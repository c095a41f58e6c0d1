"""Test the small sizes on which operations run: no two sizes of a graph have one number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest
import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.origins import CacheRefused, check_heads
from kvpass.fx import propagation, walk
from tests.capture.traced import query_graph, result

T = TypeVar("T")

SIZES = (11, 13, 17, 19)
"""Sizes of an input; Dynamo makes those that are marked symbols."""


def of_graph(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], question: Callable[[fx.Node], T]) -> T:
    """Call `question` on the result of a graph whose sizes above 10 are symbols."""
    x = torch.rand(shape)
    for dim, size in enumerate(shape):
        if size > 10:
            torch._dynamo.mark_dynamic(x, dim)
    return query_graph(function, (x,), lambda gm: question(result(gm)))


def axis_after(node: fx.Node, dim: int) -> int | None:
    return propagation.propagate_dim(node, walk.operand_of(node), dim)


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_symbols_are_not_taken_for_each_other(order: tuple[int, ...]) -> None:
    """Swap the first and third dimension by a reshape, which moves the elements of the second one between them."""

    def swapped(x: Tensor) -> Tensor:
        first, second, third, last = (x.shape[dim] for dim in order)
        return x.permute(order).reshape(third, second, first, last)

    axes = of_graph(swapped, SIZES, lambda node: [axis_after(node, dim) for dim in range(4)])
    assert axes == [None, None, None, 3]


@pytest.mark.parametrize("static", range(2, 10))
def test_a_symbol_is_not_taken_for_a_static_size(static: int) -> None:
    shape = (SIZES[0], 10, static)
    assert of_graph(lambda x: x.reshape(static, 10, x.shape[0]), shape, lambda node: axis_after(node, 1)) is None
    assert of_graph(lambda x: x.permute(2, 1, 0), shape, lambda node: axis_after(node, 1)) == 1


@pytest.mark.parametrize("static", range(2, 10))
def test_a_sum_of_symbols_is_not_taken_for_a_static_size(static: int) -> None:
    def swapped(x: Tensor) -> Tensor:
        return torch.cat([x, x[:1]]).reshape(static, 10, x.shape[0] + 1)

    assert of_graph(swapped, (SIZES[0], 10, static), lambda node: axis_after(node, 1)) is None


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_a_cache_whose_sizes_are_taken_for_each_other_is_refused(order: tuple[int, ...]) -> None:
    """Test a cache [B, H, S, D] that a reshape reads as [S, H, B, D]."""

    def attended(x: Tensor) -> Tensor:
        rows, heads, tokens, features = (x.shape[dim] for dim in order)
        return x.permute(order).reshape(tokens, heads, rows, features)

    def is_refused(node: fx.Node) -> None:
        with pytest.raises(CacheRefused, match="attention reads others"):
            check_heads(node, walk.operand_of(node), [node])

    of_graph(attended, SIZES, is_refused)


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ("a b", (3, 4)),
        ("a 3 4 5", (6,)),
        ("a b a+b 3 4", (5, 6)),
        ("a b a+b 7", (3, 5)),
        ("a a-6 1", (8,)),
        ("a a//2 1 2", (6,)),
        ("a Max(1,a) 3", (4,)),
    ],
)
def test_all_sizes_of_an_operation_differ(sizes: str, numbers: tuple[int, ...]) -> None:
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in "ab"}
    drawn = propagation._draw_numbers(frozenset(sympy.sympify(size, symbols) for size in sizes.split()))
    assert tuple(drawn[symbol] for symbol in sorted(drawn, key=str)) == numbers
