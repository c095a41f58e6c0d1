"""Test small utilities for graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs

from kvpass.fx import alias, splicing, walk
from kvpass.torch_private import fx_nodes


def traced(function: object) -> fx.GraphModule:
    return fx.symbolic_trace(function)  # type: ignore[arg-type]


def compacted(function: object) -> fx.GraphModule:
    gm = traced(function)
    alias.eliminate_dead(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def test_a_write_in_place_survives_if_it_is_read() -> None:
    def route(x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask.scatter_(1, x.topk(1)[1], 1.0)
        return x * mask

    x = torch.tensor([[1.0, 3.0, 2.0]])
    assert torch.equal(compacted(route)(x), route(x))


def test_a_write_through_a_view_survives() -> None:
    def through(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.view(-1).copy_(x.view(-1))
        return y + 1

    x = torch.arange(4.0).view(2, 2)
    assert torch.equal(compacted(through)(x), x + 1)


def test_a_write_to_an_input_survives() -> None:
    def count(x: Tensor) -> int:
        x.add_(1)
        return 0

    x = torch.zeros(2)
    compacted(count)(x)
    assert torch.equal(x, torch.ones(2))


def test_a_write_that_nobody_reads_goes() -> None:
    def wasted(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        return x & x

    assert [n.op for n in compacted(wasted).graph.nodes] == ["placeholder", "call_function", "output"]


def test_operators_with_an_underscore_write_nothing() -> None:
    gm = traced(lambda x, y: x & y)
    assert not any(alias.writes(node) for node in gm.graph.nodes)


def _traced(function: Callable[[Tensor], Tensor], x: Tensor) -> fx.GraphModule:
    """Return Dynamo's graph of a function."""
    backend = EagerAndRecordGraphs()
    torch.compile(function, backend=backend)(x)
    return backend.graphs[0]


def _over_rows(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.cumsum(0) * 2)(x)


MAPPED: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "used": (lambda x: _over_rows(x) + 1, 1),
    "unused": (lambda x: (x + 1, _over_rows(x))[0], 0),
    "nested": (lambda x: torch.vmap(_over_rows)(x[:, None]) + 1, 2),
    "one of two": (lambda x: (_over_rows(x), _over_rows(x + 1))[1], 1),
}


@pytest.mark.parametrize("name", MAPPED)
def test_regions_of_vmap_stay_whole_or_go(name: str) -> None:
    """Check that the calls that enter and leave vmap, which have no users, stay while a call inside is used."""
    function, regions = MAPPED[name]
    x = torch.arange(6.0).view(2, 3)
    gm = _traced(function, x)
    alias.eliminate_dead(gm.graph)
    gm.graph.lint()
    gm.recompile()
    (made,) = gm(x)
    assert torch.equal(made, function(x))
    kinds = [fx_nodes.batching_kind(node) for node in gm.graph.nodes]
    assert kinds.count("begins") == kinds.count("ends") == regions


@pytest.mark.parametrize(
    ("target", "more", "named", "shape"),
    [
        (torch.sum, (1,), {}, (2,)),
        (torch.sum, (), {"dim": 1, "keepdim": True}, (2, 1)),
        ("sum", (0,), {"keepdim": True}, (1, 3)),
    ],
)
def test_an_added_call_has_the_value_of_its_result(
    target: object, more: tuple[int, ...], named: dict[str, int], shape: tuple[int, ...]
) -> None:
    graph = fx.Graph()
    x = splicing.with_value(graph.placeholder("x"), torch.empty(2, 3, device="meta"))
    assert walk.example_value(splicing.emit(graph, target, x, *more, **named)).shape == shape
    assert walk.example_value(splicing.emit(graph, target, x, *more, value=7, **named)) == 7
