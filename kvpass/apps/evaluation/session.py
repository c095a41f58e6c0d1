"""A model under one policy and budget, and what measures do with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.apps.evaluation.scoring import Feed, Scored, ScoringBatch, score
from kvpass.apps.models import LoadedModel
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.prefill import Caller, chunks, last_of

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Session:
    """What a measure needs.

    Attributes:
        loop: the model with its bounded cache.
        texts: token ids of each file, by its name.
        feed: how prompts and texts go in; `chunk`: tokens of a chunk, 1 for feed="token", None for whole ones.
        tick: is told of tokens that are through.
    """

    subject: LoadedModel
    loop: DecodeLoop
    texts: dict[str, list[int]]
    feed: Feed
    chunk: int | None
    tick: Callable[[int], object]

    @property
    def caller(self) -> Caller:
        return self.loop.caller

    def score(self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> Scored:
        """Continuations as they are fed under `feed`; after a whole prompt they go in one by one."""
        batch = ScoringBatch.of(contexts, continuations, self.loop.device)
        return score(self.caller, batch, self.chunk, "chunk" if self.feed == "chunk" else "token", self.tick)

    def says(self, prompts: Sequence[Sequence[int]], count: int) -> list[str]:
        """The so many tokens that each prompt is answered with, as text."""
        batch = ScoringBatch.of(prompts, [[]] * len(prompts), self.loop.device)
        self.loop.state = None  # a new conversation
        self.loop.prompt(batch.ids, batch.mask)
        said = self.loop.generate(count)
        self.tick(batch.ids.shape[1] + count)
        return [self.subject.tokenizer.decode(row, skip_special_tokens=True) for row in said]

    @torch.no_grad()
    def read(self, ids: Tensor) -> Any:
        """The cache after tokens int64 [B, T]."""
        cache = cache_names.returned(last_of(chunks(self.caller, ids, torch.ones_like(ids), None, self.chunk)))
        self.tick(ids.shape[1])
        return cache

    def encode(self, text: str) -> list[int]:
        """Token ids without the tokenizer's own first and last ones."""
        ids: list[int] = self.subject.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def filler(self, start: int, count: int) -> list[int]:
        """So many tokens of the texts, which are one ring, from a place on."""
        ring = [token for text in self.texts.values() for token in text]
        start %= len(ring)
        turns = -(-(start + count) // len(ring))
        return (ring * turns)[start : start + count]


class Measure(Protocol):
    """One kind of measurement, a frozen dataclass whose fields are its settings."""

    name: ClassVar[str]
    across: ClassVar[str]
    """What is drawn to the right: a key of rows, or "budget"."""
    up: ClassVar[str]
    """What is drawn upwards: a key of rows."""

    @property
    def room(self) -> int:
        """Slots with which a policy that evicts nothing is never out of room."""

    def rows(self, session: Session) -> Iterator[Row]:
        """What was measured."""

    def columns(self, rows: Sequence[Row]) -> Row:
        """The same as one line of a table."""
