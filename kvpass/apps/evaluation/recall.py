"""Measure the recall of key-value pairs by distance: plant pairs in a text, and ask for each value later.

A pair is a line like `$ stream item server offset` in the text: a mark, a word that is the key, and the words of its
value.  A question repeats the mark and the key; the answer is right if the words of the value follow.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.apps.evaluation.session import Row, Session
from kvpass.arguments import require
from kvpass.decoding.model_call import ModelCall
from kvpass.errors import KVPassError

VALUE = 4  # words of a value
TIMES = 2  # occurrences of a pair: it has been useful once before a question needs it
LINE = VALUE + 3  # tokens of a pair: mark, key, value, end
MARK, END = "$", "\n"
_WORD = re.compile("[\u0120\u2581][a-z]{3,}")  # with the blank before it, as the two kinds of tokenizers write it


@dataclasses.dataclass(frozen=True)
class PairVocabulary:
    """The tokens that pairs consist of.

    Attributes:
        words: int64 [W], the words of keys and values.
        mark, end: the tokens before a key and after a value.
    """

    words: Tensor
    mark: int
    end: int

    @staticmethod
    def of(tokenizer: Any) -> PairVocabulary:
        """Return the lower-case words of at least three letters that are one token with the blank before them."""
        words = sorted(token for word, token in tokenizer.get_vocab().items() if _WORD.fullmatch(word))
        mark, end = (tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in (MARK, END))
        return PairVocabulary(torch.tensor(words, dtype=torch.long), mark, end)

    def pairs(self, number: int, value: int, generator: torch.Generator) -> Tensor:
        """Return lines int64 [number, 3 + value]: mark, key, `value` words, end.  No word occurs twice in them."""
        needed = number * (1 + value)
        if needed > len(self.words):
            raise KVPassError(
                f"{number} pairs with values of {value} words need {needed} words that are one token each; "
                f"the tokenizer has {len(self.words)}; use fewer pairs"
            )
        words = self.words[torch.randperm(len(self.words), generator=generator)[:needed]].view(number, 1 + value)
        column = torch.ones(number, 1, dtype=torch.long)
        return torch.cat([column * self.mark, words, column * self.end], 1)


@dataclasses.dataclass(frozen=True)
class PlantedPairs:
    """Documents with pairs in them, one in each row.

    Attributes:
        text: int64 [B, T]; its last token is followed by a question.
        pairs: int64 [B, N, 3 + V], the lines; line n ends `distances[n]` tokens before the text does.
        times: how often each line is repeated, without a gap.
    """

    text: Tensor
    pairs: Tensor
    distances: tuple[int, ...]
    times: int

    @property
    def value(self) -> int:
        """V, the number of words of a value."""
        return self.pairs.shape[2] - 3

    def question(self, number: int) -> Tensor:
        """Return the mark and the key of a pair, int64 [B, 2]."""
        return self.pairs[:, number, :2]

    def answer(self, number: int) -> Tensor:
        """Return the value of a pair, int64 [B, V]."""
        return self.pairs[:, number, 2:-1]

    def span(self, number: int) -> slice:
        """Return where in the text the line of a pair stands, all repetitions included."""
        end = self.text.shape[1] - self.distances[number]
        return slice(end - self.times * self.pairs.shape[2], end)


def plant(
    documents: Tensor, vocabulary: PairVocabulary, distances: tuple[int, ...], value: int, seed: int, times: int = 1
) -> PlantedPairs:
    """Plant a pair for each distance into every row of documents int64 [B, T]; the text stays T tokens long.

    Each line is said `times` times.  At the second time a model that recalls attends to the first, so a policy can see
    that the pair is useful.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [vocabulary.pairs(len(distances), value, generator) for _ in documents]
    planted = PlantedPairs(torch.empty_like(documents), torch.stack(rows), distances, times)
    free = torch.ones(documents.shape[1], dtype=torch.bool)
    for number in range(len(distances)):
        free[planted.span(number)] = False
        planted.text[:, planted.span(number)] = planted.pairs[:, number].repeat(1, times)
    planted.text[:, free] = documents[:, : int(free.sum())]
    return planted


