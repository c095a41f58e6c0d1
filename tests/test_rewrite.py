"""The passes on their own: what they find, what a step graph has left, and where they must not fire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import transformers

import kvpass
from kvpass import graphs, match
from kvpass.pieces import InPieces, Pieces
from tests.models import ARCHITECTURES, build, force, prompt


def compiled_graphs(
    architecture: str, steps: list[int], padding: tuple[int, ...] = (), **backend: Any
) -> list[fx.GraphModule]:
    """The rewritten graphs, in the order in which they were compiled."""
    seen: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, examples: Any) -> Any:
        seen.append(gm)
        return gm.forward

    ids, mask = prompt(2, sum(steps), padding)
    force(build(architecture), ids, mask, steps, inner=inner, **backend)
    return seen


def symbols(gm: fx.GraphModule) -> list[fx.Node]:
    """Nodes whose recorded value is a symbolic size, or a tensor with one."""
    found = []
    for node in gm.graph.nodes:
        recorded = graphs.value(node)
        sizes = recorded.shape if isinstance(recorded, torch.Tensor) else [recorded]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            found.append(node)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_graph_is_static(architecture: str) -> None:
    prompt_graph, step = compiled_graphs(architecture, [9, 1, 1, 1], (2, 0), policy="streaming", budget=6)
    assert symbols(step) == []
    assert not any(torch.nn.functional.scaled_dot_product_attention is n.target for n in step.graph.nodes)
    writes = [n for n in step.graph.nodes if n.target is torch.ops.aten.index_put_.default]
    assert len(writes) == 2 * 2  # one row of K and one of V in each of two layers
    assert all(write.args[0].op == "placeholder" for write in writes)  # type: ignore[union-attr]
    assert any(torch.nn.functional.scaled_dot_product_attention is n.target for n in prompt_graph.graph.nodes)


def test_statistics_are_only_made_for_who_asks() -> None:
    for policy, count in (("window", 0), ("h2o", 2)):
        prompt_graph, _ = compiled_graphs("Llama", [9, 1], policy=policy, budget=6)
        calls = [n for n in prompt_graph.graph.nodes if n.target is torch.ops.kvpass.column_scores.default]
        assert len(calls) == count


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
    assert "along dimension -2" in report.refused[0].reason


@pytest.mark.parametrize(
    ("architecture", "found"), [("Llama", True), ("GPTNeoX", True), ("Phi", True), ("GPT2", False)]
)
def test_rotary_embeddings_are_found_by_structure(architecture: str, found: bool) -> None:
    seen: list[bool] = []

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        sites = [f.site for f in match.find(gm, set()) if f.site]
        seen.extend(match.find_rotary(gm, site) is not None for site in sites)
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


def half(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    a, b = x[..., :4], x[..., 4:]
    return x * cos + torch.cat([-b, a], -1)


def partial(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    turned, rest = x.split([6, 2], -1)
    a, b = turned.chunk(2, -1)
    return torch.cat([turned * cos[..., :6] + torch.cat([-b, a], -1), rest], -1)


def interleaved(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


@pytest.mark.parametrize("function", [half, partial, interleaved])
def test_functions_run_on_tensors_in_pieces(function: Any) -> None:
    x, cos = torch.randn(2, 3, 8), torch.randn(3, 8)
    pieces = InPieces(fx.symbolic_trace(function)).run_on(x, cos)
    assert torch.allclose(torch.cat(pieces, -1), function(x, cos))


def test_halves_are_never_joined() -> None:
    pieces = InPieces(fx.symbolic_trace(half)).run_on(torch.randn(2, 3, 8), torch.randn(3, 8))
    assert [piece.shape[-1] for piece in pieces] == [4, 4]


def test_pieces_cut_and_join() -> None:
    x = torch.arange(6.0)
    pieces = Pieces((x[:2], x[2:]))
    assert [p.tolist() for p in pieces.between(1, 5).parts] == [[1.0], [2.0, 3.0, 4.0]]
    assert torch.equal(pieces.joined(), x)
