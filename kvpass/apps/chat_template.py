"""Render turns of a chat with a model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, str]

_EARLIER: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
"""A conversation in place of any earlier one: the text that a template adds after an answer does not depend on it."""


def first_turn(tokenizer: Any, messages: Sequence[Message], answers: bool = True) -> str:
    """Return the text of messages that begin a conversation; with `answers` up to where the model answers."""
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answers)
    return text


def next_turn(tokenizer: Any, messages: Sequence[Message], ends: Sequence[str], ended: bool) -> str:
    """Return the text of messages that follow the model's last answer, up to where it answers again.

    Args:
        ends: the texts of the tokens that end an answer; the template puts one of them after an answer.
        ended: see `added_text`.
    """
    before = first_turn(tokenizer, _EARLIER, answers=False)
    end = max(ends, key=before.rfind, default="")
    return added_text(before, first_turn(tokenizer, [*_EARLIER, *messages]), end, ended)


def added_text(before: str, after: str, end: str, ended: bool) -> str:
    """Return the text that the template adds to a conversation whose last answer has been decoded.

    Args:
        before, after: the conversation up to the last answer, and up to the next one.
        end: the text of the token that ends an answer.
        ended: whether the last answer ended with it; an answer that was cut off gets it now.
    """
    position = after.rfind(end, 0, len(before)) if end else -1
    if not before or position < 0:
        return after[len(before) :]
    return after[position + len(end) if ended else position :]
