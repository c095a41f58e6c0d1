"""Key-value pairs that are planted in a text and asked for later: what a cache that forgets is measured by.

A pair is a line like `$ stream item server offset` among the text: a mark, a word that is the key, and words that are
its value.  Asking is to say the mark and the key again; the answer is right when the value's words follow.
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
class Tongue:
    """The tokens that pairs are said in.

    Attributes:
        words: int64 [W], from which keys and values are drawn.
        mark, end: the tokens before a key and after a value.
    """

    words: Tensor
    mark: int
    end: int

    @staticmethod
    def of(tokenizer: Any) -> Tongue:
        """All lower-case words of at least three letters that are one token with the blank before them."""
        words = sorted(token for word, token in tokenizer.get_vocab().items() if _WORD.fullmatch(word))
        mark, end = (tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in (MARK, END))
        return Tongue(torch.tensor(words, dtype=torch.long), mark, end)

    def pairs(self, number: int, value: int, generator: torch.Generator) -> Tensor:
        """Lines int64 [number, 3 + value]: mark, key, `value` words, end.  No word comes twice in them.

        Raises:
            KVPassError: the tokenizer has too few words.
        """
        needed = number * (1 + value)
        if needed > len(self.words):
            raise KVPassError(
                f"{number} pairs with values of {value} words need {needed} words that are one token each; "
                f"the tokenizer has {len(self.words)}"
            )
        said = self.words[torch.randperm(len(self.words), generator=generator)[:needed]].view(number, 1 + value)
        column = torch.ones(number, 1, dtype=torch.long)
        return torch.cat([column * self.mark, said, column * self.end], 1)


@dataclasses.dataclass(frozen=True)
class PlantedPairs:
    """Documents with pairs in them, a row each.

    Attributes:
        text: int64 [B, T]; its last token is followed by a question.
        pairs: int64 [B, N, 3 + V], the lines; the end of line n is `distances[n]` tokens before that of the text.
        times: how often each line is said there, one after the other.
    """

    text: Tensor
    pairs: Tensor
    distances: tuple[int, ...]
    times: int

    @property
    def value(self) -> int:
        """V, the words of a value."""
        return self.pairs.shape[2] - 3

    def question(self, number: int) -> Tensor:
        """int64 [B, 2]: the mark and the key of a pair."""
        return self.pairs[:, number, :2]

    def answer(self, number: int) -> Tensor:
        """int64 [B, V]: what was said after that key."""
        return self.pairs[:, number, 2:-1]

    def places(self, number: int) -> slice:
        """Where in the text the line stands, as often as it is said."""
        end = self.text.shape[1] - self.distances[number]
        return slice(end - self.times * self.pairs.shape[2], end)


def plant(
    documents: Tensor, tongue: Tongue, distances: tuple[int, ...], value: int, seed: int, times: int = 1
) -> PlantedPairs:
    """Plant a pair for each distance into every row of documents int64 [B, T]; the text stays T tokens long.

    Args:
        distances: tokens from the end of a line to the end of the text, far enough apart for the lines.
        value: words of a value.
        times: how often each line is said.  A model that recalls looks back at the first one while it says the second:
            a policy can see then that the pair is of use.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [tongue.pairs(len(distances), value, generator) for _ in documents]
    planted = PlantedPairs(torch.empty_like(documents), torch.stack(rows), distances, times)
    free = torch.ones(documents.shape[1], dtype=torch.bool)
    for number in range(len(distances)):
        free[planted.places(number)] = False
        planted.text[:, planted.places(number)] = planted.pairs[:, number].repeat(1, times)
    planted.text[:, free] = documents[:, : int(free.sum())]
    return planted
