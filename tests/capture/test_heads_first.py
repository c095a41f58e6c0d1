"""Graphs with tokens before heads, as graphs with heads before tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.canonical import APPEND
from kvpass.capture.capture import capture
from kvpass.capture.heads_first import order_equations
from kvpass.fx import walk
from tests.capture.traced import answered


@pytest.mark.parametrize(
    ("equation", "one", "other", "ordered"),
    [
        ("bqhd,bshd->bhqs", (2, 3, 4, 5), (2, 6, 4, 5), "bhqd,bhsd->bhqs"),
        ("bhqs,bshd->bqhd", (2, 4, 3, 6), (2, 6, 4, 5), "bhqs,bhsd->bhqd"),
        ("bhqd,bhkd->bqhk", (2, 4, 3, 5), (2, 4, 6, 5), "bhqd,bhkd->bhqk"),
        ("bhqd,bhkd->bhqk", (2, 4, 3, 5), (2, 4, 6, 5), None),
        ("bqd,bqhd->bhd", (2, 3, 5), (2, 3, 4, 5), None),
        ("bqhd,bshd->bhq", (2, 3, 4, 5), (2, 6, 4, 5), None),
        ("bqhd,kd->bqhk", (2, 3, 4, 5), (6, 5), None),
    ],
)
def test_an_equation_gets_rows_and_heads_first(
    equation: str, one: tuple[int, ...], other: tuple[int, ...], ordered: str | None
) -> None:
    graph, tensors = fx.Graph(), (torch.randn(one), torch.randn(other))
    nodes = [graph.placeholder(name) for name in "ab"]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["example_value"] = tensor
    graph.output((graph.call_function(torch.functional.einsum, (equation, *nodes)),))
    gm = order_equations(fx.GraphModule({}, graph))
    (found,) = [node.args[0] for node in gm.graph.nodes if walk.name_of(node) == "einsum"]
    assert found == (ordered or equation)
    assert torch.allclose(fx.GraphModule({}, gm.graph)(*tensors)[0], torch.einsum(equation, *tensors), atol=1e-6)


def attend(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
    k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    weights = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * 0.25, -1)
    return (weights @ v.transpose(1, 2)).transpose(1, 2), (k, v), past[0] * 2


def test_the_graph_is_the_same_but_for_the_order() -> None:
    """Also for what else reads the past."""
    q, past = torch.randn(1, 1, 4, 8), torch.randn(1, 5, 4, 8)
    arguments = (q, q + 1, q + 2, (past, past + 1))

    def question(gm: fx.GraphModule) -> Any:
        captured = capture(gm, [False] * len(walk.placeholders(gm.graph)))
        given = [q, q + 1, q + 2, past, past + 1]
        named = {"l_q_": 0, "l_k_": 1, "l_v_": 2, "l_past_0_": 3, "l_past_1_": 4}
        order = [named[node.name] for node in walk.placeholders(gm.graph)]
        ours = [given[i].transpose(1, 2) if at in captured.tokens_first else given[i] for at, i in enumerate(order)]
        appends = [node.args[0].name for node in captured.gm.graph.nodes if node.target is APPEND]
        return [graph(*ours) for graph in (captured.model, captured.gm)], appends, captured.sites[0].token_dims

    results, appended, dims = answered(attend, arguments, question)
    out, grown, doubled = attend(*arguments)
    assert (sorted(appended), dims) == (["l_past_0_", "l_past_1_"], (1, 1))
    for result in results:
        for found, wanted in zip(result, (out, *(x.transpose(1, 2) for x in grown), doubled), strict=True):
            assert torch.allclose(found, wanted, atol=1e-6)
