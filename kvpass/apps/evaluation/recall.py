"""RecallMeasure of key-value pairs by distance: many pairs in one text, each asked for at its end."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpass.apps.evaluation.session import Row, Session
from kvpass.arguments import require
from kvpass.decoding.prefill import Caller, chunks

BEFORE = 16  # tokens of text in front of the first pair
SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "po", "ri", "su", "ta", "vo")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A key and its value as token ids: `said` is all that stands in the text, `asked` goes up to the value."""

    said: list[int]
    asked: list[int]
    value: list[int]


@dataclasses.dataclass(frozen=True)
class RecallMeasure:
    """The share of values that are predicted after their keys, each asked for on a copy of the cache.

    Attributes:
        distances: tokens between the end of a pair and the end of the text; every text has a pair at each.
        trials: texts, rows of one batch.
        seed: of pairs and texts.
    """

    distances: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    trials: int = 8
    seed: int = 0
    name: ClassVar[str] = "recall"
    across: ClassVar[str] = "distance"
    up: ClassVar[str] = "pairs"

    @property
    def room(self) -> int:
        return max(self.distances) + 128  # a pair, what is before it, and a question

    def rows(self, session: Session) -> Iterator[Row]:
        """For each distance the share of pairs whose value is predicted to its end, and of tokens of values.

        Raises:
            PolicyError: distances that are too close together for the pairs.
        """
        texts, pairs = self.planted(session)
        device = session.loop.device
        ids = torch.tensor(texts, device=device)
        cache = session.read(ids)
        for distance, mine in zip(self.distances, zip(*pairs, strict=True), strict=True):
            asked, value = (
                torch.tensor([getattr(p, part) for p in mine], device=device) for part in ("asked", "value")
            )
            right = answered(session.caller, copy.deepcopy(cache), torch.ones_like(ids), asked, value)
            shares = {"pairs": right.all(-1).float().mean().item(), "tokens": right.float().mean().item()}
            yield {"distance": distance, **shares, "trials": self.trials}

    def planted(self, session: Session) -> tuple[list[list[int]], list[list[Pair]]]:
        """Texts of the same length, and the pairs of each in the order of the distances."""
        size = len(_pair(session, random.Random(self.seed), None).said)
        places = sorted(self.distances)
        gaps = [b - a for a, b in pairwise(places)]
        require(min(gaps, default=size) >= size, "distances", self.distances, f"are {size} tokens apart, as pairs are")
        made = [self._text(session, random.Random(f"recall {self.seed} {trial}")) for trial in range(self.trials)]
        return [text for text, _ in made], [pairs for _, pairs in made]

    def _text(self, session: Session, draw: random.Random) -> tuple[list[int], list[Pair]]:
        like = _pair(session, random.Random(self.seed), None)
        pairs = _distinct(session, draw, like, len(self.distances))
        length = BEFORE + len(like.said) + max(self.distances)
        text = [session.subject.bos, *session.filler(draw.randrange(2**20), length - 1)]
        for distance, pair in zip(self.distances, pairs, strict=True):
            end = length - distance
            text[end - len(pair.said) : end] = pair.said
        return text, pairs

    def columns(self, rows: Sequence[Row]) -> Row:
        return {f"{row['distance']:,}": row["pairs"] for row in rows}


def answered(caller: Caller, cache: Any, mask: Tensor, asked: Tensor, value: Tensor) -> Tensor:
    """Which tokens of values are the likeliest ones after what is asked, said token by token; bool [B, V].

    Args:
        cache: goes on with the question.
        mask: [B, tokens seen].
        asked: int64 [B, K]; value: int64 [B, V].
    """
    fed = torch.cat([asked, value[:, :-1]], 1)
    whole = torch.cat([mask, torch.ones_like(fed)], 1)
    with torch.no_grad():
        said = [out.logits[:, -1].argmax(-1) for out in chunks(caller, fed, whole, cache, 1)]
    return torch.stack(said[asked.shape[1] - 1 :], 1) == value


def _distinct(session: Session, draw: random.Random, like: Pair, count: int) -> list[Pair]:
    """Pairs of different keys."""
    found: dict[tuple[int, ...], Pair] = {}
    while len(found) < count:
        pair = _pair(session, draw, like)
        found.setdefault(tuple(pair.asked), pair)
    return list(found.values())


def _pair(session: Session, draw: random.Random, like: Pair | None) -> Pair:
    """A pair; of as many tokens as another one, so that texts line up in a batch."""
    while True:
        name = "".join(draw.choice(SYLLABLES) for _ in range(3))
        asked, value = session.encode(f"\n{name} ="), session.encode(f" {draw.randrange(1000, 10_000)}")
        pair = Pair([*asked, *value, *session.encode("\n")], asked, value)
        if like is None or (len(asked), len(value)) == (len(like.asked), len(like.value)):
            return pair
