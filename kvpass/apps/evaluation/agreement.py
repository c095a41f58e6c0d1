"""Measure how far a policy's predictions are from the same model's with a full cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.apps import corpus
from kvpass.apps.evaluation.session import Row, Session
from kvpass.arguments import require

EDGES = (0, 64, 256, 1024, 4096)
LEVEL, DRAWS = 0.95, 2000
BEFORE, ALL = "before", "all"
SAME = "same first choice"
LOSS, FULL_LOSS = "loss, nats", "full loss, nats"


@dataclasses.dataclass(frozen=True)
class AgreementMeasure:
    """KL(full || policy), the share of equal likeliest tokens and perplexity, by distance from the first eviction.

    All tokens are teacher-forced.  A token's distance is the number of tokens that were fed since the budget was full;
    it is negative before that.  With whole prompts a policy evicts at the end of the prompt at the earliest.  Means are
    over documents, which all have the same weight, and intervals are bootstrapped over documents.

    Attributes:
        documents: the number of documents, cut from the texts in turn.
        tokens: the tokens of each document, including the token that begins it.
        batch: documents that are rows of one batch.
        edges: first distance of each bin.
        seed: the seed of the bootstrap.
    """

    documents: int = 8
    tokens: int = 1024
    batch: int = 1
    edges: tuple[int, ...] = EDGES
    seed: int = 0
    name: ClassVar[str] = "agreement"
    x_key: ClassVar[str] = "distance"
    y_key: ClassVar[str] = "KL, nats"

    def __post_init__(self) -> None:
        require(self.tokens > 2, "tokens", self.tokens, "must be at least 3: a token, a context and a continuation")
        require(self.documents > 0, "documents", self.documents, "must be at least 1")
        rising = all(before < after for before, after in pairwise(self.edges))
        require(bool(self.edges) and rising and self.edges[0] >= 0, "edges", self.edges, "must rise from 0 or more")

    @property
    def needed_slots(self) -> int:
        return self.tokens

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield a row for tokens before the first eviction, for each bin of distances, and for all bins."""
        texts = list(session.texts.values())
        documents = corpus.documents(texts, self.documents, self.tokens, session.loaded.bos)
        context = self.tokens // 2 if session.feed == "whole" else 1
        scores = [
            session.agree([text[:context] for text in group], [text[context:] for text in group])
            for group in (documents[start : start + self.batch] for start in range(0, len(documents), self.batch))
        ]
        names = {self.y_key: "divergence", SAME: "same", LOSS: "loss", FULL_LOSS: "full_loss"}
        values = {
            name: torch.cat([getattr(batch_scores, field) for batch_scores in scores]) for name, field in names.items()
        }
        slots = session.slots(context)
        full_at = self.tokens if slots is None else max(slots, context)
        # Column i is predicted from `context + i` tokens, which have been fed since `begins` of them were.
        distance = torch.arange(context, self.tokens) - full_at
        for label, first, last in self._bins(full_at):
            in_bin = (distance >= first) & (distance < last)
            if in_bin.any():
                yield {
                    "distance": None if label == ALL else first,
                    "tokens after eviction": label,
                    **self._row(values, in_bin),
                }

    def _bins(self, full_at: int) -> Iterator[tuple[str, int, int]]:
        """Yield a label and the limits of each bin."""
        end = max(self.tokens, self.edges[-1] + 1)
        yield BEFORE, -full_at, 0
        for first, last in pairwise((*self.edges, end)):
            yield f"{first:,} to {last - 1:,}", first, last
        yield ALL, self.edges[0], end

    def _row(self, values: dict[str, Tensor], in_bin: Tensor) -> Row:
        """Return means and intervals of the columns `in_bin`, bool [n], of values [documents, n]."""
        row: Row = {}
        for name, of_tokens in values.items():
            means = of_tokens[:, in_bin].double().mean(1)
            low, high = interval(means, self.seed)
            row |= {name: means.mean().item(), f"{name}, low": low, f"{name}, high": high}
        documents = len(values[self.y_key])
        return {**row, "documents": documents, "tokens": int(in_bin.sum()) * documents}

    def columns(self, rows: Sequence[Row]) -> Row:
        """Return the means and intervals over all distances after eviction, and the means of each bin."""
        total = next((row for row in rows if row["tokens after eviction"] == ALL), None)
        bins = [row for row in rows if row["tokens after eviction"] != ALL]
        cells: Row = {}
        for name, short in ((self.y_key, "KL"), (SAME, "same")):
            if total is not None:
                low, high = total[f"{name}, low"], total[f"{name}, high"]
                cells |= {name: total[name], f"{short}, 95 %": None if low is None else f"{low:.3g} to {high:.3g}"}
            cells |= {f"{short}, {row['tokens after eviction']}": row[name] for row in bins}
        if total is not None:
            cells |= {"perplexity": math.exp(total[LOSS]), "full perplexity": math.exp(total[FULL_LOSS])}
        return cells


def interval(means: Tensor, seed: int) -> tuple[float | None, float | None]:
    """Return the bootstrap percentile interval of the mean of values [documents]; two None for a single document."""
    if len(means) == 1:
        return None, None
    resampled = torch.randint(len(means), (DRAWS, len(means)), generator=torch.Generator().manual_seed(seed))
    tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = means.double()[resampled].mean(1).quantile(tails).tolist()
    return low, high
