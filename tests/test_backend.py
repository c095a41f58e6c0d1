"""Test the backend object and bad input: errors are kvpass errors and lose no state."""

from __future__ import annotations

import subprocess
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpass
from kvpass.torch_private import dynamo
from tests.models import build, graphs, prompt


class Tiny(nn.Module):
    """One attention layer that passes its cache as a tuple of tensors."""

    def __init__(self, attention: str = "sdpa", dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.embed, self.qkv, self.out = nn.Embedding(64, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, 64)

    def forward(self, ids: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = self.qkv(self.embed(ids))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in x.chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        if self.attention == "sdpa":
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        elif self.attention == "by hand":
            y = (q @ k.transpose(2, 3)).softmax(-1) @ v
        else:
            y = (q @ k.transpose(2, 3)).sigmoid() @ v
        return self.out(y.transpose(1, 2).flatten(2)), (k, v)


@torch.no_grad()
def loop(model: Any, ids: Tensor, first: int = 5) -> Tensor:
    logits, past = model(ids[:, :first])
    outputs = [logits]
    for t in range(first, ids.shape[1]):
        logits, past = model(ids[:, t : t + 1], past)
        outputs.append(logits)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("policy", ["full", "window", "streaming", "h2o", "random"])
def test_a_plain_module_with_tuples(policy: str) -> None:
    model = Tiny().eval()
    ids = torch.randint(0, 64, (2, 20))
    expected = loop(model, ids)
    compiled = torch.compile(model, backend=kvpass.backend(policy, budget=32, inner="eager"))
    assert torch.allclose(loop(compiled, ids), expected, atol=1e-5)
    assert graphs() == 2


def test_equal_settings_are_equal_backends() -> None:
    one, two = (kvpass.backend("h2o", budget=64, heavy=0.25) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != kvpass.backend("h2o", budget=64)
    assert one == kvpass.backend(kvpass.policies.get("h2o")(heavy=0.25), budget=64)


def test_equal_backends_compile_once() -> None:
    model, ids = Tiny().eval(), torch.randint(0, 64, (2, 12))
    for _ in range(2):
        loop(torch.compile(model, backend=kvpass.backend("h2o", budget=64, inner="eager")), ids)
    assert graphs() == 2


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (dict(policy="h3o", budget=8), kvpass.PolicyError, "unknown policy 'h3o'"),
        (dict(policy="h2o", budget=8, hevy=0.5), kvpass.PolicyError, "unknown option 'hevy'"),
        (dict(policy="h2o", budget=8, heavy=1.5), kvpass.PolicyError, "heavy=1.5"),
        (dict(policy="streaming", budget=8, sinks=-1), kvpass.PolicyError, "sinks=-1"),
        (dict(policy="random", budget=8, seed=-1), kvpass.PolicyError, "seed=-1"),
        (dict(policy="streaming", budget=4), kvpass.BudgetError, "at least 5"),
        (dict(policy="h2o"), kvpass.BudgetError, "needs a budget"),
        (dict(policy="h2o", budget=0.0), kvpass.BudgetError, "share of the prompt"),
        (dict(policy="h2o", budget=1.5), kvpass.BudgetError, "share of the prompt"),
        (dict(policy="h2o", budget="many"), kvpass.BudgetError, "must be a number of slots, or a share"),
        (dict(policy="h2o", budget=True), kvpass.BudgetError, "must be a number of slots, or a share"),
        (dict(policy="h2o", budget=8, positions="relative"), kvpass.PolicyError, "positions='relative'"),
        (dict(policy="h2o", budget=8, inner="inductr"), kvpass.PolicyError, "inner='inductr'"),
        (dict(policy="h2o", budget=8, inner="reference"), kvpass.PolicyError, "inner='reference': must be one"),
        (dict(policy="h2o", budget=8, mode="fastest"), kvpass.PolicyError, "mode='fastest'"),
        (dict(policy="h2o", budget=8, options={"no_such": 1}), kvpass.PolicyError, "'no_such'|no_such"),
        (dict(policy="h2o", budget=8, options={"post_grad_custom_pre_pass": None}), kvpass.PolicyError, "leave it out"),
    ],
)
def test_bad_settings_name_the_option(settings: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        kvpass.backend(**settings)


def test_bad_settings_by_name_are_raised_too() -> None:
    compiled = torch.compile(Tiny(), backend="kvpass", options={"policy": "h2o", "budget": 64, "hevy": 1})
    with torch.no_grad(), pytest.raises(kvpass.PolicyError, match="hevy"):
        compiled(torch.zeros(1, 4, dtype=torch.int64))


def test_attention_that_cannot_be_rewritten_is_refused_with_its_line() -> None:
    model, ids = Tiny("of a new kind").eval(), torch.randint(0, 64, (2, 12))
    expected = loop(model, ids)
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=8, inner="eager"))
    with pytest.raises(kvpass.UnsupportedGraph, match=r"test_backend.py:\d+: .*torch.cat"):
        loop(compiled, ids)
    assert torch.equal(loop(model, ids), expected)  # uncompiled, the model still runs


def test_a_refusal_that_is_raised_again_holds_no_frames_of_earlier_calls() -> None:
    compiled = torch.compile(Tiny("of a new kind").eval(), backend=kvpass.backend("window", budget=8, inner="eager"))
    frames = []
    for _ in range(3):
        with pytest.raises(kvpass.UnsupportedGraph, match=r"torch\.cat") as refused:
            loop(compiled, torch.zeros(2, 12, dtype=torch.int64))
        frames.append(len([*traceback.walk_tb(refused.value.__traceback__)]))
    assert frames[1] == frames[2]


