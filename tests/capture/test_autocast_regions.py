"""Test removal of regions with their own autocast from graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from kvpass.capture.autocast_regions import inline_autocast_regions
from kvpass.capture.simplify import multiply_outer_products
from kvpass.torch_private import fx_nodes, operators

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
A, B = torch.randn(2, 4, 1), torch.randn(2, 1, 5)


def region(
    inside: Callable[..., Any], one: Tensor, other: Tensor, enabled: bool = False, dtype: torch.dtype | None = None
) -> fx.GraphModule:
    """Return a graph that computes a function of two tensors inside an autocast region."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "ab"]
    mode = graph.call_function(ENTER, ("cpu", dtype, enabled, None))
    tracer = fx.proxy.GraphAppendingTracer(graph)
    result = inside(*(fx.Proxy(node, tracer) for node in nodes)).node
    graph.call_function(EXIT, (mode,))
    graph.output(result)
    gm = fx.GraphModule({}, graph)
    env: dict[fx.Node, Any] = dict(zip(nodes, (one, other), strict=True))
    with torch.autocast("cpu", dtype, enabled=enabled):
        for node in gm.graph.nodes:
            if node in env:
                node.meta["example_value"] = env[node]
            elif node.op in ("call_function", "call_method") and node.target not in (ENTER, EXIT):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                function = getattr(args[0], node.target) if node.op == "call_method" else node.target
                env[node] = function(*args[node.op == "call_method" :], **kwargs)
                node.meta["example_value"] = env[node]
    return gm


WEIGHT, KEYS = torch.randn(4, 4), torch.randn(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("inside", "one", "other"),
    [
        (operator.mul, A, B),
        (F.linear, A.mT, WEIGHT),
        (operator.matmul, A.mT.double(), A.double()),
        (operator.matmul, A.mT.bfloat16(), A),
        (lambda a, b: F.linear(a, b).softmax(-1), A.mT, WEIGHT),
        (lambda a, b: F.scaled_dot_product_attention(a, b, b), KEYS, KEYS),
        (lambda a, b: torch.cat((F.linear(a, b), a), 1), A.mT, WEIGHT),
        (lambda a, b: F.linear(F.layer_norm(a, (4,)), b).float(), A.mT, WEIGHT),
    ],
)
def test_the_casts_of_an_enabled_region_are_written_out(inside: Callable[..., Any], one: Tensor, other: Tensor) -> None:
    gm = region(inside, one, other, enabled=True)
    wanted = gm(one, other)
    inline_autocast_regions(gm.graph)
    gm.recompile()
    assert modes(gm) == 0
    assert gm(one, other).dtype == wanted.dtype
    assert torch.equal(gm(one, other), wanted)


def test_a_region_inside_of_autocast_to_another_dtype_stays() -> None:
    gm = region(F.linear, A.mT, WEIGHT, enabled=True, dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        inline_autocast_regions(gm.graph)
    assert modes(gm) == 2


def test_a_constant_may_stand_in_a_region() -> None:
    gm = region(F.linear, A.mT, WEIGHT, enabled=True)
    linear = next(node for node in gm.graph.nodes if node.target is F.linear)
    gm.constant = torch.ones(4)
    with gm.graph.inserting_before(linear):
        constant = gm.graph.create_node("get_attr", "constant")
    constant.meta["example_value"] = gm.constant
    inline_autocast_regions(gm.graph)
    assert modes(gm) == 0


def test_a_region_in_which_a_cast_operand_is_written_to_stays() -> None:
    gm = region(lambda a, b: a.addmm_(b, b), WEIGHT.clone(), WEIGHT, enabled=True)
    next(node for node in gm.graph.nodes if node.target == "addmm_").meta["example_value"] = WEIGHT.bfloat16()
    inline_autocast_regions(gm.graph)
    assert modes(gm) == 2


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
        inline_autocast_regions(gm.graph)
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
    ],
)
def test_other_regions_stay(inside: Any, one: Tensor, other: Tensor, enabled: bool) -> None:
    gm = region(inside, one, other, enabled)
    multiply_outer_products(gm.graph)
    inline_autocast_regions(gm.graph)
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
