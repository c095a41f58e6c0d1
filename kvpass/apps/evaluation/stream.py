"""Measure perplexity along one unbroken stream of all files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvpass.apps import corpus
from kvpass.apps.evaluation.perplexity import exponential
from kvpass.apps.evaluation.session import Row, Session
from kvpass.errors import PolicyError


@dataclasses.dataclass(frozen=True)
class StreamMeasure:
    """Perplexity of each part of a stream: the files one after the other on one cache.

    Attributes:
        tokens: of the stream.
        restart: tokens after which the cache is emptied, as a full cache must be at the end of the model's range; the
            stream goes on with the token that begins a text.  0 for never.
        parts: pieces of equal length, each with its perplexity.
    """

    tokens: int = 4096
    restart: int = 0
    parts: int = 16
    name: ClassVar[str] = "stream"
    across: ClassVar[str] = "tokens"
    up: ClassVar[str] = "perplexity"

    @property
    def room(self) -> int:
        return self.restart or self.tokens

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield a row for each part: the tokens up to its end, and its perplexity.

        Raises:
            PolicyError: feed="whole", as a stream is not a prompt.
            KVPassError: the texts are too short.
        """
        if session.feed == "whole":
            raise PolicyError("prefill='whole': a stream is not one prompt; use --prefill chunk or token")
        first = session.subject.bos
        ids = corpus.concatenate_texts(list(session.texts.values()), self.tokens, first)[1:]
        step = (self.restart or self.tokens) - 1
        losses: list[float] = []
        for start in range(0, len(ids), step):
            found = session.score([[first]], [ids[start : start + step]])
            losses += (-found.log_likelihoods[0]).tolist()
        size = -(-len(losses) // self.parts)
        for start in range(0, len(losses), size):
            part = losses[start : start + size]
            yield {"tokens": start + len(part) + 1, "perplexity": exponential(part), "scored": len(part)}

    def columns(self, rows: Sequence[Row]) -> Row:
        """Return the perplexity of the stream, and of its first and last quarter."""
        quarter = max(1, len(rows) // 4)
        return {
            "perplexity": join_parts(rows),
            "first quarter": join_parts(rows[:quarter]),
            "last quarter": join_parts(rows[-quarter:]),
        }


def join_parts(rows: Sequence[Row]) -> float:
    """Return the perplexity of parts together."""
    return exponential([math.log(row["perplexity"]) for row in rows for _ in range(row["scored"])])
