"""Products of a single row are spelled out, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass.lowering.row_products import spell_out

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


def test_several_rows_are_left_alone():
    _, left = spelled(torch.mm, torch.randn(2, 48), torch.randn(48, 32))
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
    assert sum(node.target is aten.as_strided.default for node in traced.graph.nodes) == 1


def test_every_new_node_says_what_it_is():
    traced, _ = spelled(torch.mm, torch.randn(1, 48), torch.randn(48, 32))
    made = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert all(node.meta["val"].shape is not None for node in made)
    assert made[-1].meta["val"].shape == (1, 32)
