"""Test the passes on models: what they match, what a step graph still contains, and where they must not apply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import transformers
from torch._dynamo.testing import EagerAndRecordGraphs

import kvpass
from kvpass.capture.canonical import APPEND, ATTENTION
from kvpass.capture.capture import capture
from kvpass.capture.rotary import find_rotary
from kvpass.fx import walk
from tests.models import ARCHITECTURES, build, prompt, teacher_forced


def compiled_graphs(
    architecture: str, steps: list[int], padding: tuple[int, ...] = (), **backend: Any
) -> list[fx.GraphModule]:
    """Return the rewritten graphs in the order of their compilation."""
    inner, (ids, mask) = EagerAndRecordGraphs(), prompt(2, sum(steps), padding)
    teacher_forced(build(architecture), ids, mask, steps, inner=inner, **backend)
    return inner.graphs


def symbols(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes whose recorded value is a symbolic size, or a tensor with one."""
    found = []
    for node in gm.graph.nodes:
        recorded = walk.example_value(node)
        sizes = recorded.shape if isinstance(recorded, torch.Tensor) else [recorded]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            found.append(node)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_graph_is_static(architecture: str) -> None:
    prompt_graph, step = compiled_graphs(architecture, [9, 1, 1, 1], (2, 0), policy="streaming", budget=6)
    assert symbols(step) == []
    assert not any(n.target in (APPEND, ATTENTION) for n in step.graph.nodes)
    writes = [n for n in step.graph.nodes if n.target is torch.ops.aten.index_put_.default]
    assert len(writes) == 2 * 2  # one row of K and one of V in each of two layers
    assert all(write.args[0].op == "placeholder" for write in writes)  # type: ignore[union-attr]
    assert sum(n.target is ATTENTION for n in prompt_graph.graph.nodes) == 2


@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX"])
def test_layers_share_one_table_of_angles(architecture: str) -> None:
    """Check that equal rotation code in several layers is shared, although its nodes have different names."""
    _, step = compiled_graphs(architecture, [9, 1, 1], policy="streaming", budget=6, positions="cache")
    tables = [node for node in step.graph.nodes if node.target is torch.ops.aten.cos.default]
    assert len(tables) == 1


def test_attention_without_a_cache_is_left_alone() -> None:
    class Encoder(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    report = kvpass.explain(Encoder(), "window", budget=8)(torch.randn(1, 2, 4, 8))
    assert [(site.verdict, site.reason) for site in report.sites] == [("left alone", "it updates no cache")]


def test_a_cache_that_grows_along_another_dimension_is_refused() -> None:
    class Wide(torch.nn.Module):
        def forward(self, q: torch.Tensor, past: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            grown = torch.cat([past, k], 1)
            return torch.nn.functional.scaled_dot_product_attention(q, grown, grown), grown

    q, past, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    report = kvpass.explain(Wide(), "window", budget=8)(q, past, k)
    assert report.rewritten == []
    assert "torch.cat([past, new], -2)" in report.refused[0].reason


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("architecture", "found"), [("Llama", True), ("GPTNeoX", True), ("Phi", True), ("GPT2", False)]
)
def test_rotary_embeddings_are_found_by_structure(architecture: str, found: bool) -> None:
    seen: list[bool] = []

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        captured = capture(gm, [False] * len(examples))
        seen.extend(find_rotary(site) is not None for site in captured.sites)
        return gm.forward

    ids, _ = prompt(2, 6, ())
    with torch.no_grad():
        torch.compile(build(architecture), backend=backend)(ids, use_cache=True)
    assert seen == [found] * 2


def test_a_preallocated_cache_is_refused_and_not_silently_full() -> None:
    model = build("Llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    ids, _ = prompt(1, 6, ())
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=8, inner="eager"))
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="pass a DynamicCache"):
        compiled(ids, past_key_values=cache, use_cache=True)


def test_a_static_cache_that_generate_makes_is_refused() -> None:
    model = kvpass.compile(build("Llama"), "window", budget=8, inner="eager")
    ids, mask = prompt(1, 6, ())
    with pytest.raises(kvpass.UnsupportedGraph, match="leave out cache_implementation='static'"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, cache_implementation="static")  # type: ignore[operator]


class Rotated(torch.nn.Module):
    """One layer with a rotary embedding of positions in a given shape; `apart` computes angles separately for keys."""

    def __init__(self, apart: bool, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.apart, self.shape = apart, shape
        self.embed, self.project = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 96)
        self.register_buffer("speed", 10_000.0 ** -(torch.arange(8) / 8))

    def angles(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        number = position.float() if self.shape == (-1, 1) else position.float()[..., None]
        angle = (number * self.speed).repeat_interleave(2, -1)
        angle = angle if angle.ndim == 2 else angle[:, None]
        return angle.cos(), angle.sin()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, past: Any = None) -> tuple[torch.Tensor, Any]:
        (rows, count), before = ids.shape, 0 if past is None else past[0].shape[2]
        position = torch.arange(before, before + count)
        row = position.view(self.shape)
        query, key, val = (
            x.view(rows, count, 2, 16).transpose(1, 2) for x in self.project(self.embed(ids)).chunk(3, -1)
        )
        shared = None if self.apart else self.angles(row)
        query, key = (rotated(x, *(shared or self.angles(row))) for x in (query, key))
        if past is not None:
            key, val = torch.cat([past[0], key], 2), torch.cat([past[1], val], 2)
        seen = mask[:, None, None].bool() & (torch.arange(before + count) <= position[:, None])
        out = torch.nn.functional.scaled_dot_product_attention(query, key, val, attn_mask=seen)
        return out.transpose(1, 2).reshape(rows, count, 32), (key, val)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    return x * cos + torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2) * sin


@torch.no_grad()
def last_output(model: Any, padding: int) -> torch.Tensor:
    """Return the output [3, 1, 32] after a prompt of ten tokens and ten steps; two rows are padded."""
    ids = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(20) >= padding * torch.tensor([[2], [1], [0]])).long()
    out, past = model(ids[:, :10], mask[:, :10])
    for t in range(10, 20):
        out, past = model(ids[:, t : t + 1], mask[:, : t + 1], past)
    return out


def by_rank(model: Any, budget: int, **settings: Any) -> Any:
    torch._dynamo.reset()
    chosen = dict(positions="cache", inner="eager", budget=budget) | settings
    return torch.compile(model, backend=kvpass.backend("streaming", **chosen))


@pytest.mark.few(1)
@pytest.mark.parametrize("apart", [False, True])
def test_queries_and_keys_that_are_rotated_apart_stand_at_their_ranks(apart: bool) -> None:
    model = Rotated(apart, (1, -1))
    exact = last_output(model, 2)
    assert torch.allclose(last_output(by_rank(model, 32), 2), exact, atol=1e-5)
    shared = Rotated(False, (1, -1))
    assert torch.allclose(last_output(by_rank(model, 8), 2), last_output(by_rank(shared, 8), 2), atol=1e-5)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_rows_that_count_alike_have_no_ranks_of_their_own(shape: tuple[int, ...]) -> None:
    model = Rotated(False, shape)
    with pytest.raises(kvpass.UnsupportedGraph, match="share one vector of positions"):
        last_output(by_rank(model, 8), 2)
    absolute = last_output(by_rank(model, 32, positions=None), 2)
    assert torch.allclose(absolute, last_output(model, 2), atol=1e-5)
