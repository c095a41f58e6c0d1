"""Plant key-value pairs in a text, to ask for them later.

A pair is a line like `$ stream item server offset` in the text: a mark, a word that is the key, and the words of its
value.  A question repeats the mark and the key; the answer is right if the words of the value follow.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import KVPassError

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
        """Return lines int64 [number, 3 + value]: mark, key, `value` words, end.  No word occurs twice in them.

        Raises:
            KVPassError: the tokenizer has too few words.
        """
        needed = number * (1 + value)
        if needed > len(self.words):
            raise KVPassError(
                f"{number} pairs with values of {value} words need {needed} words that are one token each; "
                f"the tokenizer has {len(self.words)}; use fewer pairs"
            )
        said = self.words[torch.randperm(len(self.words), generator=generator)[:needed]].view(number, 1 + value)
        column = torch.ones(number, 1, dtype=torch.long)
        return torch.cat([column * self.mark, said, column * self.end], 1)


@dataclasses.dataclass(frozen=True)
class PlantedPairs:
    """Documents with pairs in them, one in each row.

    Attributes:
        text: int64 [B, T]; its last token is followed by a question.
        pairs: int64 [B, N, 3 + V], the lines; line n ends `distances[n]` tokens before the text does.
        times: how often each line stands there, one after the other.
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

    Args:
        distances: tokens from the end of a line to the end of the text, far enough apart for the lines.
        value: words of a value.
        times: how often each line is said.  At the second time a model that recalls attends to the first, so a policy
            can see that the pair is of use.
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
