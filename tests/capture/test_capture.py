"""Compare the canonical form of graphs, in two operators, with the graphs themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.canonical import APPEND, ATTENTION, LOG_SUM_EXP
from kvpass.capture.capture import Capture, capture
from kvpass.fx import op_table, walk
from kvpass.torch_private import regions
from tests.capture.test_decomposed_attention import SPELLINGS, Model, Spelling

CAPTURED = (APPEND, ATTENTION, LOG_SUM_EXP)


class Beside:
    """A backend that runs graphs and their canonical forms, and keeps both with the difference of their outputs."""

    def __init__(self) -> None:
        self.captured: list[tuple[fx.GraphModule, Capture]] = []
        self.apart: list[float] = []

    def __call__(self, gm: fx.GraphModule, examples: Any) -> Callable[..., Any]:
        copy = regions.inline_regions(gm)
        captured = capture(copy, [False] * len(examples))
        self.captured.append((copy, captured))

        def run(*given: Any) -> Any:
            theirs, ours = gm(*given), captured.canonical_gm(*given)
            pairs = [(a, b) for a, b in zip(theirs, ours, strict=True) if a.is_floating_point()]
            self.apart += [float((a - b).abs().max()) for a, b in pairs]
            return theirs

        return run

    def calls(self, target: Any) -> list[fx.Node]:
        return [
            node for _, captured in self.captured for node in captured.canonical_gm.graph.nodes if node.target is target
        ]


def run(model: Callable[..., Any], *calls: tuple[Any, ...]) -> Beside:
    beside = Beside()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=beside)
    with torch.no_grad():
        past: Any = None
        for given in calls:
            _, past = compiled(*given, *([past] if past is not None else []))
    return beside


@pytest.mark.few(4)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_canonical_graph_equals_the_models_graph(spelling: Spelling) -> None:
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    beside = run(Model(spelling).eval(), (ids[:, :6],), (ids[:, 6:8],), (ids[:, 8:],))
    assert max(beside.apart) < 1e-5
    assert len(beside.calls(ATTENTION)) == len(beside.captured) >= 2
    assert len(beside.calls(APPEND)) == 2 * len(beside.captured)
    for _, captured in beside.captured:
        left = {walk.target_name(node) for node in captured.canonical_gm.graph.nodes}
        assert not left & {"softmax", "scaled_dot_product_attention", "cat", "bmm", "baddbmm"}


def attend(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
    k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
    wide = [x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, 6, 8) for x in (k, v)]
    weights = torch.softmax(q @ wide[0].transpose(2, 3) * 0.25, -1)
    return weights @ wide[1], (k, v)


def test_a_literal_graph_before_and_after() -> None:
    torch.manual_seed(0)
    q, k, past = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    beside = run(attend, (q, k, k + 1, (past, past + 1)))
    (_, captured), *_ = beside.captured
    shown = [
        f"{node.name} = {node.target}({', '.join(map(str, node.args))})"
        for node in captured.canonical_gm.graph.nodes
        if node.op != "placeholder" and node.op != "output"
    ]
    assert shown == [
        "append_default = kvpass.append.default(l_past_0_, l_k_)",
        "append_default_1 = kvpass.append.default(l_past_1_, l_v_)",
        "attention_default = kvpass.attention.default(l_q_, append_default, append_default_1, None, None, 0.25, None)",
    ]
    assert max(beside.apart) < 1e-6


def test_returned_keys_without_a_concatenation_are_appended_to_an_empty_past() -> None:
    def prompt(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (k * 1, v * 1)

    def stored(q: Tensor, k: Tensor, v: Tensor) -> Any:
        k, v = k + 0, v + 0
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (k, v)

    q = torch.randn(1, 2, 4, 8)
    assert run(prompt, (q, q, q)).calls(ATTENTION) == []  # it does not return the keys that it attends to
    beside = run(stored, (q, q, q))
    assert [node.args[0] for node in beside.calls(APPEND)] == [None, None]
    assert op_table.named_arguments(beside.calls(ATTENTION)[0])["causal"] is True


@pytest.mark.parametrize("name", ["mT", "mH"])
def test_attributes_that_transpose_are_read(name: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
        return torch.softmax(q @ getattr(k, name), -1) @ v, (k, v)

    q, past = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    beside = run(attend, (q, q, q, (past, past + 1)))
    assert len(beside.calls(ATTENTION)) == 1
    assert max(beside.apart) < 1e-6


def in_halves(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
    """Attend twice on one cache, the second time with the first output as query."""
    k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
    first = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return torch.nn.functional.scaled_dot_product_attention(first, k, v), (k, v)


def test_a_query_that_is_an_output() -> None:
    q, past = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    beside = run(in_halves, (q, q, q, (past, past + 1)))
    (_, captured), *_ = beside.captured
    first, second = beside.calls(ATTENTION)
    assert second.args[0] is first
    assert [len(site.shared_by) for site in captured.sites] == [1]
    assert max(beside.apart) < 1e-6


Growing = Callable[[Tensor, Tensor], Tensor]
STRANGE: dict[str, Growing] = {
    "hstack": lambda past, new: torch.hstack([past.transpose(1, 2), new.transpose(1, 2)]).transpose(1, 2),
    "pad": lambda past, new: torch.nn.functional.pad(past, (0, 0, 0, 1)) + torch.nn.functional.pad(new, (0, 0, 5, 0)),
    "stack": lambda past, new: torch.stack([*past.unbind(2), new[:, :, 0]], 2),
    "copy": lambda past, new: past.new_empty(1, 2, 6, 8).copy_(torch.cat([past, new], -2)),
    "einsum": lambda past, new: torch.cat([past.mT, new.mT], -1).mT,
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("read", [True, False])
def test_growth_that_is_not_read_is_refused(name: str, read: bool) -> None:
    """Check the refusal with and without a readable attention call next to it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        k, v = STRANGE[name](past[0], k), STRANGE[name](past[1], v)
        probs = torch.softmax(q @ k.mT, -1) if read else (q @ k.mT).exp()
        return probs @ v, (k, v)

    q, past = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    beside = run(attend, (q, q, q, (past, past + 1)))
    (_, captured), *_ = beside.captured
    assert captured.sites == []
    assert captured.refusals


def test_a_state_of_constant_length_is_no_cache() -> None:
    """Test the last states of a convolution."""

    def step(x: Tensor, past: Tensor) -> Any:
        states = torch.cat([past, x], -1)[..., -4:]
        return states.sum(-1), states

    beside = run(step, (torch.randn(1, 8, 1), torch.randn(1, 8, 4)))
    assert [captured.search_results for _, captured in beside.captured] == [[]]


def test_a_cache_that_is_used_elsewhere_is_refused_at_that_use() -> None:
    """Check that the refusal names this use, not a read of the shape, which any graph may have."""
    refusals: list[str] = []

    def backend(gm: fx.GraphModule, examples: Any) -> Callable[..., Any]:
        captured = capture(gm, [isinstance(x, Tensor) and x.ndim == 4 for x in examples])
        refusals.extend(
            f"{walk.source_line(each.node)}: {each.refusal}" for each in captured.search_results if each.refusal
        )
        return gm.forward

    def function(x: Tensor, past: Tensor) -> Tensor:
        x = x * past.shape[2]
        return x + past.mean()

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True)(torch.ones(3), torch.ones(1, 2, 5, 4))
    [refusal] = refusals
    assert "past.mean()" in refusal
    assert "outside of an attention call" in refusal
