"""Test the demo's chat with the first layers of the checkpoint, its tokenizer and its chat template."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpass.apps.demo.chat import talk
from kvpass.apps.evaluation.session import Session, UncompiledLoop
from kvpass.apps.models import LoadedModel
from kvpass.decoding.loop import DecodeLoop
from tests.checkpoint.subject import first_layers, loaded

QUESTIONS = ("Why is the sky blue?", "And at night?", "Who are you?")
ANSWER = 12


class Noted:
    """A loop that records its input and output tokens in order."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.tokens = loop, list[int]()

    def reset(self) -> None:
        self.loop.reset()

    def prompt(self, ids: torch.Tensor) -> None:
        self.tokens += ids[0].tolist()
        self.loop.prompt(ids)

    def generate(self, count: int) -> torch.Tensor:
        made: torch.Tensor = self.loop.generate(count)
        self.tokens += made[0].tolist()
        return made


@pytest.mark.slow
def test_a_chat_feeds_the_template_and_evicting_nothing_answers_as_the_uncompiled_model() -> None:
    model, tokenizer = loaded(torch.float32)
    model = first_layers(model, 4)
    subject = LoadedModel("checkpoint", model, tokenizer, None, False)
    stop = [tokenizer.eos_token_id]
    loops = {
        "plain": UncompiledLoop(model, 16, stop),
        "window": DecodeLoop(model, "window", budget=400, prefill_chunk=16, inner="eager", stop=stop),
    }
    answers, fed = {}, {}
    for name, loop in loops.items():
        noted = Noted(loop)
        session = Session(subject, noted, {}, "chunk", 16)  # type: ignore[arg-type]
        answers[name] = [turn.answer for turn in talk(session, ANSWER, QUESTIONS)]
        fed[name] = tokenizer.decode(noted.tokens)
    assert answers["plain"] == answers["window"]
    assert fed["plain"] == fed["window"]
    before, *turns = fed["plain"].split("<|im_start|>user\n")
    assert before.startswith("<|im_start|>system\n")
    assert len(turns) == 3
    for question, text in zip(QUESTIONS, turns, strict=True):
        assert text.startswith(f"{question}<|im_end|>\n<|im_start|>assistant\n")
    assert all(text.endswith("<|im_end|>\n") for text in turns[:-1])
