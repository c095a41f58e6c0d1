"""How much of what was planted in a text a bounded cache still knows when it is asked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.apps.demo.pairs import PlantedPairs, Tongue, plant
from kvpass.apps.demo.stream import PROMPT
from kvpass.errors import KVPassError
from kvpass.torch_private import dynamo

DISTANCES = (16, 32, 64, 128, 256, 512, 1024, 2000)
VALUE = 4  # words of a value
TIMES = 2  # that a pair is said: it is used once before it is asked for
ROWS = 8  # texts
TURNS = 2  # prompts of all rows, each row with another question: they cost the most
TEMPERATURE = 0.7
LATER, AT_ONCE = "asked after the text", "asked at the end of the prompt"
PIECE = 32  # tokens of a text that go in together
SEED = 1_000_000_007  # of the pairs; training draws from smaller ones


@dataclasses.dataclass(frozen=True)
class RecallOutcome:
    """The share of words of values that were the likeliest token, by distance.

    Attributes:
        later: the text went in piece by piece, and nobody knew what would be asked.
        at_once: text and question were one prompt, and the cache was cut down after it.  The first word of a value,
            which is read from the whole prompt, is left out.
        sampled: what was sampled after each of `questions`, asked after the text.
    """

    distances: tuple[int, ...]
    later: tuple[float, ...]
    at_once: tuple[float, ...]
    sampled: tuple[tuple[int, ...], ...] = ()

    @property
    def ways(self) -> dict[str, tuple[float, ...]]:
        """The shares by how was asked, in words."""
        return {LATER: self.later, AT_ONCE: self.at_once}


def planted(
    tokens: Tensor,
    bos: int,
    tongue: Tongue,
    length: int,
    distances: tuple[int, ...] = DISTANCES,
    rows: int = ROWS,
    seed: int = SEED,
    times: int = TIMES,
) -> PlantedPairs:
    """Rows of text with a pair at each distance that fits; with question and answer they are `length` tokens long.

    Args:
        tokens: int64 [N] of text; the rows begin at even distances in it, and may overlap if it is short.
        bos: the first token of each row.
        seed: of the pairs.
        times: how often each pair is said.

    Raises:
        KVPassError: the text is too short, there is no room for a pair, or the tokenizer has too few words.
    """
    line, room = VALUE + 3, length - VALUE - 1  # the last word of an answer is not fed
    fitting = tuple(distance for distance in distances if 1 + times * line + distance <= room)
    if not fitting:
        raise KVPassError(f"pairs are {line} tokens and asked from {distances[0]} on: {length} tokens have no room")
    if len(tokens) < room:
        raise KVPassError(f"a text of {len(tokens)} tokens is too short for planting pairs in {room}")
    starts = torch.linspace(0, len(tokens) - room, rows).long().tolist()
    documents = torch.stack([tokens[start : start + room] for start in starts])
    documents[:, 0] = bos
    return plant(documents, tongue, fitting, VALUE, seed, times)


@dataclasses.dataclass(frozen=True)
class Question:
    """Tokens of one row: what is asked, what was planted, and how far back."""

    row: int
    number: int
    distance: int
    prompt: Tensor  # int64 [T + 2], the text and the question
    planted: Tensor  # int64 [3 + V], the line


def questions(planted: PlantedPairs) -> list[Question]:
    """A few of the distances, the longest among them, each about a row of its own while there are rows."""
    count = len(planted.distances)
    numbers = range(count - 1, -1, -max(1, count // 3))
    return [_question(planted, row % len(planted.text), number) for row, number in enumerate(reversed(numbers))]


def _question(planted: PlantedPairs, row: int, number: int) -> Question:
    prompt = torch.cat([planted.text[row], planted.question(number)[row]])
    return Question(row, number, planted.distances[number], prompt, planted.pairs[row, number])


def measure(
    model: Any, planted: PlantedPairs, tick: Callable[[], object], *, turns: int = TURNS, sampled: int = 0
) -> RecallOutcome:
    """Ask a compiled model, or an uncompiled one, about every pair.

    Args:
        tick: called after every piece of the text.
        turns: how often the texts go in as prompts, each with one question at its end.
        sampled: how many tokens are sampled after each of `questions`.
    """
    numbers, cache = range(len(planted.distances)), read(model, planted.text, tick)
    later = [right(model, planted, number, copy.deepcopy(cache)) for number in numbers]
    asked = questions(planted) if sampled else []
    words = [sample(model, planted, question, sampled, copy.deepcopy(cache)) for question in asked]
    return RecallOutcome(planted.distances, tuple(later), right_at_once(model, planted, turns), tuple(words))


def read(model: Any, text: Tensor, tick: Callable[[], object]) -> Any:
    """The cache after text int64 [B, T], fed in pieces of one length; the prompt before them is what is left over."""
    first = text[:, : text.shape[1] - pieces(text) * PIECE]
    dynamo.mark_growing(first, 1)  # prompts with a question are longer
    cache = cache_names.returned(model(first, use_cache=True))
    for start in range(first.shape[1], text.shape[1], PIECE):
        cache = cache_names.returned(cache_names.call(model, text[:, start : start + PIECE], cache))
        tick()
    return cache


def pieces(text: Tensor) -> int:
    """How often `read` ticks for text int64 [B, T]."""
    return (text.shape[1] - PROMPT) // PIECE


def right(model: Any, planted: PlantedPairs, number: int, cache: Any) -> float:
    """The share of a value's words that follow its key, each after the right ones before it; uses up the cache."""
    return right_by_row(model, planted, number, cache).mean().item()


