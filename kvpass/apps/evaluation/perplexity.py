"""Measure perplexity over many files, each from an empty cache, as PG19's test set is measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvpass.apps.evaluation.session import Row, Session
from kvpass.errors import KVPassError

EVERY = "all files"


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Perplexity of texts, by token.

    In chunks or token by token all of a file is scored.  With whole prompts the first half of a file is the prompt, and
    the second half is scored, decoded token by token.

    Attributes:
        tokens: of each file at most, the token that begins a text included.
        batch: files that are rows of one batch.
    """

    tokens: int = 2048
    batch: int = 4
    name: ClassVar[str] = "perplexity"
    across: ClassVar[str] = "budget"
    up: ClassVar[str] = "perplexity"

    @property
    def room(self) -> int:
        return self.tokens

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield a row for each file of three tokens or more, and one for all of their tokens together.

        Raises:
            KVPassError: no file is long enough.
        """
        losses: list[float] = []
        files = ((name, text[: self.tokens - 1]) for name, text in session.texts.items() if len(text) > 2)
        while group := list(islice(files, self.batch)):
            texts = [[session.subject.bos, *text] for _, text in group]
            cuts = [len(text) // 2 if session.feed == "whole" else 1 for text in texts]
            pairs = list(zip(texts, cuts, strict=True))
            found = session.score([text[:cut] for text, cut in pairs], [text[cut:] for text, cut in pairs])
            for (name, _), (text, cut), scored in zip(group, pairs, found.log_likelihoods, strict=True):
                of_file = (-scored[: len(text) - cut]).tolist()
                losses += of_file
                yield _row(name, of_file)
        if not losses:
            longest = max(map(len, session.texts.values()), default=0)
            raise KVPassError(f"a text of {longest} tokens is too short for a perplexity; give more text")
        yield _row(EVERY, losses)

    def columns(self, rows: Sequence[Row]) -> Row:
        (whole,) = (row for row in rows if row["file"] == EVERY)
        return {"perplexity": whole["perplexity"], "tokens": whole["tokens"], "files": len(rows) - 1}


def _row(file: str, losses: Sequence[float]) -> Row:
    return {"file": file, "tokens": len(losses), "perplexity": exponential(losses)}


def exponential(losses: Sequence[float]) -> float:
    """Return the perplexity for losses in nats, one for each token; NaN for none."""
    return math.exp(math.fsum(losses) / len(losses)) if losses else math.nan
