"""Test the folder `hub` as transformers loads it: `model.generate(..., custom_generate=...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

import kvpass
from tests.models import build, prompt

HUB = Path(__file__).parents[1] / "hub"
HOW: dict[str, Any] = dict(max_new_tokens=14, do_sample=False, pad_token_id=0, eos_token_id=-1)


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make transformers copy the folder's code into the test's folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


def generate(model: Any, **given: Any) -> Any:
    ids, mask = prompt(2, 11, (3, 0))
    how = {**HOW, "custom_generate": str(HUB), "trust_remote_code": True, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=mask, **{**how, **given})


def test_it_generates_what_a_compiled_model_does() -> None:
    settings: dict[str, Any] = dict(policy="streaming", budget=8, sinks=2, kv_dtype="int8", inner="eager")
    model, ids_and_mask = build("Llama", layers=1), prompt(2, 11, (3, 0))
    out = generate(model, **settings)
    assert kvpass.inspect(out).layers[0].positions.shape[-1] == 8
    expected = kvpass.compile(build("Llama", layers=1), **settings)
    ids, mask = ids_and_mask
    with torch.no_grad():
        assert torch.equal(out.sequences, expected.generate(ids, attention_mask=mask, **HOW))
    called = model._compiled_call_impl
    assert torch.equal(generate(model, **settings).sequences, out.sequences)
    assert model._compiled_call_impl is called  # not compiled again
    assert kvpass.inspect(generate(model, **{**settings, "budget": 6})).layers[0].positions.shape[-1] == 6


def test_refusals_of_kvpass_reach_the_caller_of_generate() -> None:
    with pytest.raises(kvpass.PolicyError, match="unknown policy 'h3o'"):
        generate(build("Llama", layers=1), policy="h3o")
    with pytest.raises(ValueError, match=r"model_kwargs.*are not used by the model.*'sinks'"):
        generate(build("Llama", layers=1), policy="h2o", budget=8, inner="eager", sinks=2)


def test_requirements_and_header_name_the_package() -> None:
    (line,) = (HUB / "custom_generate" / "requirements.txt").read_text().splitlines()
    assert line == "kvpass>=0.1"
    header = (HUB / "README.md").read_text().split("---")[1]
    assert "- custom_generate" in header
    assert "library_name: transformers" in header
