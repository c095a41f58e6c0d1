"""Test architectures of transformers: one by default, and when slow the four most different and every third.

`make architectures` examines all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import XLMConfig, XLMWithLMHeadModel

import kvpass
from kvpass.backend import Backend
from kvpass.runtime.recorder import Recorder
from tests import on_reference
from tests.architectures import inputs, zoo
from tests.architectures.__main__ import PAGE, parts, written
from tests.architectures.apart import examine_apart
from tests.architectures.check import BUDGET, PADDING, PROMPT, backend, examine, generate
from tests.switch import Switch


def text(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return inputs.of(model, PROMPT, PADDING)


SAMPLE = {
    "gemma2": "sliding and full layers, a soft cap, attention spelled out",
    "deepseek_v3": "multi-head latent attention",
    "gemma4_text": "layers that share a cache",
    "bamba": "linear-attention layers between the others",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gemma2" else pytest.mark.slow) for n in SAMPLE])
def test_a_sample_is_rewritten_completely(name: str) -> None:
    verdict = examine(name, PADDING)
    assert verdict.word == "rewritten", verdict
    assert verdict.graphs == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names()[::3])
def test_architectures_are_what_the_page_says(name: str) -> None:
    if not zoo.can_be_built(name):
        pytest.skip(f"{zoo.NEEDS[name]} is not installed")
    verdict = examine_apart(name, PADDING, canonical=zoo.names().index(name) % 2 == 0)
    assert verdict.acceptable, verdict
    assert verdict.word == written()[name].word, verdict


@pytest.mark.parametrize("table", zoo.TABLES)
def test_the_page_has_no_defects_and_counts_right(table: str) -> None:
    words = [verdict.word for verdict in written(table).values()]
    assert set(zoo.names(table)) <= set(written(table))  # the page also has those of later versions
    if f"transformers {transformers.__version__} and" in PAGE.read_text(encoding="utf-8"):
        assert sorted(written(table)) == zoo.names(table)
    assert not {"wrong", "error"}.intersection(words)
    caching = [word for word in words if word in ("rewritten", "refused")]
    assert f"{words.count('rewritten')} of {len(caching)} architectures" in parts()[table]


@pytest.mark.slow
def test_refusals_name_a_line() -> None:
    """Test attention without a softmax over a single product of queries and keys."""
    verdict = examine("prophetnet")
    assert verdict.word == "refused"
    assert "feeds no attention call" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask_token", "why"),
    [(5, r"input_ids = input_ids\[:, -_slen:\].*depends on the length of the cache"), (2, "earlier masks hid padding")],
)
def test_masks_that_are_filled_in_place_are_read_and_a_text_sliced_by_the_cache_is_refused(
    mask_token: int, why: str
) -> None:
    """Check that XLM's prompts run, while its steps, which slice the complete text by the cache, are refused.

    Every call ends with a mask token. Where that token is padding, the next call shows a token that the last one hid.
    """
    sizes = dict(vocab_size=32, emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=64)
    torch.manual_seed(0)
    model = XLMWithLMHeadModel(XLMConfig(**sizes, pad_index=2, mask_token_id=mask_token)).eval()
    ids = torch.randint(6, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
        compiled = torch.compile(model, backend=kvpass.backend("full", inner="eager"))
        torch.testing.assert_close(compiled(ids).logits, expected)
    with pytest.raises(kvpass.UnsupportedGraph, match=why):
        kvpass.compile(model, policy="full", inner="eager").generate(ids, max_new_tokens=3)


@pytest.mark.few(1)
@pytest.mark.parametrize("chosen", [PROMPT - 1, PROMPT])
def test_a_sparse_index_must_choose_all(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the refusal if the index would hide tokens from the prompt or from the slots."""
    monkeypatch.setitem(zoo.SPECIAL, "deepseek_v32", zoo.SPECIAL["deepseek_v32"] | {"index_topk": chosen})
    model = zoo.build("deepseek_v32")
    if chosen < PROMPT:
        with pytest.raises(kvpass.UnsupportedGraph, match="among 12"):
            generate(model, backend("h2o", BUDGET, "eager", Recorder()), text(model))
    else:
        cache = generate(model, backend("h2o", BUDGET, "eager", Recorder()), text(model)).cache
        assert all(layer.indexer_keys.isnan().all() for layer in cache.layers)


