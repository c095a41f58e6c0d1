"""Small tools on graphs."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import graphs


def traced(function: object) -> fx.GraphModule:
    return fx.symbolic_trace(function)  # type: ignore[arg-type]


def swept(function: object) -> fx.GraphModule:
    gm = traced(function)
    graphs.eliminate_dead(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def test_a_write_in_place_survives_if_it_is_read() -> None:
    def route(x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask.scatter_(1, x.topk(1)[1], 1.0)
        return x * mask

    x = torch.tensor([[1.0, 3.0, 2.0]])
    assert torch.equal(swept(route)(x), route(x))


def test_a_write_through_a_view_survives() -> None:
    def through(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.view(-1).copy_(x.view(-1))
        return y + 1

    x = torch.arange(4.0).view(2, 2)
    assert torch.equal(swept(through)(x), x + 1)


def test_a_write_to_an_input_survives() -> None:
    def count(x: Tensor) -> int:
        x.add_(1)
        return 0

    x = torch.zeros(2)
    swept(count)(x)
    assert torch.equal(x, torch.ones(2))


def test_a_write_that_nobody_reads_goes() -> None:
    def wasted(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        return x & x

    assert [n.op for n in swept(wasted).graph.nodes] == ["placeholder", "call_function", "output"]


def test_operators_with_an_underscore_write_nothing() -> None:
    gm = traced(lambda x, y: x & y)
    assert not any(graphs.writes(node) for node in gm.graph.nodes)
