"""Measure perplexity: of many files, each from an empty cache as for PG19, and of one unbroken stream of files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvpass.apps import corpus
from kvpass.apps.evaluation.session import Row, Session
from kvpass.arguments import require
from kvpass.errors import KVPassError, PolicyError

ALL_FILES = "all files"


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Perplexity of texts, by token.

    In chunks or token by token all of a file is scored.  With whole prompts the first half of a file is the prompt, and
    the second half is scored, decoded token by token.

    Attributes:
        tokens: the most tokens of a file, including the token that begins a text.
        batch: files that are rows of one batch.
    """

    tokens: int = 2048
    batch: int = 4
    name: ClassVar[str] = "perplexity"
    x_key: ClassVar[str] = "budget"
    y_key: ClassVar[str] = "perplexity"

    @property
    def needed_slots(self) -> int:
        return self.tokens

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield a row for each file of at least three tokens, and a row for all their tokens together."""
        losses: list[float] = []
        files = ((name, text[: self.tokens - 1]) for name, text in session.texts.items() if len(text) > 2)
        while group := list(islice(files, self.batch)):
            texts = [[session.loaded.bos, *text] for _, text in group]
            cuts = [len(text) // 2 if session.feed == "whole" else 1 for text in texts]
            pairs = list(zip(texts, cuts, strict=True))
            scores = session.score([text[:cut] for text, cut in pairs], [text[cut:] for text, cut in pairs])
            for (name, _), (text, cut), log_likelihoods in zip(group, pairs, scores.log_likelihoods, strict=True):
                of_file = (-log_likelihoods[: len(text) - cut]).tolist()
                losses += of_file
                yield _row(name, of_file)
        if not losses:
            longest = max(map(len, session.texts.values()), default=0)
            raise KVPassError(f"a text of {longest} tokens is too short for a perplexity; give more text")
        yield _row(ALL_FILES, losses)

    def columns(self, rows: Sequence[Row]) -> Row:
        (total,) = (row for row in rows if row["file"] == ALL_FILES)
        return {"perplexity": total["perplexity"], "tokens": total["tokens"], "files": len(rows) - 1}


def _row(file: str, losses: Sequence[float]) -> Row:
    return {"file": file, "tokens": len(losses), "perplexity": exponential(losses)}


def exponential(losses: Sequence[float]) -> float:
    """Return the perplexity for losses in nats, one for each token; NaN for none."""
    return math.exp(math.fsum(losses) / len(losses)) if losses else math.nan


@dataclasses.dataclass(frozen=True)
class StreamMeasure:
    """Perplexity of each part of a stream: the files one after the other on one cache.

    Attributes:
        tokens: the tokens of the stream.
        restart: tokens after which the cache is emptied, as a full cache must be at the end of the model's range; the
            stream continues with the token that begins a text.  0 for never.
        parts: pieces of equal length, each with its perplexity.
    """

    tokens: int = 4096
    restart: int = 0
    parts: int = 16
    name: ClassVar[str] = "stream"
    x_key: ClassVar[str] = "tokens"
    y_key: ClassVar[str] = "perplexity"

    def __post_init__(self) -> None:
        require(self.tokens > 1, "tokens", self.tokens, "must be at least 2: a token that begins the text, and text")
        require(self.restart != 1, "restart", 1, "must be 0 or at least 2: a token that begins the text, and text")

    @property
    def needed_slots(self) -> int:
        return self.restart or self.tokens

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield a row for each part: the tokens up to its end, and its perplexity."""
        if session.feed == "whole":
            raise PolicyError("prefill='whole': a stream is not one prompt; use --prefill chunk or token")
        first = session.loaded.bos
        ids = corpus.concatenate_texts(list(session.texts.values()), self.tokens, first)[1:]
        step = (self.restart or self.tokens) - 1
        losses: list[float] = []
        for start in range(0, len(ids), step):
            scores = session.score([[first]], [ids[start : start + step]])
            losses += (-scores.log_likelihoods[0]).tolist()
        size = -(-len(losses) // self.parts)
        for start in range(0, len(losses), size):
            part_losses = losses[start : start + size]
            yield {
                "tokens": start + len(part_losses) + 1,
                "perplexity": exponential(part_losses),
                "scored": len(part_losses),
            }

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
