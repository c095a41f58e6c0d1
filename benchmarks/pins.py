"""Measure how much of a system prompt is held and recited after eviction, with and without pins.

python -m benchmarks.pins [--dtype float32]

Conversations run on SmolLM2-135M-Instruct. Each has a system prompt with a code word, a text of several times the
budget, and then the question for the code word in a separate turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import kvpass
from benchmarks.report import Row
from kvpass.apps import checkpoint, corpus
from kvpass.apps.evaluation.tables import markdown

WORDS = ("marzipan", "tangerine", "flamingo", "obsidian")
SYSTEM = "You are a helpful assistant. The secret code word is {word}."
QUESTION = "What is the secret code word?"
POLICIES = ("window", "streaming", "h2o", "tova")
BUDGET, TOKENS, ANSWER, CHUNK = 128, 512, 16, 128


def system_prompt(word: str) -> str:
    return f"<|im_start|>system\n{SYSTEM.format(word=word)}<|im_end|>\n"


def batch(tokenizer: Any, words: Sequence[str], text: str, tokens: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return ids and mask [B, T], left-padded, and the length of each system prompt."""

    def ids_of(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    begin, end = ids_of("<|im_start|>user\nRead this:\n"), ids_of("<|im_end|>\n<|im_start|>assistant\nDone.")
    read = begin + ids_of(text)[:tokens] + end
    systems = [ids_of(system_prompt(word)) for word in words]
    width = max(map(len, systems))
    rows = [[0] * (width - len(ids)) + ids + read for ids in systems]
    mask = [[0] * (width - len(ids)) + [1] * (len(ids) + len(read)) for ids in systems]
    return torch.tensor(rows), torch.tensor(mask), [len(ids) for ids in systems]


def rows(
    model: Any, tokenizer: Any, policies: Sequence[str] = POLICIES, tokens: int = TOKENS, budget: int = BUDGET
) -> Iterator[Row]:
    """Yield the held share of the system prompt and the recited words, for each policy and way of pinning."""
    ids, mask, systems = batch(tokenizer, WORDS, "\n".join(corpus.prose().values()), tokens)
    turn = f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    question = torch.tensor([tokenizer(turn, add_special_tokens=False)["input_ids"]] * len(WORDS))
    spans = [[(0, count)] for count in systems]
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "inside the budget": {"pin": spans},
        "on top of it": {"pin": spans, "on_top": True},
    }
    chosen = [(name, {"budget": budget}, way) for name in policies for way in ways]
    for name, settings, way in [("full", {}, "none"), *chosen]:
        loop = kvpass.DecodeLoop(model, name, **settings, prefill_chunk=CHUNK, inner="eager")
        loop.prompt(ids, mask, **ways[way])
        held = share_held(loop, mask, systems)
        loop.prompt(question)
        said = [tokenizer.decode(row) for row in loop.generate(ANSWER)]
        right = [word in text.lower() for word, text in zip(WORDS, said, strict=True)]
        slots = kvpass.inspect(loop).layers[0].capacity
        yield {"policy": name, "pinned": way, "slots": slots, "held": held, "recited": sum(right) / len(right)}


def share_held(loop: Any, mask: Tensor, systems: Sequence[int]) -> float:
    """Return the share of the system prompts' tokens that are held, over layers, heads and rows."""
    first, count = (mask == 0).sum(-1)[:, None, None], torch.tensor(systems)[:, None, None]
    held = [layer.positions for layer in kvpass.inspect(loop).layers]  # each [B, Hkv, n]
    shares = [((x >= first) & (x < first + count)).sum(-1) / count[..., 0] for x in held]
    return float(torch.stack([share.mean() for share in shares]).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    given = parser.parse_args(arguments)
    model, tokenizer = checkpoint.load(getattr(torch, given.dtype))
    print(markdown(list(rows(model, tokenizer, given.policies))), flush=True)


if __name__ == "__main__":
    main()
