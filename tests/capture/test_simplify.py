"""Test replacement of equations and outer products by products of matrices."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.fx as fx

from kvpass.capture.simplify import multiply_equations


@pytest.mark.parametrize(
    ("equation", "one", "other", "is_product"),
    [
        ("bij,bkj->bik", (2, 3, 4), (2, 5, 4), True),
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5), True),
        ("aij, ajk -> aik", (2, 3, 4), (1, 4, 5), True),
        ("ij,jk->ik", (3, 4), (4, 5), True),
        ("bgij,bkj->bgik", (2, 3, 4, 5), (2, 6, 5), True),
        ("bgij, bjk -> bgik", (2, 3, 4, 5), (2, 5, 6), True),
        ("bgij,bgjk->bgik", (2, 3, 4, 5), (2, 3, 5, 6), True),
        ("bhij,hjk->bhik", (2, 3, 4, 5), (3, 5, 6), False),
        ("bij,jk->bik", (2, 3, 4), (4, 5), False),
        ("bij,gkj->bik", (2, 3, 4), (2, 5, 4), False),
        ("bgij,gbkj->bgik", (2, 3, 4, 5), (3, 2, 6, 5), False),
        ("bij,bkj->bki", (2, 3, 4), (2, 5, 4), False),
        ("bij,bkj->ik", (2, 3, 4), (2, 5, 4), False),
        ("bij,bjj->bij", (2, 3, 4), (2, 4, 4), False),
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
