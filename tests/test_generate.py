"""`model.generate`, unmodified: the uncompiled model's tokens while nothing is evicted, in two graphs."""

from __future__ import annotations

import pytest
import torch

import kvpass
from tests.models import ARCHITECTURES, breaks, build, graphs, prompt

POLICIES = {
    "full": {},
    "window": {"budget": 64},
    "streaming": {"budget": 64},
    "streaming-absolute": {"policy": "streaming", "budget": 64, "positions": "absolute"},
    "h2o": {"budget": 64},
    "random": {"budget": 64},
}


def generated(model: object, *, bounded: bool = False, **how: object) -> torch.Tensor:
    """The sequences; `bounded` asks that they were made on slots."""
    ids, mask = prompt(rows=how.pop("rows", 3))  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.inference_mode():
        out = model.generate(  # type: ignore[attr-defined]
            ids, attention_mask=mask, max_new_tokens=12, pad_token_id=0, return_dict_in_generate=True, **how
        )
    if bounded:
        assert len(kvpass.inspect(out.past_key_values).layers) == 2
    return out.sequences


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("policy", ["full", "streaming", "h2o"])
def test_same_tokens_in_two_graphs(architecture: str, policy: str) -> None:
    model = build(architecture)
    expected = generated(model, do_sample=False)
    kvpass.compile(model, **{"policy": policy, **POLICIES[policy]}, inner="eager")
    assert torch.equal(generated(model, bounded=True, do_sample=False), expected)
    assert graphs() == 2
    assert breaks() == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled(policy: str) -> None:
    model = build("Llama")
    expected = generated(model, do_sample=True, top_k=0)
    kvpass.compile(model, **{"policy": policy, **POLICIES[policy]}, inner="eager")
    assert torch.equal(generated(model, bounded=True, do_sample=True, top_k=0), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_row(policy: str) -> None:
    model = build("Llama")
    expected = generated(model, rows=1, do_sample=False)
    kvpass.compile(model, **{"policy": policy, **POLICIES[policy]}, inner="eager")
    assert torch.equal(generated(model, bounded=True, rows=1, do_sample=False), expected)
    assert graphs() == 2


@pytest.mark.parametrize("policy", ["full", "h2o", "streaming"])
def test_beam_search_reorders_the_slots(policy: str) -> None:
    model = build("Llama")
    expected = generated(model, num_beams=3, do_sample=False)
    kvpass.compile(model, **{"policy": policy, **POLICIES[policy]}, inner="eager")
    assert torch.equal(generated(model, bounded=True, num_beams=3, do_sample=False), expected)


def test_several_sequences_from_one_prompt() -> None:
    model = build("Llama")
    expected = generated(model, num_return_sequences=2, do_sample=True)
    kvpass.compile(model, "h2o", budget=64, inner="eager")
    assert torch.equal(generated(model, bounded=True, num_return_sequences=2, do_sample=True), expected)


def test_by_name_with_options() -> None:
    model = build("Llama")
    ids, _ = prompt(padding=())
    with torch.no_grad():
        expected = model(ids).logits
        compiled = torch.compile(model, backend="kvpass", options={"policy": "h2o", "budget": 64, "inner": "eager"})
        assert torch.allclose(compiled(ids).logits, expected, atol=1e-5)


def test_inductor_generates_the_same() -> None:
    model = build("Llama")
    expected = generated(model, do_sample=False)
    kvpass.compile(model, "streaming", budget=64)
    assert torch.equal(generated(model, bounded=True, do_sample=False), expected)
    assert graphs() == 2
