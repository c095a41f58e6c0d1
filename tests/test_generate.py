"""Compare unmodified `model.generate` with the uncompiled model while nothing is evicted, in two graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvpass
from tests.models import ARCHITECTURES, breaks, build, graphs, prompt
from tests.traces import Traced

POLICIES = {
    "full": {},
    "window": {"budget": 64},
    "streaming": {"budget": 64},
    "streaming-absolute": {"policy": "streaming", "budget": 64, "positions": "absolute"},
    "h2o": {"budget": 64},
    "random": {"budget": 64},
}


def generated(model: object, *, bounded: bool = False, **how: object) -> torch.Tensor:
    """Return the sequences; `bounded` checks that they were made on slots."""
    ids, mask = prompt(rows=how.pop("rows", 3))  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.inference_mode():
        out = model.generate(  # type: ignore[attr-defined]
            ids, attention_mask=mask, max_new_tokens=12, pad_token_id=0, return_dict_in_generate=True, **how
        )
    if bounded:
        assert len(kvpass.inspect(out.past_key_values).layers) == 1
    return out.sequences


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_tokens_in_two_graphs(architecture: str) -> None:
    model = build(architecture, layers=1)
    expected = generated(model, do_sample=False)
    kvpass.compile(model, "streaming", **POLICIES["streaming"], inner="eager")
    assert torch.equal(generated(model, bounded=True, do_sample=False), expected)
    assert graphs() == 2
    assert breaks() == 0


def under(model: Traced, policy: str) -> Any:
    return model.under(kvpass.backend(**{"policy": policy, **POLICIES[policy]}, inner="eager"))


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["full", "h2o"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_tokens_under_other_policies(traced: Callable[..., Traced], architecture: str, policy: str) -> None:
    model, expected = traced(architecture, layers=1), generated(build(architecture, layers=1), do_sample=False)
    assert torch.equal(generated(under(model, policy), bounded=True, do_sample=False), expected)
    assert model.graphs == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled(traced: Callable[..., Traced], policy: str) -> None:
    expected = generated(build("Llama", layers=1), do_sample=True, top_k=0)
    assert torch.equal(
        generated(under(traced("Llama", layers=1), policy), bounded=True, do_sample=True, top_k=0), expected
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_one_row(traced: Callable[..., Traced], policy: str) -> None:
    model, expected = traced("Llama", "one row", layers=1), generated(build("Llama", layers=1), rows=1, do_sample=False)
    assert torch.equal(generated(under(model, policy), bounded=True, rows=1, do_sample=False), expected)
    assert model.graphs == 2


@pytest.mark.parametrize("policy", ["full", "h2o", "streaming"])
def test_beam_search_reorders_the_slots(traced: Callable[..., Traced], policy: str) -> None:
    model, expected = (
        traced("Llama", "beams", layers=1),
        generated(build("Llama", layers=1), num_beams=3, do_sample=False),
    )
    assert torch.equal(generated(under(model, policy), bounded=True, num_beams=3, do_sample=False), expected)


@pytest.mark.slow
def test_several_sequences_from_one_prompt() -> None:
    model = build("Llama", layers=1)
    expected = generated(model, num_return_sequences=2, do_sample=True)
    kvpass.compile(model, "h2o", budget=64, inner="eager")
    assert torch.equal(generated(model, bounded=True, num_return_sequences=2, do_sample=True), expected)


def test_by_name_with_options() -> None:
    model = build("Llama", layers=1)
    ids, _ = prompt(padding=())
    with torch.no_grad():
        expected = model(ids).logits
        compiled = torch.compile(model, backend="kvpass", options={"policy": "h2o", "budget": 64, "inner": "eager"})
        assert torch.allclose(compiled(ids).logits, expected, atol=1e-5)


@torch.no_grad()
def test_another_turn_takes_all_ids() -> None:
    """Check that the ids of a second turn alone are refused, with the way to pass them."""
    model, (ids, _) = kvpass.compile(build("Llama", layers=1), "h2o", budget=64, inner="eager"), prompt(2, 9, ())
    how: dict[str, Any] = dict(max_new_tokens=2, eos_token_id=None, pad_token_id=0)
    cache = model.generate(ids, return_dict_in_generate=True, **how).past_key_values
    with pytest.raises(kvpass.CacheHandleError, match="pass `generate` all ids, those of cached tokens included"):
        model.generate(ids[:, :4], past_key_values=cache, **how)


@pytest.mark.slow
def test_inductor_generates_the_same() -> None:
    model = build("Llama", layers=1)
    expected = generated(model, do_sample=False)
    kvpass.compile(model, "streaming", budget=64)
    assert torch.equal(generated(model, bounded=True, do_sample=False), expected)
    assert graphs() == 2
