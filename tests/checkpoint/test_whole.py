"""Test the checkpoint with all 30 layers, which amplify a difference in the last place."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvpass
from kvpass.runtime.recorder import Recorder
from tests.checkpoint import conversations, ways
from tests.checkpoint.oracles import check_as_near_as_kernels, check_equal
from tests.checkpoint.subject import ROOMY, WHOLE, Subject, forced, with_the_same_weights
from tests.checkpoint.test_ways import TIGHT
from tests.strategies import ROWS

float32 = pytest.mark.parametrize("subject", [(torch.float32, WHOLE)], indirect=True, ids=["float32"])
bfloat16 = pytest.mark.parametrize("subject", [(torch.bfloat16, WHOLE)], indirect=True, ids=["bfloat16"])
float16 = pytest.mark.parametrize("subject", [(torch.float16, WHOLE)], indirect=True, ids=["float16"])
CHECKED = ("h2o", "streaming", "d2o")
policies = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "h2o" else pytest.mark.slow) for name in ROWS]
)


@pytest.mark.slow
@pytest.mark.some(2)
@float32
@pytest.mark.parametrize("name", ROWS)
def test_the_uncompiled_model_until_something_is_evicted(subject: Subject, name: str) -> None:
    """Compare greedy tokens of `generate`; the default run tests the same in bfloat16."""
    with torch.no_grad():
        model = subject.under(**subject.settings(name, ROOMY), inner="eager")
        answer = ways.answer_of(model, ways.medium(subject))
        check_equal(answer, forced(subject.plain, answer))


@pytest.mark.slow
@pytest.mark.some(2)
@float32
@pytest.mark.parametrize("name", ROWS)
def test_the_reference_after_eviction(subject: Subject, name: str) -> None:
    """Compare greedy tokens of `generate` on both sides, which then share the traces of 30 layers."""
    tight = subject.settings(name, TIGHT)
    with torch.no_grad():
        answer, expected = (
            ways.answer_of(subject.under(**tight, inner=inner), ways.medium(subject))
            for inner in ("eager", "reference")
        )
        assert expected.logits is not None
        check_equal(answer, expected.logits)


@bfloat16
@pytest.mark.some(2)
@policies
def test_as_near_as_torchs_kernels_in_half_precision(subject: Subject, name: str) -> None:
    """Check a half-precision answer; every step is validated, which a model this deep must pass."""
    with torch.no_grad():
        answer = ways.answer_of(subject.under(**subject.settings(name, ROOMY), inner="eager"), ways.medium(subject))
    check_as_near_as_kernels(subject, [answer])


@pytest.mark.slow
@pytest.mark.some(1)
@float16
@pytest.mark.parametrize("name", CHECKED)
def test_as_near_as_torchs_kernels_in_float16(subject: Subject, name: str) -> None:
    """Test prompts of 20 and 300 tokens in the dtype with the narrowest range."""
    with torch.no_grad():
        model = subject.under(**subject.settings(name, ROOMY), inner="eager")
        prompts = (ways.short(subject), conversations.of_length(subject.tokenizer, 300))
        answers = [ways.answer_of(model, ids) for ids in prompts]
    check_as_near_as_kernels(subject, answers)


FIRST_TOKENS = 16


@pytest.mark.slow
@pytest.mark.some(1)
@bfloat16
@pytest.mark.parametrize("name", CHECKED)
def test_validation_accepts_every_prompt(subject: Subject, name: str) -> None:
    """Test many first tokens: the first token has features of very large size, different for each token."""
    short, settings = ways.short(subject), subject.settings(name, ROOMY)
    chats = [torch.tensor([conversations.chat(subject.tokenizer, each)]) for each in conversations.QUESTIONS]
    firsts = torch.linspace(0, subject.plain.config.vocab_size - 1, FIRST_TOKENS).long().tolist()
    prompts = [torch.cat([torch.tensor([[first]]), short[:, 1:]], 1) for first in firsts] + chats
    assert len(prompts) == FIRST_TOKENS + 3
    for ids in prompts:
        recorder = Recorder()
        backend = dataclasses.replace(kvpass.backend(**settings, inner="eager"), recorder=recorder)
        model = subject.traced.under(backend)
        with torch.no_grad():
            out = model(ids, use_cache=True, logits_to_keep=1)
            model(out.logits.argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        noted = [note for note in recorder.notes if "validation of the step" in note]
        assert noted
        assert all("passed" in note for note in noted), noted


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["h2o", "streaming", "d2o", "cascade"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_by_inductor(installed: None, name: str, dtype: torch.dtype) -> None:
    """Call `generate` after `kvpass.compile` with default settings."""
    subject = Subject(dtype)
    settings = subject.settings(name, ROOMY)
    model = kvpass.compile(with_the_same_weights(subject.plain), settings.pop("policy"), **settings)
    with torch.no_grad():
        answers = [ways.answer_of(model, ids) for ids in (ways.short(subject), ways.medium(subject))]
    if dtype == torch.bfloat16:
        check_as_near_as_kernels(subject, answers)
    else:
        for answer in answers:
            check_equal(answer, forced(subject.plain, answer))
