"""Make conversations with the checkpoint, as token ids of its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LICENCE = Path(__file__).parents[2] / "LICENSE"
QUESTIONS = (
    "What is the capital of France?",
    "And how many people live there?",
    "Write one sentence about its river.",
)
SHORT = "Name three colours of the rainbow, with a comma between them."


def chat(tokenizer: Any, *messages: str, system: str = "Be brief.") -> list[int]:
    """Return the token ids of a chat in which user and assistant take turns, up to the assistant's next answer."""
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": system}, *said], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def next_turn(tokenizer: Any, question: str) -> Tensor:
    """Return the tokens after an answer that was cut short, up to the next answer, int64 [1, n]."""
    text = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


def of_length(tokenizer: Any, tokens: int) -> Tensor:
    """Return a chat of exactly this many tokens, int64 [1, tokens]: a question about the beginning of a licence."""
    question = "Summarise this licence in one sentence:\n"
    words = tokenizer(LICENCE.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    empty = chat(tokenizer, question)
    # Insert the licence before the end of the user's message: <|im_end|>\n<|im_start|>assistant\n.
    end = len(empty) - empty[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>")) - 1
    ids = empty[:end] + words[: tokens - len(empty)] + empty[end:]
    assert len(ids) == tokens, "the licence is shorter than that, or the question longer"
    return torch.tensor([ids])


def padded(tokenizer: Any, *questions: str) -> tuple[Tensor, Tensor]:
    """Return a left-padded batch, ids and mask [B, T], one row for each question."""
    rows = [chat(tokenizer, question) for question in questions]
    width = max(map(len, rows))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
