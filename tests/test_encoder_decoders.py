"""Test encoder-decoders with `generate`: self-attention is bounded, and cross-attention unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from tests import on_reference
from tests.architectures import inputs, zoo
from tests.architectures.check import PROMPT, generate
from tests.models import breaks, graphs
from tests.switch import Switch

NAMES = ("t5", "bart", "whisper")
BUDGET, STEPS = 6, 10
DEFAULT = [("t5", "h2o")]
SLOW = [(name, policy) for name in NAMES for policy in ("h2o", "streaming") if (name, policy) not in DEFAULT]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def beginning(model: Any, **how: Any) -> Any:
    """Return the output of `generate` for the encoder's input and a prompt of one token."""
    given = inputs.of(model, prompt=1, padding=0)
    del given["decoder_input_ids"]
    with torch.no_grad():
        return model.generate(
            **given, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, **how
        )


@pytest.mark.parametrize(
    ("name", "beams"), [("bart", 2), *(slow(name, beams) for name in NAMES for beams in (1, 3))]
)  # fmt: skip
def test_same_tokens_in_two_graphs(name: str, beams: int) -> None:
    """Test from one token too, where torch would specialise the length of the cache."""
    model = zoo.build(name, "reading")
    expected = beginning(model, num_beams=beams)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kvpass.compile(model, "h2o", budget=64, inner="eager")
    assert torch.equal(beginning(model, num_beams=beams).sequences, expected.sequences)
    assert graphs() == 2
    assert breaks() == 0


@pytest.mark.parametrize(("name", "policy"), [*DEFAULT, *(slow(*row) for row in SLOW)])
def test_evicting_equals_the_reference(name: str, policy: str) -> None:
    """Test T5, whose learned biases by distance must match the tokens held."""
    model, switch, runs = zoo.build(name, "reading"), Switch(), []
    given = inputs.of(model, PROMPT, 2)
    for inner in ("eager", "reference"):
        chosen = on_reference.backend(policy, budget=BUDGET, inner=inner)
        runs.append(generate(model, switch.to(chosen), given, steps=STEPS))
    torch.testing.assert_close(runs[0].logits, runs[1].logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(runs[0].logits, generate(model, None, given, steps=STEPS).logits, atol=1e-2)
    if name != "whisper":  # Whisper splits its cache by row
        assert {layer.capacity for layer in kvpass.inspect(runs[0].cache).layers} == {BUDGET + 1}
        assert all(layer.keys.shape[2] == inputs.READ for layer in runs[0].cache.cross_attention_cache.layers)


@pytest.mark.slow
def test_beams_that_evict_are_worth_what_they_would_be_alone() -> None:
    """Feed the best beam again token by token, and compare its score."""
    model = zoo.build("bart", "reading")
    model.generation_config.forced_eos_token_id = None
    model.compile(backend=kvpass.backend("h2o", budget=BUDGET, inner="eager"))
    out = beginning(model, num_beams=3, output_scores=True, length_penalty=0.0, renormalize_logits=True)
    logits = forced(model, out.sequences[:, -STEPS - 1 : -1])
    logits[..., model.config.eos_token_id] = -torch.inf  # no end before the requested length
    chosen = logits.log_softmax(-1).gather(-1, out.sequences[:, -STEPS:, None]).squeeze(-1).sum(-1)
    torch.testing.assert_close(chosen, out.sequences_scores, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def forced(model: Any, ids: Tensor) -> Tensor:
    """Return logits [B, T, vocabulary] of a decoder that is fed token by token."""
    given, past, logits = inputs.of(model, prompt=1, padding=0), None, []
    read, mask = model.get_encoder()(given["input_ids"], given["attention_mask"]), given["attention_mask"]
    for token in ids.split(1, 1):
        out = model(None, mask, token, encoder_outputs=read, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


# -- equal lengths by coincidence ----------------------------------------------------------------------------------

ORDERS = {"constant first": [(7, 5), (5, 5), (1, 1)], "equal first": [(5, 5), (7, 5)]}


def outputs_of(model: Any, read: int, prompt: int) -> Any:
    ids = torch.randint(3, zoo.VOCABULARY, (2, read + prompt), generator=torch.Generator().manual_seed(read))
    ids[:, read] = 1
    with torch.no_grad():
        return model.generate(
            ids[:, :read], decoder_input_ids=ids[:, read:], max_new_tokens=STEPS, min_new_tokens=STEPS,
            do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_an_encoder_input_as_long_as_the_prompt(order: str) -> None:
    """Test encoder inputs as long as the prompt, or as the tokens seen at some step."""
    model, lengths = zoo.build("t5", "reading"), ORDERS[order]
    expected = [outputs_of(model, *each) for each in lengths]
    torch._dynamo.reset()
    kvpass.compile(model, "full", inner="eager")
    for each, theirs in zip(lengths, expected, strict=True):
        ours = torch.stack(outputs_of(model, *each).logits)
        torch.testing.assert_close(ours, torch.stack(theirs.logits), atol=1e-3, rtol=1e-3, msg=str(each))


# -- the encoder ---------------------------------------------------------------------------------------------------


def test_an_encoder_has_no_cache_and_reads_as_ever() -> None:
    """Test the encoder alone and with its decoder; the report lists unchanged attention with reasons."""
    model, ids = zoo.build("t5", "reading"), torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    report = kvpass.explain(model, policy="window", budget=4)(ids, decoder_input_ids=ids[:, :5], use_cache=True)
    verdicts = [(site.verdict, site.reason) for site in report.sites]
    assert verdicts.count(("rewritten", "")) == 2
    assert verdicts.count(("left alone", "it updates no cache")) == 2
    assert [reason for verdict, reason in verdicts if "do not grow" in reason and verdict == "left alone"] != []
    encoder = kvpass.compile(copy.deepcopy(model.get_encoder()), "window", budget=4, inner="eager")
    with torch.no_grad():
        theirs = model.get_encoder()(ids).last_hidden_state
        torch.testing.assert_close(encoder(ids).last_hidden_state, theirs)


@pytest.mark.slow
def test_rows_of_a_cache_that_whisper_hands_out() -> None:
    """Check that rows have the right shape but no data."""
    model = zoo.build("whisper", "reading")
    model.compile(backend=kvpass.backend("full", inner="eager"))
    cache = beginning(model).past_key_values
    key = cache.self_attention_cache.layers[0].keys
    assert key.shape[:3] == (2, 4, STEPS)
    with pytest.raises(kvpass.CacheHandleError, match="taken out of a cache"):
        key.sum()
    with pytest.raises(kvpass.CacheHandleError, match="taken out of a cache"):
        model(
            encoder_outputs=(torch.randn(2, 16, 64),),
            decoder_input_ids=torch.ones(2, 1, dtype=torch.int64),
            past_key_values=cache,
        )
