"""A statement that is planted in a long text and asked for at its end."""

from __future__ import annotations

import abc
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvpass.apps.evaluation.session import Row, Session
from kvpass.arguments import require

SPARE = 4  # tokens of an answer beside the secret's own


@dataclasses.dataclass(frozen=True)
class PlantedMeasure(abc.ABC):
    """The share of secrets that are said, greedily, when they are asked for.

    Attributes:
        lengths: tokens of the whole prompt.
        depths: where the statement stands among what is around it, from 0 (first) to 1 (last).
        trials: prompts for each length and depth, rows of one batch.
        seed: of the secrets and the surroundings.
    """

    lengths: tuple[int, ...] = (1024,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 4
    seed: int = 0
    name: ClassVar[str]
    across: ClassVar[str] = "depth"
    up: ClassVar[str] = "accuracy"

    @property
    def room(self) -> int:
        return max(self.lengths) + 64  # and the answer

    @abc.abstractmethod
    def planted(self, secret: str, draw: random.Random) -> tuple[str, str]:
        """The statement, and the question up to where the secret is to be said."""

    @abc.abstractmethod
    def around(self, session: Session, count: int, draw: random.Random) -> list[int]:
        """So many tokens for the statement to be hidden in."""

    def rows(self, session: Session) -> Iterator[Row]:
        """A row for each length and depth.

        Raises:
            PolicyError: a length that has no room for statement and question.
        """
        for length in self.lengths:
            for depth in self.depths:
                said = self._asked(session, length, depth)
                right = sum(secret in answer for secret, answer in said)
                yield {"length": length, "depth": depth, "accuracy": right / len(said), "trials": len(said)}

    def _asked(self, session: Session, length: int, depth: float) -> list[tuple[str, str]]:
        """Secrets, and what was said when they were asked for."""
        draws = [random.Random(f"{self.name} {self.seed} {length} {depth} {trial}") for trial in range(self.trials)]
        secrets = [str(draw.randrange(10_000, 100_000)) for draw in draws]
        prompts = [self._prompt(session, length, depth, *one) for one in zip(secrets, draws, strict=True)]
        count = max(len(session.encode(f" {secret}")) for secret in secrets) + SPARE
        return list(zip(secrets, session.says(prompts, count), strict=True))

    def _prompt(self, session: Session, length: int, depth: float, secret: str, draw: random.Random) -> list[int]:
        """Exactly `length` token ids."""
        told, asked = (session.encode(text) for text in self.planted(secret, draw))
        count = length - 1 - len(told) - len(asked)
        require(
            count >= 0, "length", length, f"has room for the {len(told) + len(asked) + 1} tokens that must be there"
        )
        hay, place = self.around(session, count, draw), round(depth * count)
        return [session.subject.bos, *hay[:place], *told, *hay[place:], *asked]

    def columns(self, rows: Sequence[Row]) -> Row:
        """The mean, then a column for each length and depth."""
        mean = sum(row["accuracy"] for row in rows) / len(rows)
        return {"accuracy": mean, **{f"{row['length']:,} at {row['depth']:.0%}": row["accuracy"] for row in rows}}
