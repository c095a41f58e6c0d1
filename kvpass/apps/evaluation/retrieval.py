"""Retrieve a number that was planted in a long text: passkeys (arXiv:2305.16300), and needles in a haystack."""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvpass.apps.evaluation.session import Row, Session
from kvpass.arguments import require

CACHED_SHARE = "held"
"""The share of all KV heads that cache the number, at one of its occurrences, before the answer."""
SPARE = 4  # tokens of an answer in addition to the number's own
NOISE = "The road is long. The hills are low. The river runs on. We walk for a while, and then we rest. "
PLACES = ("Aldermoor", "Brackwater", "Cindervale", "Dunmere", "Eastholm", "Farrowby", "Glenmarsh", "Hollowford")

Planted = tuple[list[int], list[list[int]]]
"""The token ids of a prompt, and the positions of each occurrence of the number."""


def noise(session: Session, count: int) -> list[int]:
    """Return `count` tokens of sentences that say nothing."""
    sentences = session.encode(NOISE)
    return (sentences * (count // len(sentences) + 1))[:count]


def lighthouse(place: str, number: str) -> tuple[str, str]:
    """Return a statement about a place, and the question for its number."""
    return f"\nThe lighthouse of {place} has {number} steps.\n", f"\nThe lighthouse of {place} has"


def mentions(statement: Sequence[int], secret: Sequence[int]) -> list[list[int]]:
    """Return the indices of each occurrence of `secret` in `statement`; the whole statement if none is found."""
    starts = range(len(statement) - len(secret) + 1)
    spans = [list(range(start, start + len(secret))) for start in starts if statement[start:][: len(secret)] == secret]
    return spans or [list(range(len(statement)))]


@dataclasses.dataclass(frozen=True)
class RetrievalMeasure(abc.ABC):
    """The share of numbers that greedy decoding gives when the end of the prompt asks for them.

    Attributes:
        lengths: tokens of the whole prompt.
        depths: where the statement stands in the surrounding text, from 0 (first) to 1 (last).
        trials: prompts for each length and depth.
        batch: prompts that are rows of one batch.
        seed: the seed of the numbers and the surrounding texts.
    """

    lengths: tuple[int, ...] = (1024,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 4
    batch: int = 1
    seed: int = 0
    name: ClassVar[str]
    x_key: ClassVar[str] = "depth"
    y_key: ClassVar[str] = "accuracy"

    @property
    def needed_slots(self) -> int:
        return max(self.lengths) + 64  # and the answer

    @abc.abstractmethod
    def planted(self, secret: str, draw: random.Random) -> tuple[str, str]:
        """Return the statement, and the question up to where the number is expected."""

    @abc.abstractmethod
    def around(self, session: Session, count: int, draw: random.Random) -> list[int]:
        """Return `count` tokens in which the statement is hidden."""

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield a row for each length and depth; PolicyError for a length without room for the prompt."""
        for length in self.lengths:
            for depth in self.depths:
                answers = self._answers(session, length, depth)
                accuracy, cached_share = (sum(values) / len(answers) for values in zip(*answers, strict=True))
                yield {
                    "length": length,
                    "depth": depth,
                    "accuracy": accuracy,
                    CACHED_SHARE: cached_share,
                    "trials": len(answers),
                }

    def _answers(self, session: Session, length: int, depth: float) -> list[tuple[bool, float]]:
        """Return for each prompt whether its number is answered, and the share of heads that cache it first."""
        draws = [random.Random(f"{self.name} {self.seed} {length} {depth} {trial}") for trial in range(self.trials)]
        secrets = [str(draw.randrange(10_000, 100_000)) for draw in draws]
        prompts = [self._prompt(session, length, depth, *arguments) for arguments in zip(secrets, draws, strict=True)]
        count = max(len(session.encode(f" {secret}")) for secret in secrets) + SPARE
        answers: list[tuple[bool, float]] = []
        for start in range(0, len(prompts), self.batch):
            group, group_secrets = prompts[start : start + self.batch], secrets[start : start + self.batch]
            session.prompt([ids for ids, _ in group])
            cached_shares = [session.share_of_heads(row, *spans) for row, (_, spans) in enumerate(group)]
            right = [secret in text for secret, text in zip(group_secrets, session.generate(count), strict=True)]
            answers += zip(right, cached_shares, strict=True)
        return answers

    def _prompt(self, session: Session, length: int, depth: float, secret: str, draw: random.Random) -> Planted:
        """Return a prompt of exactly `length` tokens."""
        statement, question = (session.encode(text) for text in self.planted(secret, draw))
        count = length - 1 - len(statement) - len(question)
        needed = len(statement) + len(question) + 1
        require(count >= 0, "length", length, f"must have room for the {needed} tokens of statement and question")
        surrounding, position = self.around(session, count, draw), round(depth * count)
        ids = [session.loaded.bos, *surrounding[:position], *statement, *surrounding[position:], *question]
        spans = [[position + 1 + index for index in span] for span in mentions(statement, session.encode(secret))]
        return ids, spans

    def columns(self, rows: Sequence[Row]) -> Row:
        """Return means, then the accuracy for each length and depth."""
        means = {name: sum(row[name] for row in rows) / len(rows) for name in ("accuracy", CACHED_SHARE)}
        return {**means, **{f"{row['length']:,} at {row['depth']:.0%}": row["accuracy"] for row in rows}}


@dataclasses.dataclass(frozen=True)
class Passkey(RetrievalMeasure):
    """A number among the same few sentences again and again."""

    name: ClassVar[str] = "passkey"

    def planted(self, secret: str, draw: random.Random) -> tuple[str, str]:
        statement = f"\nThe pass key is {secret}. Remember it. {secret} is the pass key.\n"
        return statement, "\nWhat is the pass key? The pass key is"

    def around(self, session: Session, count: int, draw: random.Random) -> list[int]:
        return noise(session, count)


@dataclasses.dataclass(frozen=True)
class Needle(RetrievalMeasure):
    """A number in the texts, which are read from a random position."""

    name: ClassVar[str] = "needle"

    def planted(self, secret: str, draw: random.Random) -> tuple[str, str]:
        return lighthouse(draw.choice(PLACES), secret)

    def around(self, session: Session, count: int, draw: random.Random) -> list[int]:
        return session.filler(draw.randrange(2**20), count)
