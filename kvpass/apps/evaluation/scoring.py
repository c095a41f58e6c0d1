"""Log-likelihoods of continuations under a bounded cache, batches of any lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.arguments import require
from kvpass.decoding.prefill import Caller, chunks, last_of

Feed = Literal["whole", "chunk", "token"]
FEEDS: tuple[Feed, ...] = ("whole", "chunk", "token")


@dataclasses.dataclass(frozen=True)
class ScoringBatch:
    """Contexts and what follows each of them, in rows that all begin to be scored at the same column.

    Attributes:
        ids: int64 [B, T + n], the contexts padded on the left to T, the continuations on the right to n.
        mask: int64 [B, T + n], 0 for padding.
        context: T, from 1 on.
    """

    ids: Tensor
    mask: Tensor
    context: int

    @staticmethod
    def of(
        contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], device: torch.device
    ) -> ScoringBatch:
        """From token ids, one context of a token at least and one continuation a row.

        Raises:
            PolicyError: a context is empty, from which nothing can be predicted.
        """
        require(all(map(len, contexts)), "context", [], "has one token at least")
        before, behind = max(map(len, contexts)), max(map(len, continuations))
        ids = torch.zeros(len(contexts), before + behind, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (context, continuation) in enumerate(zip(contexts, continuations, strict=True)):
            here = slice(before - len(context), before + len(continuation))
            ids[row, here] = torch.tensor([*context, *continuation])
            mask[row, here] = 1
        return ScoringBatch(ids.to(device), mask.to(device), before)

    @property
    def scored(self) -> Tensor:
        """bool [B, n]: is a token of a continuation, and no padding."""
        return self.mask[:, self.context :].bool()


@dataclasses.dataclass(frozen=True)
class Scored:
    """The continuations of a batch.

    Attributes:
        log_likelihoods: float32 [B, n], in nats, zero for padding.
        greedy: bool [B, n], whether the token is the likeliest one; true for padding.
    """

    log_likelihoods: Tensor
    greedy: Tensor

    def rows(self) -> list[tuple[float, bool]]:
        """For each row the sum of its log-likelihoods, and whether greedy decoding would say just this."""
        sums, same = self.log_likelihoods.double().sum(-1), self.greedy.all(-1)
        return list(zip(sums.tolist(), same.tolist(), strict=True))


@torch.no_grad()
def score(
    caller: Caller,
    batch: ScoringBatch,
    chunk: int | None,
    feed: Feed = "token",
    tick: Callable[[int], object] = lambda tokens: None,
) -> Scored:
    """Score continuations on slots.

    Args:
        chunk: the contexts go in so many tokens at a time, then the policy evicts; None for whole ones.
        feed: how the continuations go in.  "token": one by one, each predicted from what a decode step would have
            held.  "chunk": contexts and continuations together in chunks of `chunk`, which is faster; a token of a
            chunk is predicted from what was held before it and the chunk.  "whole": contexts and continuations
            together as one prompt, in which nothing has been evicted yet.
        tick: is told of tokens that are through.

    Raises:
        PolicyError: feed="chunk" without a chunk, or padding that the model cannot be told of.
    """
    require(feed in FEEDS, "feed", feed, f"is one of {', '.join(FEEDS)}")
    require(feed != "chunk" or chunk is not None, "chunk", chunk, "is a number of tokens for feed='chunk'")
    caller.check_padding(batch.mask)
    pieces = _stepped(caller, batch, chunk) if feed == "token" else _together(caller, batch, chunk, feed)
    found = []
    for place, logits in pieces:
        found.append(_judged(logits, batch.ids[:, place + 1 : place + 1 + logits.shape[1]]))
        tick(logits.shape[1])
    losses, likeliest = (torch.cat([piece[part] for piece in found], 1) for part in (0, 1))
    columns = batch.scored.shape[1]  # of a prompt that ran with its continuation, the last ones
    losses, likeliest = losses[:, -columns:], likeliest[:, -columns:]
    return Scored(torch.where(batch.scored, -losses, 0.0), likeliest.bool() | ~batch.scored)


def _stepped(caller: Caller, batch: ScoringBatch, chunk: int | None) -> Iterator[tuple[int, Tensor]]:
    """Places, and the logits of tokens from there on, [B, q, V]: the last of the context, then each that follows."""
    ids, mask, context = batch.ids, batch.mask, batch.context
    last = last_of(chunks(caller, ids[:, :context], mask[:, :context], None, chunk))
    yield context - 1, last.logits[:, -1:]
    if ids.shape[1] > context + 1:
        steps = chunks(caller, ids[:, context:-1], mask[:, :-1], cache_names.returned(last), 1)
        for place, out in enumerate(steps, context):
            yield place, out.logits[:, -1:]


def _together(caller: Caller, batch: ScoringBatch, chunk: int | None, feed: Feed) -> Iterator[tuple[int, Tensor]]:
    """The same of context and continuation, but for the last token, which predicts nothing."""
    size, place = chunk if feed == "chunk" else None, 0
    for out in chunks(caller, batch.ids[:, :-1], batch.mask[:, :-1], None, size, keep=0):
        yield place, out.logits
        place += out.logits.shape[1]


def _judged(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods float32 [B, q] and whether the targets int64 [B, q] are the likeliest, [B, q]."""
    losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return losses, logits.argmax(-1) == targets