def right_by_row(model: Any, planted: PlantedPairs, number: int, cache: Any) -> Tensor:
    """The same for each text, float32 [B]."""
    answer = planted.answer(number)
    said = likeliest(model, torch.cat([planted.question(number), answer[:, :-1]], 1), cache)
    return (said[:, 1:] == answer).float().mean(1)


def right_at_once(model: Any, planted: PlantedPairs, turns: int) -> tuple[float, ...]:
    """The share of a value's words but the first, by distance, when a question ends the prompt."""
    rows, count = len(planted.text), len(planted.distances)
    shares: list[list[float]] = [[] for _ in range(count)]
    for turn in range(max(turns, count - rows + 1)):  # every distance is asked of some row
        numbers = [(row + turn) % count for row in range(rows)]
        for number, share in zip(numbers, _right_in_turn(model, planted, torch.tensor(numbers)), strict=True):
            shares[number].append(share)
    return tuple(sum(each) / len(each) for each in shares)


def _right_in_turn(model: Any, planted: PlantedPairs, numbers: Tensor) -> list[float]:
    """For each row its share of right words, where the prompt ends with the question of that number."""
    lines = planted.pairs[torch.arange(len(numbers)), numbers]  # [B, 3 + V]
    question, answer = lines[:, :2], lines[:, 2:-1]
    out = model(torch.cat([planted.text, question], 1), use_cache=True, logits_to_keep=1)
    cache = cache_names.returned(out)
    right: list[float] = (likeliest(model, answer[:, :-1], cache) == answer[:, 1:]).float().mean(1).tolist()
    return right


def sample(model: Any, planted: PlantedPairs, question: Question, count: int, cache: Any) -> tuple[int, ...]:
    """Tokens sampled after a question, with the same random numbers whatever the model; uses up the cache."""
    generator, said = torch.Generator().manual_seed(0), list[int]()
    mark, column = torch.split(planted.question(question.number), 1, 1)
    cache = cache_names.returned(cache_names.call(model, mark, cache))
    for _ in range(count):
        out = cache_names.call(model, column, cache)
        cache = cache_names.returned(out)
        shares = (out.logits[:, -1].float() / TEMPERATURE).softmax(-1)
        column = torch.multinomial(shares, 1, generator=generator)
        said.append(int(column[question.row, 0]))
    return tuple(said)


def right_uncached(model: Any, planted: PlantedPairs, number: int) -> float:
    """What `right` is for a plain model that sees everything at once, without a cache."""
    answer = planted.answer(number)
    tokens = torch.cat([planted.text, planted.question(number), answer[:, :-1]], 1)
    logits = model(tokens, use_cache=False, logits_to_keep=planted.value).logits
    return _share(logits.argmax(-1), answer)


def likeliest(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    """The likeliest token after each of tokens int64 [B, n], which are fed one by one."""
    said = []
    for column in torch.split(tokens, 1, 1):
        out = cache_names.call(model, column, cache)
        cache = cache_names.returned(out)
        said.append(out.logits[:, -1].argmax(-1))
    return torch.stack(said, 1)


def _share(said: Tensor, expected: Tensor) -> float:
    return (said == expected).float().mean().item()
