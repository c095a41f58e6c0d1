"""Score continuations under a bounded cache: their likelihoods, and the agreement with a full cache."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.arguments import require
from kvpass.decoding.model_call import ModelCall
from kvpass.decoding.prefill import run_chunks, run_to_last
from kvpass.torch_private.tensors import tensor_bytes

Feed = Literal["whole", "chunk", "token"]
FEEDS: tuple[Feed, ...] = ("whole", "chunk", "token")
SLICE = 4  # tokens whose distributions are compared together: copies in float32 that stay in a processor's caches


@dataclasses.dataclass(frozen=True)
class ScoringBatch:
    """Contexts and their continuations; the scores of all rows begin at the same column.

    Attributes:
        ids: int64 [B, T + n], the contexts padded on the left to T, the continuations on the right to n.
        mask: int64 [B, T + n], 0 for padding.
        context: T, at least 1.
    """

    ids: Tensor
    mask: Tensor
    context: int

    @staticmethod
    def of(
        contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], device: torch.device
    ) -> ScoringBatch:
        """Return a batch with one context of at least one token id, and one continuation, in each row."""
        require(all(map(len, contexts)), "context", [], "must have at least one token")
        before, after = max(map(len, contexts)), max(map(len, continuations))
        ids = torch.zeros(len(contexts), before + after, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (context, continuation) in enumerate(zip(contexts, continuations, strict=True)):
            columns = slice(before - len(context), before + len(continuation))
            ids[row, columns] = torch.tensor([*context, *continuation])
            mask[row, columns] = 1
        return ScoringBatch(ids.to(device), mask.to(device), before)

    @property
    def scored(self) -> Tensor:
        """bool [B, n], true for tokens of a continuation and false for padding."""
        return self.mask[:, self.context :].bool()


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores of the continuations of a batch.

    Attributes:
        log_likelihoods: float32 [B, n], in nats, zero for padding.
        greedy: bool [B, n], whether the token is the likeliest one; true for padding.
    """

    log_likelihoods: Tensor
    greedy: Tensor

    def rows(self) -> list[tuple[float, bool]]:
        """Return for each row the sum of log-likelihoods, and whether greedy decoding gives this continuation."""
        sums, same = self.log_likelihoods.double().sum(-1), self.greedy.all(-1)
        return list(zip(sums.tolist(), same.tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class AgreementScores:
    """The distance of a policy's predictions of continuations from predictions with a full cache.

    Attributes:
        divergence: float32 [B, n], KL(full || policy) of the distribution of each token, in nats; zero for padding.
        same: bool [B, n], whether both have the same likeliest token; true for padding.
        loss: float32 [B, n], of the tokens under the policy, in nats; zero for padding.
        full_loss: float32 [B, n], of the tokens with a full cache.
    """

    divergence: Tensor
    same: Tensor
    loss: Tensor
    full_loss: Tensor


class Piece(NamedTuple):
    """The model's output for tokens that were fed together, and its cache after them."""

    position: int  # column of the first of these tokens
    logits: Tensor  # [B, q, V]; row i predicts the token in column `position + i + 1`
    cache: Any


@torch.no_grad()
def score(
    model_call: ModelCall,
    batch: ScoringBatch,
    chunk: int | None,
    feed: Feed = "token",
    tick: Callable[[int], object] = lambda tokens: None,
    watch: Callable[[Any], object] = lambda cache: None,
) -> Scored:
    """Score continuations with the model's cache.

    Args:
        chunk: tokens of a context that are fed together, after which the policy evicts; None for whole contexts.
        feed: how continuations are fed.  "token": one by one, so each is predicted from the tokens cached in a decode
            step.  "chunk": contexts and continuations together in chunks of `chunk`, which is faster; a token is
            predicted from the tokens cached before its chunk, and from the chunk.  "whole": contexts and continuations
            together as one prompt, in which nothing has been evicted yet.
        tick: called with the number of tokens after each piece.
        watch: called with the cache after each piece.

    Raises:
        PolicyError: feed="chunk" without a chunk, or padding for a model that takes no attention mask.
    """
    scores = []
    for position, logits, cache in pieces(model_call, batch, chunk, feed):
        targets = batch.ids[:, position + 1 : position + 1 + logits.shape[1]]
        scores.append((losses_of(log_probs_of(logits), targets), likeliest_of(logits) == targets))
        tick(logits.shape[1])
        watch(cache)
    losses, greedy = _of_continuations(batch, scores)
    return Scored(torch.where(batch.scored, -losses, 0.0), greedy | ~batch.scored)


class FullPredictions:
    """Logits of a model with a full cache; the logits of short texts are stored for all policies."""

    LIMIT: ClassVar[int] = 2**30
    """The most bytes that are stored."""

    def __init__(self, model_call: ModelCall) -> None:
        self._model_call = model_call  # of the model without kvpass
        self._stored: dict[tuple[Any, ...], list[Tensor]] = {}

    def of(self, batch: ScoringBatch, chunk: int | None, feed: Feed) -> Iterator[Tensor]:
        """Yield the logits [B, q, V] of each piece of a batch, see `pieces`."""
        content = hashlib.sha256(tensor_bytes(batch.ids) + tensor_bytes(batch.mask)).digest()
        key = (content, batch.context, chunk, feed)
        if key in self._stored:
            yield from self._stored[key]
            return
        result: list[Tensor] = []
        free = self.LIMIT - sum(logits.nbytes for stored in self._stored.values() for logits in stored)
        for piece in pieces(self._model_call, batch, chunk, feed):
            yield piece.logits
            free -= piece.logits.nbytes
            if free >= 0:
                result.append(piece.logits)
            else:
                result.clear()
        if free >= 0:
            self._stored[key] = result


@torch.no_grad()
def agreement(
    model_call: ModelCall,
    full: FullPredictions,
    batch: ScoringBatch,
    chunk: int | None,
    feed: Feed,
    tick: Callable[[int], object],
) -> AgreementScores:
    """Compare predictions with the same model's with a full cache, on the same tokens; see `score`."""
    scores: list[tuple[Tensor, ...]] = []
    for (position, logits, _), expected in zip(
        pieces(model_call, batch, chunk, feed), full.of(batch, chunk, feed), strict=True
    ):
        targets = batch.ids[:, position + 1 : position + 1 + logits.shape[1]]
        scores += map(_compare, *(torch.split(x, SLICE, 1) for x in (logits, expected, targets)))
        tick(logits.shape[1])
    divergences, same, loss, full_loss = _of_continuations(batch, scores)
    divergences, loss, full_loss = (torch.where(batch.scored, x, 0.0) for x in (divergences, loss, full_loss))
    return AgreementScores(divergences, same | ~batch.scored, loss, full_loss)


def pieces(model_call: ModelCall, batch: ScoringBatch, chunk: int | None, feed: Feed) -> Iterator[Piece]:
    """Feed a batch from an empty cache and yield every output that predicts a token; arguments as in `score`."""
    require(feed in FEEDS, "feed", feed, f"must be one of {', '.join(FEEDS)}")
    require(feed != "chunk" or chunk is not None, "chunk", chunk, "must be a number of tokens for feed='chunk'")
    model_call.check_padding(batch.mask)
    return (
        _score_in_steps(model_call, batch, chunk)
        if feed == "token"
        else _score_together(model_call, batch, chunk, feed)
    )


def _score_in_steps(model_call: ModelCall, batch: ScoringBatch, chunk: int | None) -> Iterator[Piece]:
    """Yield the output for the last token of the contexts, then for each token of the continuations."""
    ids, mask, context = batch.ids, batch.mask, batch.context
    last = run_to_last(run_chunks(model_call, ids[:, :context], mask[:, :context], None, chunk))
    cache = model_access.cache_of_output(last)
    yield Piece(context - 1, last.logits[:, -1:], cache)
    if ids.shape[1] > context + 1:
        steps = run_chunks(model_call, ids[:, context:-1], mask[:, :-1], cache, 1)
        for position, out in enumerate(steps, context):
            yield Piece(position, out.logits[:, -1:], model_access.cache_of_output(out))


def _score_together(model_call: ModelCall, batch: ScoringBatch, chunk: int | None, feed: Feed) -> Iterator[Piece]:
    """Yield the outputs for contexts and continuations; the last token predicts nothing and is not fed."""
    size, position = chunk if feed == "chunk" else None, 0
    for out in run_chunks(model_call, batch.ids[:, :-1], batch.mask[:, :-1], None, size, logits_to_keep=0):
        yield Piece(position, out.logits, model_access.cache_of_output(out))
        position += out.logits.shape[1]


def _of_continuations(batch: ScoringBatch, scores: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Join values [B, q] of all pieces, and return the continuations' values, [B, n] each."""
    columns = batch.scored.shape[1]
    return [torch.cat(parts, 1)[:, -columns:] for parts in zip(*scores, strict=True)]


def _compare(logits: Tensor, expected: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return the fields of `AgreementScores`, [B, n] each, of logits [B, n, V] and logits with a full cache."""
    ours, theirs = log_probs_of(logits), log_probs_of(expected)
    losses = (losses_of(x, targets) for x in (ours, theirs))
    return divergence(ours, theirs), likeliest_of(logits) == likeliest_of(expected), *losses


def log_probs_of(logits: Tensor) -> Tensor:
    """Return log-probabilities float32 of logits [..., V]."""
    return logits.float().log_softmax(-1)


def likeliest_of(logits: Tensor) -> Tensor:
    """Return the likeliest tokens int64 [...] of logits [..., V]."""
    return logits.max(-1).indices  # on a CPU four times as fast as argmax for bfloat16


def losses_of(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses [B, n] in nats of targets int64 [B, n] under log-probabilities [B, n, V]."""
    return -log_probs.gather(-1, targets[..., None])[..., 0]


def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return KL(theirs || ours) [B, n] in nats of log-probabilities [B, n, V]."""
    return (theirs.exp() * (theirs - ours)).sum(-1)
