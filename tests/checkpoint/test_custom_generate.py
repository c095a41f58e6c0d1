"""Test generation with the folder `hub`, as transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

import kvpass
from tests.checkpoint.conversations import of_length
from tests.checkpoint.subject import WHOLE, Subject, with_the_same_weights
from tests.checkpoint.test_ways import LAYERS

HUB = Path(__file__).parents[2] / "hub"
BUDGET = 64
SUBJECTS = [
    pytest.param((torch.bfloat16, LAYERS), id="bfloat16-first-layers"),
    pytest.param((torch.bfloat16, WHOLE), id="bfloat16", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_the_checkpoint_generates_by_the_folder(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings: dict[str, Any] = dict(policy="h2o", budget=BUDGET, inner="eager")
    ids = of_length(subject.tokenizer, 120)
    how: dict[str, Any] = dict(max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(ids))
    by_folder = {"custom_generate": str(HUB), "trust_remote_code": True, "return_dict_in_generate": True}
    out = with_the_same_weights(subject.plain).generate(ids, **how, **settings, **by_folder)
    assert kvpass.inspect(out).layers[0].positions.shape[-1] == BUDGET
    expected = kvpass.compile(with_the_same_weights(subject.plain), **settings).generate(ids, **how)
    assert torch.equal(out.sequences, expected)
    assert len(set(expected[0, ids.shape[1] :].tolist())) > 2  # the text does not repeat one token
