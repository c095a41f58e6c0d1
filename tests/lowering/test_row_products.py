"""Products of a single row are spelled out, those of a few rows where it is faster, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.inductor_prims import force_stride_order
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass.lowering.row_products import CACHED, spell_out

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


def spelled(function, *arguments):
    """The graph of a function on these arguments, spelled out, and how many products are left in it."""
    traced = make_fx(function, tracing_mode="fake")(*arguments)
    spell_out(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, sum(node.target in PRODUCTS for node in traced.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_on_one_row(dtype, bias):
    x, weight = torch.randn(1, 1, 48).to(dtype), torch.randn(32, 48).to(dtype)
    given = (x, weight, torch.randn(32).to(dtype)) if bias else (x, weight)
    traced, left = spelled(torch.nn.functional.linear, *given)
    assert left == 0
    exact = torch.nn.functional.linear(*(tensor.double() for tensor in given))
    made = traced(*given)
    assert made.dtype == dtype
    assert torch.allclose(made.double(), exact, atol=1e-5 if dtype == torch.float32 else 0.1)


def test_a_matrix_that_is_not_transposed():
    x, weight = torch.randn(1, 48), torch.randn(48, 32)
    traced, left = spelled(torch.mm, x, weight)
    assert left == 0
    assert torch.allclose(traced(x, weight), x @ weight, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_few_rows_through_a_linear_layer(rows):
    x, weight, bias = torch.randn(rows, 1, 48), torch.randn(32, 48), torch.randn(32)
    traced, left = spelled(torch.nn.functional.linear, x, weight, bias)
    assert left == 0
    assert torch.allclose(traced(x, weight, bias), torch.nn.functional.linear(x, weight, bias), atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (5, torch.randn(32, 48)),
        (2, torch.randn(48, 32).t()),  # as in GPT-2: rows lie together, not columns
        (2, torch.randn(32, 48).bfloat16()),
        (2, torch.empty(CACHED // 4 // 48 + 1, 48)),
    ],
)
def test_other_products_of_several_rows_are_left_alone(rows, weight):
    _, left = spelled(torch.nn.functional.linear, torch.randn(rows, 48).to(weight.dtype), weight)
    assert left == 1


def test_a_row_of_something_larger():
    def last(x, weight):
        return (x * 2)[:, -1] @ weight + x.transpose(1, 2).reshape(3, 48)[1:2] @ weight

    given = torch.randn(1, 3, 48), torch.randn(48, 32)
    traced, left = spelled(last, *given)
    assert left == 0
    assert torch.allclose(traced(*given), last(*given), atol=1e-4)


def test_rows_are_stored_once():
    def both(x, a, b):
        return x @ a, x @ b

    traced, _ = spelled(both, torch.randn(1, 8), torch.randn(8, 4), torch.randn(8, 6))
    written = [node.args[0].target for node in traced.graph.nodes if node.target is force_stride_order]
    assert written.count(aten.mul.Scalar) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_every_new_node_says_what_it_is(rows):
    """Of the strides too: the operators that follow were traced for those of the product."""
    traced, left = spelled(torch.nn.functional.linear, torch.randn(rows, 48), torch.randn(32, 48))
    made = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert left == 0
    assert all(node.meta["val"].shape is not None for node in made)
    assert made[-1].meta["val"].shape == (rows, 32)
    assert made[-1].meta["val"].stride() == (32, 1)
