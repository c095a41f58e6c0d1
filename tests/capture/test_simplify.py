"""Test removal of outer products and of regions without autocast, where autocast has no effect."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.simplify import leave_disabled_regions, multiply_equations, multiply_outer_products
from kvpass.torch_private import fx_nodes, operators

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
A, B = torch.randn(2, 4, 1), torch.randn(2, 1, 5)


def region(inside: Callable[..., Any], one: Tensor, other: Tensor, enabled: bool = False) -> fx.GraphModule:
    """Return a graph that computes a function of two tensors inside an autocast region."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "ab"]
    mode = graph.call_function(ENTER, ("cpu", None, enabled, None))
    tracer = fx.proxy.GraphAppendingTracer(graph)
    result = inside(*(fx.Proxy(node, tracer) for node in nodes)).node
    graph.call_function(EXIT, (mode,))
    graph.output(result)
    gm = fx.GraphModule({}, graph)
    env: dict[fx.Node, Any] = dict(zip(nodes, (one, other), strict=True))
    for node in gm.graph.nodes:
        if node in env:
            node.meta["example_value"] = env[node]
        elif node.op in ("call_function", "call_method") and node.target not in (ENTER, EXIT):
            args = fx.node.map_arg(node.args, env.__getitem__)
            env[node] = getattr(args[0], node.target)(*args[1:]) if node.op == "call_method" else node.target(*args)
            node.meta["example_value"] = env[node]
    return gm


def modes(gm: fx.GraphModule) -> int:
    return sum(map(fx_nodes.sets_a_mode, gm.graph.nodes))


@pytest.mark.parametrize(
    "inside",
    [
        lambda a, b: (a @ b).cos() * 2.0,
        lambda a, b: torch.matmul(a, b).transpose(1, 2),
        lambda a, b: torch.cat((a, a), -1),
        lambda a, b: (a * b).sin().to(torch.float32),
    ],
)
def test_a_region_of_angles_is_removed(inside: Callable[..., Any]) -> None:
    """Compare with the result of the region under an outer autocast."""
    gm = region(inside, A, B)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gm(A, B)
        multiply_outer_products(gm.graph)
        leave_disabled_regions(gm.graph)
        gm.recompile()
        assert torch.equal(gm(A, B), wanted)
    assert modes(gm) == 0


@pytest.mark.parametrize(
    ("inside", "one", "other", "enabled"),
    [
        (operator.matmul, A.mT, A, False),  # a sum over four numbers, which autocast rounds
        (operator.matmul, A.double(), B.double(), False),
        (torch.nn.functional.linear, A.mT, A[0].mT, False),
        (operator.mul, A.bfloat16(), B, False),  # operands of different dtypes, which are promoted
        (operator.mul, A, B, True),
    ],
)
def test_other_regions_stay(inside: Any, one: Tensor, other: Tensor, enabled: bool) -> None:
    gm = region(inside, one, other, enabled)
    multiply_outer_products(gm.graph)
    leave_disabled_regions(gm.graph)
    assert modes(gm) == 2
    assert any(node.target == inside for node in gm.graph.nodes)


def fails_inside(depth: int) -> None:
    with operators.preserving_autocast():
        for _ in range(depth):
            ENTER("cpu", torch.bfloat16, True, None)
        raise ZeroDivisionError


@pytest.mark.parametrize("depth", [1, 2])
def test_autocast_is_as_it_was_after_an_error(depth: int) -> None:
    for outer in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=outer):
            with pytest.raises(ZeroDivisionError):
                fails_inside(depth)
            assert torch.is_autocast_enabled("cpu") is outer
            assert torch.get_autocast_dtype("cpu") == torch.float16
    assert not torch.is_autocast_enabled("cpu")
    weight = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert (weight @ weight).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("equation", "one", "other", "is_product"),
    [
        ("bij,bkj->bik", (2, 3, 4), (2, 5, 4), True),
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5), True),
        ("aij, ajk -> aik", (2, 3, 4), (1, 4, 5), True),
        ("ij,jk->ik", (3, 4), (4, 5), True),
        ("bij,bkj->bki", (2, 3, 4), (2, 5, 4), False),
        ("bij,bkj->ik", (2, 3, 4), (2, 5, 4), False),
        ("bij,bjj->bij", (2, 3, 4), (2, 4, 4), False),
        ("bij,jk->bik", (2, 3, 4), (4, 5), False),
        ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5), False),
        ("i,j->ij", (3,), (4,), False),
        ("bij,bkj", (2, 3, 4), (2, 5, 4), False),
    ],
)
def test_an_equation_that_is_a_product_of_matrices_becomes_one(
    equation: str, one: tuple[int, ...], other: tuple[int, ...], is_product: bool
) -> None:
    graph, tensors = fx.Graph(), (torch.randn(one), torch.randn(other))
    nodes = [graph.placeholder(name) for name in "ab"]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["example_value"] = tensor
    product = graph.call_function(torch.functional.einsum, (equation, *nodes))
    graph.output(product)
    multiply_equations(graph)
    assert (product.target is operator.matmul) == is_product
    gm = fx.GraphModule({}, graph)
    assert torch.allclose(gm(*tensors), torch.einsum(equation, *tensors), atol=1e-6)
