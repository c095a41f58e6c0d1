"""Test the turns of a conversation in the format of the template."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpass.apps.chat_template import added_text
from kvpass.apps.demo import chat

END = 9


class Words:
    """A tokenizer of words that are numbers; its template writes 7 before a question and 8 before an answer."""

    eos_token_id = END

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        marks = {"user": "7", "assistant": "8"}
        said = "".join(f"{marks[each['role']]} {each['content']} {END} " for each in messages)
        return said + ("8 " if add_generation_prompt else "")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(token) for token in ids if not (skip_special_tokens and token == END))


class Scripted:
    """A loop with scripted answers, which records its input."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers, self.fed = iter(answers), [[0]]

    def reset(self) -> None:
        self.fed = []

    def prompt(self, ids: torch.Tensor) -> None:
        self.fed.append(ids[0].tolist())

    def generate(self, count: int) -> torch.Tensor:
        return torch.tensor([next(self.answers)[:count]])


def test_each_turn_feeds_what_the_template_adds_and_ends_an_answer_that_was_cut_off() -> None:
    loop, ticks = Scripted([[1, 2, END], [3, 4, 5, 6], [1, END]]), list[int]()
    session: Any = SimpleNamespace(
        loaded=SimpleNamespace(tokenizer=Words(), model=None), loop=loop, tick=ticks.append,
        encode=lambda text: [int(word) for word in text.split()],
    )  # fmt: skip
    turns = list(chat.talk(session, 4, ("10", "11", "12")))
    assert loop.fed == [[7, 10, END, 8], [7, 11, END, 8], [END, 7, 12, END, 8]]
    assert [turn.answer for turn in turns] == ["1 2", "3 4 5 6", "1"]
    assert [turn.seen for turn in turns] == [4, 11, 20]
    assert ticks == [8, 8, 9]


def test_a_template_without_the_end_is_cut_by_length() -> None:
    assert added_text("abc", "abcdef", "", True) == "def"
    assert added_text("abc", "abcdef", "x", False) == "def"


@pytest.mark.parametrize(("config", "expected"), [(5, [5, END]), ([5, END], [5, END]), (None, [END])])
def test_stop_tokens_come_from_the_generation_config(config: Any, expected: list[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=config))
    assert chat.stop_tokens(model, Words()) == expected
