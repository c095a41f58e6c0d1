"""Test that a conversation of the checkpoint continues bit for bit after it is saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvpass
from tests.checkpoint.conversations import of_length
from tests.checkpoint.subject import WHOLE, Subject
from tests.checkpoint.test_ways import LAYERS

SUBJECTS = [
    pytest.param((torch.bfloat16, LAYERS), id="bfloat16-first-layers"),
    pytest.param((torch.bfloat16, WHOLE), id="bfloat16", marks=pytest.mark.slow),
    pytest.param((torch.float32, WHOLE), id="float32", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
@torch.no_grad()
def test_a_saved_conversation_goes_on_bit_for_bit(subject: Subject, tmp_path: Path) -> None:
    under = subject.under(policy="h2o", budget=64, kv_dtype="int8", inner="eager")
    out = kvpass.prefill(under, of_length(subject.tokenizer, 120), chunk=120, pin=[(0, 16)])
    path = tmp_path / "talk.safetensors"
    for _ in range(2):  # Dynamo traces the first step for one length only
        out = under(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
    kvpass.save_cache(out.past_key_values, path)
    loaded, following = kvpass.load_cache(path, subject.plain), out.logits[:, -1:].argmax(-1)
    logits = []
    for cache in (out.past_key_values, loaded):
        ids = following
        for _ in range(4):
            out = under(ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            logits.append(out.logits)
    assert torch.equal(torch.cat(logits[:4]), torch.cat(logits[4:]))
    assert kvpass.inspect(cache).layers[0].pinned[0, 0].tolist() == [*range(16)]
