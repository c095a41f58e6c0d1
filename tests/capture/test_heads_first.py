"""Compare graphs with tokens before heads with graphs with heads before tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import kvpass
from kvpass.cache.handle import Handle
from kvpass.capture.canonical import APPEND
from kvpass.capture.capture import capture
from kvpass.capture.heads_first import order_equations
from kvpass.fx import walk
from tests.capture.traced import query_graph


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
        ("...qhd,...khd->...hqk", (2, 3, 4, 5), (2, 6, 4, 5), None),
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
    (found,) = [node.args[0] for node in gm.graph.nodes if walk.target_name(node) == "einsum"]
    assert found == (ordered or equation)
    assert torch.allclose(fx.GraphModule({}, gm.graph)(*tensors)[0], torch.einsum(equation, *tensors), atol=1e-6)


def attend(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
    k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    weights = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * 0.25, -1)
    return (weights @ v.transpose(1, 2)).transpose(1, 2), (k, v), past[0] * 2


def test_the_graph_is_the_same_but_for_the_order() -> None:
    """Check that only the order differs, also for other readers of the past."""
    q, past = torch.randn(1, 1, 4, 8), torch.randn(1, 5, 4, 8)
    arguments = (q, q + 1, q + 2, (past, past + 1))

    def question(gm: fx.GraphModule) -> Any:
        captured = capture(gm, [False] * len(walk.placeholders(gm.graph)))
        given = [q, q + 1, q + 2, past, past + 1]
        named = {"l_q_": 0, "l_k_": 1, "l_v_": 2, "l_past_0_": 3, "l_past_1_": 4}
        order = [named[node.name] for node in walk.placeholders(gm.graph)]
        ours = [given[i].transpose(1, 2) if at in captured.tokens_first else given[i] for at, i in enumerate(order)]
        appends = [node.args[0].name for node in captured.canonical_gm.graph.nodes if node.target is APPEND]
        return (
            [graph(*ours) for graph in (captured.dynamo_gm, captured.canonical_gm)],
            appends,
            captured.sites[0].token_dims,
        )

    results, appended, dims = query_graph(attend, arguments, question)
    out, grown, doubled = attend(*arguments)
    assert (sorted(appended), dims) == (["l_past_0_", "l_past_1_"], (1, 1))
    for result in results:
        for found, wanted in zip(result, (out, *(x.transpose(1, 2) for x in grown), doubled), strict=True):
            assert torch.allclose(found, wanted, atol=1e-6)


class Crossing(torch.nn.Module):
    """Attention to a cache and to fixed keys of an encoder, with given token dimensions."""

    def __init__(self, own: int, fixed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.fixed, self.embed = own, fixed, torch.nn.Embedding(16, 32)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(5))

    def project(self, number: int, x: Tensor, dim: int) -> Tensor:
        made = self.projections[number](x).view(*x.shape[:2], 4, 8)
        return made if dim == 1 else made.transpose(1, 2)

    def forward(self, ids: Tensor, encoded: Tensor | None = None, past: Any = None) -> Any:
        x = self.embed(ids)
        k, v = self.project(1, x, self.own), self.project(2, x, self.own)
        if encoded is not None:
            fixed = self.project(3, encoded, self.fixed), self.project(4, encoded, self.fixed)
        else:
            k, v, fixed = torch.cat([past[0], k], self.own), torch.cat([past[1], v], self.own), past[2:]
        own, other = (self.heads_first(pair, dim) for pair, dim in (((k, v), self.own), (fixed, self.fixed)))
        seen = torch.arange(own[0].shape[2])
        mask = seen <= seen[-x.shape[1] :, None]
        x = x + sdpa(self.project(0, x, 2), *own, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + sdpa(self.project(0, x, 2), *other).transpose(1, 2).flatten(2)
        return x, (k, v, *fixed)

    @staticmethod
    def heads_first(pair: Any, dim: int) -> list[Tensor]:
        return [x.transpose(1, 2) if dim == 1 else x for x in pair]


@pytest.mark.parametrize("encoded", [4, 6])  # equal to the number of heads, and different from it
@pytest.mark.parametrize(("own", "fixed"), [(1, 1), (2, 1), (1, 2)])
@torch.no_grad()
def test_keys_of_cross_attention_keep_their_order(own: int, fixed: int, encoded: int) -> None:
    model, ids = Crossing(own, fixed), torch.arange(9)[None]
    run = torch.compile(model, backend=kvpass.backend("full", inner="eager"))
    ours, plain = (each(ids[:, :5], torch.randn(1, encoded, 32, generator=seeded())) for each in (run, model))
    assert [isinstance(x, Handle) for x in ours[1]] == [True, True, False, False]
    for step in range(5, 9):
        assert torch.allclose(ours[0], plain[0], atol=1e-5)
        assert all(torch.equal(x, y) for x, y in zip(ours[1][2:], plain[1][2:], strict=True))
        ours, plain = (each(ids[:, step : step + 1], None, out[1]) for each, out in ((run, ours), (model, plain)))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Joined(torch.nn.Module):
    """Attention of one head, over matrices that join rows and heads."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.join, self.embed = join, torch.nn.Embedding(16, 8)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        q, k, v = (each(self.embed(ids)).view(*ids.shape, 1, 8).transpose(1, 2) for each in self.projections)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        query, key, value = map(self.join, (q, k, v))
        seen = torch.arange(k.shape[2])
        mask = (seen > seen[-q.shape[2] :, None])[None]
        logits = (torch.bmm(query, key.transpose(1, 2)) * 0.25).masked_fill(mask, -1e30)
        return torch.bmm(torch.softmax(logits, -1), value).view(q.shape) + 1, (k, v)


@pytest.mark.parametrize("join", [lambda x: x.reshape(2, -1, 8), lambda x: x.squeeze(1), lambda x: x.flatten(0, 1)])
@torch.no_grad()
def test_one_token_of_one_head_is_read_as_ever(join: Any) -> None:
    model, ids = Joined(join), torch.arange(8).view(2, 4)
    run = torch.compile(model, backend=kvpass.backend("full", inner="eager"))
    ours, plain = run(ids[:, :1]), model(ids[:, :1])
    for step in range(1, 4):
        assert isinstance(ours[1][0], Handle)
        ours, plain = (each(ids[:, step : step + 1], out[1]) for each, out in ((run, ours), (model, plain)))
        assert torch.allclose(ours[0], plain[0], atol=1e-5)