# -- masks as inputs of graphs ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "streaming", "h2o"])
def test_a_mask_of_four_dimensions_from_the_user(policy: str) -> None:
    """Test a mask that hides every third token from the first row, unlike any mask of the model."""
    model, switch, total, steps = zoo.build("llama"), Switch(), 20, 8
    ids = torch.randint(3, 128, (2, total + steps), generator=torch.Generator().manual_seed(2))
    allowed = torch.ones(total + steps, total + steps, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    allowed[0, :, :, 1::3] &= torch.eye(total + steps, dtype=torch.bool)[:, 1::3]

    def logits(chosen: Backend | None) -> torch.Tensor:
        run = model if chosen is None else torch.compile(model, backend=switch.to(chosen))
        with torch.no_grad():
            out = run(ids[:, :total], attention_mask=allowed[:, :, :total, :total], use_cache=True)
            made = [out.logits[:, -1]]
            for t in range(total, total + steps):
                mask, cache = allowed[:, :, t : t + 1, : t + 1], out.past_key_values
                out = run(ids[:, t : t + 1], attention_mask=mask, past_key_values=cache, use_cache=True)
                made.append(out.logits[:, -1])
        return torch.stack(made)

    budget = None if policy == "full" else 12
    ours = logits(kvpass.backend(policy, budget=budget, inner="eager"))
    if policy == "full":
        theirs = logits(None)
        assert not torch.allclose(theirs[:, 0], theirs[:, 1])
    else:
        theirs = logits(on_reference.backend(policy, budget=budget, inner="reference"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


class Broken(torch.nn.Module):
    """A model with a graph break between its layers, so that the mask is passed between graphs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(self.look)

    @staticmethod
    def look(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return output

    def forward(self, **inputs: object) -> object:
        return self.model(**inputs)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_a_model_with_graph_breaks(policy: str) -> None:
    model, total = Broken(zoo.build("llama")), 18
    ids = torch.randint(3, 128, (2, total + 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def logits(chosen: object) -> torch.Tensor:
        torch._dynamo.reset()
        run = model if chosen is None else torch.compile(model, backend=chosen)
        with torch.no_grad():
            out = run(input_ids=ids[:, :total], attention_mask=mask[:, :total], use_cache=True)
            made = [out.logits[:, -1]]
            for t in range(total, total + 6):
                given = dict(attention_mask=mask[:, : t + 1], past_key_values=out.past_key_values, use_cache=True)
                out = run(input_ids=ids[:, t : t + 1], **given)
                made.append(out.logits[:, -1])
        return torch.stack(made)

    budget = None if policy == "full" else 12
    ours = logits(kvpass.backend(policy, budget=budget, inner="eager"))
    theirs = logits(None if policy == "full" else on_reference.backend(policy, budget=budget, inner="reference"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


# -- layers with a sliding window ------------------------------------------------------------------------

WINDOW = 8


def mistral() -> torch.nn.Module:
    assert zoo.config("mistral").sliding_window == WINDOW
    return zoo.build("mistral")


@torch.no_grad()
def continued(model: torch.nn.Module, chosen: object, prompt: int, steps: int) -> tuple[torch.Tensor, object]:
    """Return the tokens of a greedy generation and the cache; a `Switch` keeps its earlier traces."""
    if not isinstance(chosen, Switch):
        torch._dynamo.reset()
    if chosen is not None:
        model.compile(backend=chosen)
    ids = torch.randint(3, 128, (2, prompt), generator=torch.Generator().manual_seed(1))
    how = dict(max_new_tokens=steps, min_new_tokens=steps, do_sample=False, return_dict_in_generate=True)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    model._compiled_call_impl = None
    return out.sequences, out.past_key_values


@pytest.mark.few(1)
@pytest.mark.parametrize("prompt", [3, WINDOW - 1, WINDOW, WINDOW + 1, 20])
def test_a_window_within_the_budget_is_kept_exactly(prompt: int) -> None:
    model, switch = mistral(), Switch()
    expected, _ = continued(model, None, prompt, 12)
    for policy, budget in (("full", None), ("h2o", 16)):
        chosen = kvpass.backend(policy, budget=budget, inner="eager")
        got, cache = continued(model, switch.to(chosen), prompt, 12)
        assert torch.equal(got, expected), policy
        layer = kvpass.inspect(cache).layers[0]
        assert layer.capacity == WINDOW
        assert layer.positions.shape[-1] == WINDOW - 1  # the number of tokens that the model itself would store


def broken(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's call with a graph break in prompts, as with images."""

    @functools.wraps(forward)
    def call(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        if input_ids.shape[1] > 1:
            torch._dynamo.graph_break()
        return forward(self, input_ids=input_ids, **more)

    return call


@pytest.mark.few(1)
@pytest.mark.parametrize("padding", [0, PADDING])
def test_the_first_step_behind_a_broken_prompt_reads_the_window(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a step before Dynamo has seen the layers' token counts change."""
    model = mistral()
    given = inputs.of(model, PROMPT, padding)
    expected = generate(model, None, given)
    monkeypatch.setattr(type(model), "forward", broken(type(model).forward))
    ours = generate(model, backend("full", None, "eager", Recorder()), given)
    assert torch.equal(ours.tokens, expected.tokens)
    torch.testing.assert_close(ours.logits, expected.logits, atol=1e-4, rtol=1e-4)


def test_a_budget_below_the_window_bounds_it() -> None:
    """Check that the policy bounds the cache, and that the model's window still hides old tokens."""
    model, switch = mistral(), Switch()
    both = (backend("h2o", 5, inner, Recorder()) for inner in ("eager", "reference"))
    runs = [generate(model, switch.to(chosen), text(model)) for chosen in both]
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
    runs = [generate(model, backend("h2o", BUDGET, inner, Recorder()), text(model)) for inner in ("inductor", "eager")]
    torch.testing.assert_close(runs[0].logits, runs[1].logits, atol=1e-3, rtol=1e-3)
