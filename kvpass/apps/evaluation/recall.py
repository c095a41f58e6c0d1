"""Measure the recall of key-value pairs by distance: plant pairs in a text, and ask for each value later."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.apps.evaluation.pairs import PairVocabulary, PlantedPairs, plant
from kvpass.apps.evaluation.session import Row, Session
from kvpass.arguments import require
from kvpass.decoding.prefill import Caller
from kvpass.errors import KVPassError
from kvpass.torch_private import dynamo

DISTANCES = (16, 32, 64, 128, 256, 512, 1024, 2000)
VALUE = 4  # words of a value
TIMES = 2  # that a pair is said: it has been of use once before it is asked for
LINE = VALUE + 3  # tokens of a pair: mark, key, value, end
ROWS = 8  # texts
PROMPT = 2  # tokens of the shortest first piece: sizes of one are special to torch.compile
PIECE = 32  # tokens of a text that are fed together
SEED = 1_000_000_007  # of the pairs; training draws from smaller ones


@dataclasses.dataclass(frozen=True)
class RecallMeasure:
    """The share of values that are predicted after their keys, each pair on a copy of the cache.

    Attributes:
        distances: tokens between the end of a pair and the end of the text; every text has a pair at each.
        trials: texts, rows of one batch.
        seed: of the pairs.
    """

    distances: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    trials: int = 8
    seed: int = 0
    name: ClassVar[str] = "recall"
    across: ClassVar[str] = "distance"
    up: ClassVar[str] = "pairs"

    @property
    def room(self) -> int:
        return max(self.distances) + 64  # a pair, what is before it, and a question

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield for each distance the share of values that are entirely right, and the share of right words.

        Raises:
            PolicyError: distances that are too close together for the pairs.
            KVPassError: the tokenizer has too few words that are one token.
        """
        text, device = self.planted(session), session.loop.device
        text = dataclasses.replace(text, text=text.text.to(device), pairs=text.pairs.to(device))
        cache = session.read(text.text)
        for number, distance in enumerate(text.distances):
            right = right_words(session.caller, text, number, copy.deepcopy(cache)).float()
            shares = {"pairs": right.prod(1).mean().item(), "tokens": right.mean().item()}
            yield {"distance": distance, **shares, "trials": self.trials}

    def planted(self, session: Session) -> PlantedPairs:
        """Return texts of one length with a pair at each distance; their tokens are those of the session's texts."""
        gaps = [after - before for before, after in pairwise(sorted(self.distances))]
        apart = TIMES * LINE
        require(min(gaps, default=apart) >= apart, "distances", self.distances, f"must be {apart} tokens apart")
        length = 1 + apart + max(self.distances) + VALUE + 1
        tokens = torch.tensor(session.filler(0, max(sum(map(len, session.texts.values())), length)))
        vocabulary = PairVocabulary.of(session.subject.tokenizer)
        return plant_pairs(tokens, session.subject.bos, vocabulary, length, self.distances, self.trials, self.seed)

    def columns(self, rows: Sequence[Row]) -> Row:
        return {f"{row['distance']:,}": row["pairs"] for row in rows}


def plant_pairs(
    tokens: Tensor,
    bos: int,
    vocabulary: PairVocabulary,
    length: int,
    distances: tuple[int, ...] = DISTANCES,
    rows: int = ROWS,
    seed: int = SEED,
    times: int = TIMES,
) -> PlantedPairs:
    """Return rows of text with a pair at each distance that fits; with question and answer they have `length` tokens.

    Args:
        tokens: int64 [N] of text; the rows begin at even distances in it, and may overlap if it is short.
        bos: the first token of each row.
        seed: of the pairs.
        times: how often each pair is said.

    Raises:
        KVPassError: the text is too short, there is no room for a pair, or the tokenizer has too few words.
    """
    room = length - VALUE - 1  # the last word of an answer is not fed
    fitting = tuple(distance for distance in distances if 1 + times * LINE + distance <= room)
    if not fitting:
        raise KVPassError(
            f"{length} tokens have no room for a pair of {LINE} tokens at a distance of {distances[0]}; use longer "
            "texts"
        )
    if len(tokens) < room:
        raise KVPassError(
            f"a text of {len(tokens)} tokens is too short for planting pairs in {room}; give a longer text"
        )
    starts = torch.linspace(0, len(tokens) - room, rows).long().tolist()
    documents = torch.stack([tokens[start : start + room] for start in starts])
    documents[:, 0] = bos
    return plant(documents, vocabulary, fitting, VALUE, seed, times)


@torch.no_grad()
def read(caller: Caller, text: Tensor, tick: Callable[[], object]) -> Any:
    """Return the cache after text int64 [B, T], fed in pieces of one length; a shorter prompt precedes them."""
    first = text[:, : text.shape[1] - pieces(text) * PIECE]
    dynamo.mark_growing(first, 1)  # prompts with a question are longer
    cache = cache_names.cache_of_output(call(caller, first, None))
    for start in range(first.shape[1], text.shape[1], PIECE):
        cache = cache_names.cache_of_output(call(caller, text[:, start : start + PIECE], cache))
        tick()
    return cache


def pieces(text: Tensor) -> int:
    """Return how often `read` ticks for text int64 [B, T]."""
    return (text.shape[1] - PROMPT) // PIECE


def share_of_right_words(caller: Caller, planted: PlantedPairs, number: int, cache: Any) -> float:
    """Return the share of a value's words that follow its key, each after the right ones before it."""
    return right_words(caller, planted, number, cache).float().mean().item()


def right_words(caller: Caller, planted: PlantedPairs, number: int, cache: Any) -> Tensor:
    """Return which words of a value are the likeliest after its key and the right words before, bool [B, V].

    Args:
        cache: the cache after the text, which goes on with the question.
    """
    answer = planted.answer(number)
    said = likeliest(caller, torch.cat([planted.question(number), answer[:, :-1]], 1), cache)
    return said[:, 1:] == answer


def share_without_cache(model: Any, planted: PlantedPairs, number: int) -> float:
    """Return what `share_of_right_words` is for a plain model that sees everything at once, without a cache."""
    answer = planted.answer(number)
    tokens = torch.cat([planted.text, planted.question(number), answer[:, :-1]], 1)
    logits = model(tokens, use_cache=False, logits_to_keep=planted.value).logits
    share: float = (logits.argmax(-1) == answer).float().mean().item()
    return share


@torch.no_grad()
def likeliest(caller: Caller, tokens: Tensor, cache: Any) -> Tensor:
    """Return the likeliest token after each of tokens int64 [B, n], which are fed one by one."""
    said = []
    for column in torch.split(tokens, 1, 1):
        out = call(caller, column, cache)
        cache = cache_names.cache_of_output(out)
        said.append(out.logits[:, -1].argmax(-1))
    return torch.stack(said, 1)


def call(caller: Caller, ids: Tensor, cache: Any, **more: Any) -> Any:
    """Return the model's output for tokens int64 [B, n] behind a cache; None for an empty one."""
    past = {} if cache is None else {caller.cache_name: cache}
    return caller.call(ids, **past, use_cache=True, **more)