@dataclasses.dataclass(frozen=True)
class RecallMeasure:
    """The share of values that are predicted after their keys, each pair on a copy of the cache.

    Attributes:
        distances: tokens between the end of a pair and the end of the text; every text has a pair at each distance.
        trials: texts, rows of one batch.
        seed: the seed of the pairs.
    """

    distances: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    trials: int = 8
    seed: int = 0
    name: ClassVar[str] = "recall"
    x_key: ClassVar[str] = "distance"
    y_key: ClassVar[str] = "pairs"

    @property
    def needed_slots(self) -> int:
        return max(self.distances) + 64  # a pair, the text before it, and a question

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield for each distance the share of values that are entirely right, and the share of right words."""
        planted, device = self.planted(session), session.loop.device
        planted = dataclasses.replace(planted, text=planted.text.to(device), pairs=planted.pairs.to(device))
        cache = session.read(planted.text)
        for number, distance in enumerate(planted.distances):
            right = right_words(session.model_call, planted, number, copy.deepcopy(cache)).float()
            shares = {"pairs": right.prod(1).mean().item(), "tokens": right.mean().item()}
            yield {"distance": distance, **shares, "trials": self.trials}

    def planted(self, session: Session) -> PlantedPairs:
        """Return texts of one length with a pair at each distance; their tokens come from the session's texts."""
        gaps = [after - before for before, after in pairwise(sorted(self.distances))]
        pair_tokens = TIMES * LINE
        require(
            min(gaps, default=pair_tokens) >= pair_tokens,
            "distances",
            self.distances,
            f"must be {pair_tokens} tokens apart",
        )
        length = 1 + pair_tokens + max(self.distances) + VALUE + 1
        tokens = torch.tensor(session.filler(0, max(sum(map(len, session.texts.values())), length)))
        vocabulary = PairVocabulary.of(session.loaded.tokenizer)
        return plant_pairs(tokens, session.loaded.bos, vocabulary, length, self.distances, self.trials, self.seed)

    def columns(self, rows: Sequence[Row]) -> Row:
        return {f"{row['distance']:,}": row["pairs"] for row in rows}


def plant_pairs(
    tokens: Tensor,
    bos: int,
    vocabulary: PairVocabulary,
    length: int,
    distances: tuple[int, ...],
    rows: int,
    seed: int,
    times: int = TIMES,
) -> PlantedPairs:
    """Return rows of text with a pair at each distance that fits; with question and answer they have `length` tokens.

    Args:
        tokens: int64 [N] of text; the rows begin at even distances in it, and may overlap if it is short.

    Raises:
        KVPassError: the text is too short, a pair does not fit, or the tokenizer has too few words.
    """
    fed_tokens = length - VALUE - 1  # the last word of an answer is not fed
    fitting = tuple(distance for distance in distances if 1 + times * LINE + distance <= fed_tokens)
    if not fitting:
        raise KVPassError(
            f"{length} tokens are too few for a pair of {LINE} tokens at a distance of {distances[0]}; use longer texts"
        )
    if len(tokens) < fed_tokens:
        raise KVPassError(
            f"a text of {len(tokens)} tokens is too short for planting pairs in {fed_tokens}; give a longer text"
        )
    starts = torch.linspace(0, len(tokens) - fed_tokens, rows).long().tolist()
    documents = torch.stack([tokens[start : start + fed_tokens] for start in starts])
    documents[:, 0] = bos
    return plant(documents, vocabulary, fitting, VALUE, seed, times)


def right_words(model_call: ModelCall, planted: PlantedPairs, number: int, cache: Any) -> Tensor:
    """Return which words of a value are the likeliest after its key and the right words before, bool [B, V]."""
    answer = planted.answer(number)
    predicted = likeliest(model_call, torch.cat([planted.question(number), answer[:, :-1]], 1), cache)
    return predicted[:, 1:] == answer


@torch.no_grad()
def likeliest(model_call: ModelCall, tokens: Tensor, cache: Any) -> Tensor:
    """Return the likeliest token after each of tokens int64 [B, n], which are fed one by one."""
    predicted = []
    for column in torch.split(tokens, 1, 1):
        out = model_access.call_model(model_call.call, column, cache)
        cache = model_access.cache_of_output(out)
        predicted.append(out.logits[:, -1].argmax(-1))
    return torch.stack(predicted, 1)