def test_not_strict_leaves_it_and_warns() -> None:
    model, ids = Tiny("of a new kind").eval(), torch.randint(0, 64, (2, 12))
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=8, inner="eager", strict=False))
    with pytest.warns(kvpass.KVPassWarning, match="cannot be rewritten"):
        got = loop(compiled, ids)
    assert torch.allclose(got, loop(model, ids), atol=1e-5)


def test_training_is_refused() -> None:
    model = Tiny()
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=8, inner="eager"))
    with pytest.raises(kvpass.UnsupportedGraph, match="gradients"):
        compiled(torch.randint(0, 64, (2, 12)))


def test_a_full_budget_is_an_error_that_says_so() -> None:
    model, ids = Tiny().eval(), torch.randint(0, 64, (2, 20))
    compiled = torch.compile(model, backend=kvpass.backend("full", budget=10, inner="eager"))
    with pytest.raises(kvpass.BudgetError, match="budget of 10 is full"):
        loop(compiled, ids)
    with torch.no_grad(), pytest.raises(kvpass.BudgetError, match="prompt of 12"):
        compiled(ids[:, :12])


def test_a_cache_that_is_not_floating_point_is_refused() -> None:
    class Quantised(Tiny):
        def forward(self, ids: Tensor, past: Any = None) -> Any:
            x = self.embed(ids).unflatten(-1, (2, -1)).transpose(1, 2)
            k = (x * 10).to(torch.int8)
            k = torch.cat([past[0], k], 2)
            v = torch.cat([past[1], x], 2)
            return torch.nn.functional.scaled_dot_product_attention(x, k.to(x.dtype), v), (k, v)

    past = torch.zeros(1, 2, 3, 8, dtype=torch.int8), torch.zeros(1, 2, 3, 8)
    compiled = torch.compile(Quantised(), backend=kvpass.backend("window", budget=8, inner="eager"))
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="not floating-point"):
        compiled(torch.zeros(1, 1, dtype=torch.int64), past)


def test_cache_positions_need_a_rotary_embedding() -> None:
    model = build("GPT2")
    ids, _ = prompt(1, 8, ())
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=8, positions="cache", inner="eager"))
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="positions='cache'"):
        compiled(ids)


def test_import_is_light() -> None:
    heavy = ["transformers", "triton", "torch._dynamo", "torch._inductor"]
    code = f"import sys, torch, kvpass; found = set({heavy}).intersection(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)


class Odd(Exception):
    """An exception that kvpass does not anticipate."""


def fails(*_: Any, **__: Any) -> Any:
    raise Odd("of a new kind")


READERS = [
    "kvpass.capture.cache_search.find_cached_attention",
    "kvpass.runtime.prompts.rewrite_prompt",
    "kvpass.rewrite.masks.Masks.for_site",
]


@pytest.mark.parametrize("reader", READERS)
def test_an_error_while_reading_is_a_refusal(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    monkeypatch.setattr(reader, fails)
    compiled = torch.compile(Tiny().eval(), backend=kvpass.backend("window", budget=8, inner="eager"))
    said = r"test_backend.py:\d+: .*scaled_dot_product.*: reading the graph failed with Odd: of a new kind"
    with pytest.raises(kvpass.UnsupportedGraph, match=said) as caught:
        loop(compiled, torch.randint(0, 64, (2, 8)))
    assert isinstance(caught.value.__cause__, Odd)


@pytest.mark.parametrize("key", ["example_value", "tensor_dict"])
def test_notes_of_dynamo_that_are_gone_are_an_error(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(dynamo, "untested_version", lambda package: "9.9")
    ours, model, ids = kvpass.backend("h2o", budget=8, inner="eager", validate=False), Tiny(), torch.zeros(1, 8).long()

    def backend(gm: Any, examples: Any) -> Any:
        for node in gm.graph.nodes:
            node.meta.pop(key, None)
        return ours(gm, examples)

    loop(torch.compile(model, backend=ours), ids)
    torch._dynamo.reset()
    with pytest.raises(kvpass.UnreadableGraph, match="newer than the tested versions, and describes the inputs"):
        loop(torch.compile(model, backend=backend), ids)


@pytest.mark.parametrize("reader", READERS[:2])
def test_an_unreadable_graph_is_left_unchanged_without_strict(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    monkeypatch.setattr(reader, fails)
    model, ids = Tiny().eval(), torch.randint(0, 64, (2, 8))
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=8, inner="eager", strict=False))
    with pytest.warns(kvpass.KVPassWarning, match="reading the graph failed"):
        got = loop(compiled, ids)
    assert torch.allclose(got, loop(model, ids), atol=1e-5)


def test_errors_of_the_inner_compiler_are_its_own() -> None:
    compiled = torch.compile(Tiny().eval(), backend=kvpass.backend("window", budget=8, inner=fails))
    with torch.no_grad(), pytest.raises(Exception, match="of a new kind") as caught:
        compiled(torch.randint(0, 64, (2, 8)))
    assert not isinstance(caught.value, kvpass.KVPassError)


def test_an_interruption_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(READERS[0], interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        torch.compile(Tiny().eval(), backend=kvpass.backend(inner="eager"))(torch.randint(0, 64, (2, 8)))
