"""Whole architectures: a sample by default, all that transformers offers among the slow tests."""

from __future__ import annotations

import pytest
import torch

import kvpass
from kvpass.report import Recorder
from tests.architectures import zoo
from tests.architectures.__main__ import in_a_process
from tests.architectures.check import BUDGET, PADDING, backend, examine, generate

SAMPLE = {
    "mistral": "every layer slides",
    "gemma2": "sliding and full layers, a soft cap, attention spelled out",
    "gpt_oss": "learned sinks beside the keys",
    "bloom": "a bias that counts real tokens",
    "gpt_neo": "masks that are slices of a table",
    "dots1": "routing that writes in place",
    "bamba": "linear-attention layers between the others",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_rewritten_completely(name: str) -> None:
    verdict = examine(name, PADDING)
    assert verdict.word == "rewritten", verdict
    assert verdict.graphs == 2


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_architecture_is_wrong() -> None:
    verdicts = [in_a_process(name, PADDING) for name in zoo.names()]
    defects = [v for v in verdicts if not v.acceptable]
    assert not defects, defects
    caching = [v for v in verdicts if v.word in ("rewritten", "refused")]
    assert sum(v.word == "rewritten" for v in caching) >= 0.8 * len(caching)


def test_refusals_name_a_line() -> None:
    """Multi-head latent attention computes its keys anew from what it caches."""
    verdict = examine("deepseek_v3")
    assert verdict.word == "refused"
    assert "modeling_deepseek_v3.py" in verdict.reason


# -- layers with a sliding window of their own -----------------------------------------------------------

WINDOW = 8


def mistral() -> torch.nn.Module:
    assert zoo.config("mistral").sliding_window == WINDOW
    return zoo.build("mistral")


@torch.no_grad()
def continued(model: torch.nn.Module, chosen: object, prompt: int, steps: int) -> tuple[torch.Tensor, object]:
    """Tokens of a greedy generation, and the cache."""
    torch._dynamo.reset()
    if chosen is not None:
        model.compile(backend=chosen)
    ids = torch.randint(3, 128, (2, prompt), generator=torch.Generator().manual_seed(1))
    how = dict(max_new_tokens=steps, min_new_tokens=steps, do_sample=False, return_dict_in_generate=True)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    model._compiled_call_impl = None
    return out.sequences, out.past_key_values


@pytest.mark.parametrize("prompt", [3, WINDOW - 1, WINDOW, WINDOW + 1, 20])
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_a_window_within_the_budget_is_kept_exactly(policy: str, prompt: int) -> None:
    model = mistral()
    expected, _ = continued(model, None, prompt, 12)
    budget = None if policy == "full" else 16
    got, cache = continued(model, kvpass.backend(policy, budget=budget, inner="eager"), prompt, 12)
    assert torch.equal(got, expected)
    layer = kvpass.inspect(cache).layers[0]
    assert layer.capacity == WINDOW
    assert layer.positions.shape[-1] == WINDOW - 1  # what the model itself would have stored


def test_a_budget_below_the_window_bounds_it() -> None:
    """The policy governs, and the model's own window still hides what is too old."""
    model = mistral()
    runs = [generate(model, backend("h2o", 5, inner, Recorder()), PADDING) for inner in ("eager", "reference")]
    torch.testing.assert_close(runs[0].logits, runs[1].logits, atol=1e-4, rtol=1e-4)
    assert kvpass.inspect(runs[0].cache).layers[0].capacity == 6


def test_positions_in_the_cache_are_refused_beside_a_window() -> None:
    model = mistral()
    with pytest.raises(kvpass.UnsupportedGraph, match="sliding window"):
        continued(model, kvpass.backend("streaming", budget=BUDGET, positions="cache", inner="eager"), 12, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bamba"])
def test_compiled_equals_eager(name: str) -> None:
    model = zoo.build(name)
    runs = [generate(model, backend("h2o", BUDGET, inner, Recorder()), PADDING) for inner in ("inductor", "eager")]
    torch.testing.assert_close(runs[0].logits, runs[1].logits, atol=1e-3, rtol=1e-3)
