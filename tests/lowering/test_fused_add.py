"""Check that sums of the residual stream are materialised, and nothing else."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass.lowering.graph_passes import materialize_sums

aten = torch.ops.aten


def written(function, *arguments):
    """Return the graph of a function with its sums materialised, and their number."""
    traced = make_fx(function, tracing_mode="fake")(*arguments)
    materialize_sums(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, sum(node.target is aten.as_strided.default for node in traced.graph.nodes)


def layers(x, weights):
    for weight in weights:
        x = x + (x * x.pow(2).mean(-1, keepdim=True)) @ weight
    return x


def test_every_sum_that_is_read_twice():
    x, weights = torch.randn(2, 1, 8), [torch.randn(8, 8) / 8 for _ in range(4)]
    traced, count = written(layers, x, weights)
    assert count == 3  # the last sum is only returned
    assert torch.allclose(traced(x, weights), layers(x, weights), atol=1e-5)


def test_readers_keep_their_values_where_the_graph_returns_the_sum():
    def both(x, y):
        total = x + y
        return total, total * 2

    x, y = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    traced, count = written(both, x, y)
    assert count == 1
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(traced(x, y), both(x, y), strict=True))


def test_other_sums_are_left_alone():
    def others(x, bias, keys):
        wide, number, turned = x + bias, x + 1.0, keys + keys * 2
        return wide * wide, number * number.sum(), turned * turned.sum()

    _, count = written(others, torch.randn(1, 1, 8), torch.randn(8), torch.randn(1, 2, 5, 8))
    assert count == 0
