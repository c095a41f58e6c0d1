"""Test assisted decoding and prompt lookup on slots: rejected candidates are cropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvpass
from tests.cache.test_cropping import CROP, NAMES, chosen
from tests.models import build
from tests.runtime.test_symbolic_sizes import counting
from tests.traces import Traced

# Different words: keys of repeated words would be equally near, and rounding would decide d2o's choice.
LOOKED_UP = torch.tensor([[5, 6, 7, 8, 5, 9, 7, 11, 5, 6]])
some_policies = pytest.mark.parametrize(
    "name", [name if name == "h2o" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)


def generated(model: Any, **how: Any) -> Any:
    given = dict(attention_mask=torch.ones_like(LOOKED_UP), max_new_tokens=16, do_sample=False, pad_token_id=0)
    given |= dict(eos_token_id=-1, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        return model.generate(LOOKED_UP, **given, **how)


def assistant() -> Any:
    """Return a model whose guesses are often right."""
    torch.manual_seed(0)
    model = build("Llama", layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.002)
    return model


ASSISTED: dict[str, Callable[[], dict[str, Any]]] = {
    "prompt lookup": lambda: dict(prompt_lookup_num_tokens=4),
    "an assistant": lambda: dict(assistant_model=assistant()),
}

each_way = pytest.mark.parametrize(
    "way", [way if way == "prompt lookup" else pytest.param(way, marks=pytest.mark.slow) for way in ASSISTED]
)


@each_way
def test_full_says_what_the_uncompiled_model_says(traced: Callable[..., Traced], way: str) -> None:
    model, expected = traced("Llama", "assisted", way, layers=1), generated(build("Llama", layers=1))
    backend = counting("full", crop=CROP)
    got = generated(model.under(backend), **ASSISTED[way]())
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert got.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert model.graphs <= 3  # prompts, chunks of all lengths, and steps without candidates
    assert len(backend.made) == model.graphs - 1


@some_policies
@each_way
def test_policies_say_what_their_reference_says(traced: Callable[..., Traced], name: str, way: str) -> None:
    model = traced("Llama", "assisted", way, layers=1)
    ours, theirs = (generated(model.under(chosen(name, inner)), **ASSISTED[way]()) for inner in ("eager", "reference"))
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-4, rtol=1e-4)
    reports = (kvpass.inspect(out.past_key_values).layers for out in (ours, theirs))
    for one, other in zip(*reports, strict=True):
        assert torch.equal(one.positions, other.positions)


@pytest.mark.slow
def test_an_assistant_on_slots() -> None:
    """Check an assistant whose steps are cropped, several at a time; the assisted model is not compiled."""
    expected, helper = generated(build("Llama", layers=1)), assistant()
    kvpass.compile(helper, "h2o", budget=8, inner="eager", crop=30)
    got = generated(build("Llama", layers=1), assistant_model=helper)
    assert torch.equal(got.sequences, expected.sequences)
