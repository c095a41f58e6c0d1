"""Test the decode step as a graph: static, in place, and equal to the eager step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass.cache.cached_attention import CachedAttention, NewTokens
from kvpass.cache.step import decode_step
from tests.layer import LayerOnSlots, layout_for
from tests.strategies import TABLE, Case, cases
from tests.test_chunks_and_padding import stretches

HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Traced:
    """`decode_step`, traced once for each of its two graphs."""

    def __init__(self):
        self.graphs = {}

    def __call__(self, layout, site, slots, new, compact):
        tensors = slots.tensors()

        def step(tensors, new, weights):
            here = dataclasses.replace(site, policy_weights=tuple(weights))
            return decode_step(layout, here, slots.with_tensors(tensors), NewTokens(*new), compact)

        arguments = (tensors, list(new), layout.policy_weights)
        if compact not in self.graphs:
            self.graphs[compact] = make_fx(step, tracing_mode="fake")(*arguments)
        return self.graphs[compact](*arguments)


@pytest.mark.few(2)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@settings(max_examples=6)
@given(data=st.data())
def test_a_traced_step_is_static_in_place_and_the_same(row, data):
    case = data.draw(cases(row, dim=8, prompt=data.draw(st.sampled_from([3, 9]))))
    policy = case.policy.for_layer(0, 1)
    parts = list(stretches(case, [case.prompt] + [1] * 12, 0.0, False))
    budget = case.budget if policy.evicts else 40
    layout = layout_for(policy, budget, parts[0], case.positions == "cache")
    traced = Traced()
    eager, graph = LayerOnSlots(layout, 1e4), LayerOnSlots(layout, 1e4, step=traced)
    for part in parts:
        torch.testing.assert_close(graph.feed(part), eager.feed(part))
        assert graph.positions() == eager.positions()
    for compact, module in traced.graphs.items():
        check_graph(module.graph, graph.slots, rewrites=policy.aligns == ("compact" if compact else "step"))


def check_graph(graph, slots, rewrites=False):
    """Check that the host reads nothing, and that K and V are written row by row in their buffers.

    A policy that stores aligned rows also overwrites each buffer once, with `copy_`.
    """
    rows = {torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}
    for node in graph.nodes:
        assert node.target not in HOST
        if node.target in rows:
            assert node.target is torch.ops.aten.index_put_.default
            assert written(node).op == "placeholder"
        if node.op == "call_function" and str(node.target).endswith("_.default") and node.target not in rows:
            whole = node.args[0].meta["val"].shape in [part.key.shape for part in slots.by_class]
            assert not whole or (rewrites and node.target is torch.ops.aten.copy_.default)


def written(node):
    """Return the buffer at the start of a chain of row writes."""
    while node.target is torch.ops.aten.index_put_.default:
        node = node.args[0]
    return node


@pytest.mark.slow
def test_a_merging_step_is_compiled_without_a_copy_of_the_slots():
    """Check two row writes to one buffer with reads in between: no tensor of its size is allocated."""
    case = Case("d2o", {}, 0, 2, 2, 2, 16, 68, 70, 1, "absolute", None)
    prompt, last = stretches(case, [70, 1], 0.0, False)
    traced = Traced()
    lowered = LayerOnSlots(layout_for(case.policy, 68, prompt, False), 1e4, step=traced)
    lowered.feed(prompt)
    arguments = [*lowered.slots.tensors(), last.q, last.k, last.v, last.valid[:, 0]]
    weights = lowered.layout.policy_weights
    expected = [x.clone() for x in arguments]
    slots, new = lowered.slots.with_tensors(expected[:-4]), NewTokens(*expected[-4:])
    lowered.step(lowered.layout, CachedAttention(0.25), slots, new, False)
    module = traced.graphs[False]
    flat = make_fx(lambda *args: module(list(args[:-4]), list(args[-4:]), weights))(*[x.clone() for x in arguments])
    _, code = run_and_get_code(torch.compile(flat, fullgraph=True), *arguments)
    assert "empty_strided_cpu((2, 2, 69, 16)" not in code[-1]
    for got, wanted in zip(arguments, expected, strict=True):
        torch.testing.assert_close(got, wanted)
