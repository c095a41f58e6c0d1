"""Hold a conversation that continues past the budget, with the model's chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from kvpass.apps.chat_template import first_turn, next_turn
from kvpass.apps.evaluation.session import Session
from kvpass.apps.models import stop_tokens

QUESTIONS = (
    "Why is the sky blue? Explain it to a child.",
    "Tell me a short story about a lighthouse keeper and a storm.",
    "What should I pack for a weekend in the mountains?",
    "How do I make a simple tomato soup?",
)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One question with its answer.

    Attributes:
        seen: tokens of the conversation before the answer.
    """

    question: str
    answer: str
    seen: int


def talk(session: Session, answer: int, questions: tuple[str, ...] = QUESTIONS) -> Iterator[Turn]:
    """Ask one question after the other in one conversation, and yield each with the greedy answer.

    Args:
        session: of a model whose tokenizer has a chat template; its loop ends at `stop_tokens`.
    """
    tokenizer, loop = session.loaded.tokenizer, session.loop
    stops = stop_tokens(session.loaded.model, tokenizer)
    loop.reset()
    ends, seen, ended = [tokenizer.decode([stop]) for stop in stops], 0, True
    for question in questions:
        messages = [{"role": "user", "content": question}]
        text = next_turn(tokenizer, messages, ends, ended) if seen else first_turn(tokenizer, messages)
        ids = torch.tensor([session.encode(text)])
        loop.prompt(ids)
        seen += ids.shape[1]
        result = loop.generate(answer)[0].tolist()
        session.tick(ids.shape[1] + answer)
        answer_text = tokenizer.decode(result, skip_special_tokens=True).strip()
        yield Turn(question, answer_text, seen)
        seen, ended = seen + len(result), bool(result) and result[-1] in stops
