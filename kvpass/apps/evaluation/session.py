"""Feed a model under one policy and budget to measures, record the cached positions, and catch refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

import kvpass
from kvpass import model_access
from kvpass.apps.evaluation import scoring
from kvpass.apps.evaluation.scoring import AgreementScores, Feed, FullPredictions, Scored, ScoringBatch
from kvpass.apps.models import LoadedModel
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.model_call import ModelCall
from kvpass.decoding.prefill import run_chunks, run_to_last
from kvpass.errors import CacheHandleError, KVPassError
from kvpass.user_budget import slots_for

Row = dict[str, Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Session:
    """A model under one policy and budget, as measures use it.

    Attributes:
        texts: token ids of each file, by its name.
        feed: how prompts and texts are fed.
        chunk: tokens of a chunk, 1 for feed="token", None for whole prompts.
        budget: slots, a share of the prompt, or None if nothing is evicted.
        tick: called with a number of tokens after feeding them.
        watch: called with the cache after each piece of a scored text.
        full: predictions of the model with a full cache that sessions share; None if this session has its own.
    """

    loaded: LoadedModel
    loop: Loop
    texts: dict[str, list[int]]
    feed: Feed
    chunk: int | None
    budget: int | float | None = None
    tick: Callable[[int], object] = lambda tokens: None
    watch: Callable[[Any], object] = lambda cache: None
    full: FullPredictions | None = None

    @property
    def model_call(self) -> ModelCall:
        return self.loop.model_call

    def slots(self, tokens: int) -> int | None:
        """Return how many of a prompt's tokens are kept; None if nothing is evicted."""
        if self.budget is None or isinstance(self.loop, UncompiledLoop):
            return None
        return slots_for(self.loop.backend.policy, self.budget, tokens)

    def score(self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> Scored:
        """Score continuations, fed as `feed` says; after a whole prompt they are fed token by token."""
        batch = ScoringBatch.of(contexts, continuations, self.loop.device)
        return scoring.score(self.model_call, batch, self.chunk, self._feed, self.tick, self.watch)

    def agree(self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> AgreementScores:
        """Compare predictions of continuations with predictions with a full cache, fed in the same way."""
        batch = ScoringBatch.of(contexts, continuations, self.loop.device)
        full = self.full or FullPredictions(ModelCall.of(self.loaded.model))
        return scoring.agreement(self.model_call, full, batch, self.chunk, self._feed, self.tick)

    @property
    def _feed(self) -> Feed:
        return "chunk" if self.feed == "chunk" else "token"

    def prompt(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin new conversations with prompts, one a row."""
        batch = ScoringBatch.of(prompts, [[]] * len(prompts), self.loop.device)
        self.loop.reset()
        self.loop.prompt(batch.ids, batch.mask)
        self.tick(batch.ids.shape[1])

    def generate(self, count: int) -> list[str]:
        """Return the text of up to `count` more tokens of each row, greedily; special tokens are left out."""
        result = self.loop.generate(count)
        self.tick(count)
        return [self.loaded.tokenizer.decode(row, skip_special_tokens=True) for row in result]

    def share_of_heads(self, row: int, *spans: Sequence[int]) -> float:
        """Return the largest share of KV heads that cache one of a row's spans completely; padding counts too."""
        if isinstance(self.loop, UncompiledLoop):
            return 1.0
        heads = [cached for layer in kvpass.inspect(self.loop.cache).layers for cached in layer.positions[row].cpu()]
        complete = [[torch.isin(torch.tensor(list(span)), cached).all() for cached in heads] for span in spans]
        return max(torch.stack(of_span).float().mean().item() for of_span in complete)

    def answer_to(self, turns: Sequence[Sequence[int]], count: int) -> str:
        """Return the text of up to `count` tokens that follow one conversation's turns, fed one after the other."""
        self.loop.reset()
        for turn in turns:
            self.loop.prompt(torch.tensor([list(turn)], device=self.loop.device))
        (result,) = self.loop.generate(count)
        self.tick(sum(map(len, turns)) + count)
        return str(self.loaded.tokenizer.decode(result, skip_special_tokens=True))

    @torch.no_grad()
    def read(self, ids: Tensor) -> Any:
        """Return the cache after tokens int64 [B, T]."""
        cache = model_access.cache_of_output(
            run_to_last(run_chunks(self.model_call, ids, torch.ones_like(ids), None, self.chunk))
        )
        self.tick(ids.shape[1])
        return cache

    def encode(self, text: str) -> list[int]:
        """Return token ids without the tokenizer's own first and last ones."""
        return self.loaded.encode([text])[0]

    def filler(self, start: int, count: int) -> list[int]:
        """Return `count` tokens of the texts from a position; the texts are joined to a ring."""
        ring = [token for text in self.texts.values() for token in text]
        start %= len(ring)
        rounds = -(-(start + count) // len(ring))
        return (ring * rounds)[start : start + count]


@dataclasses.dataclass
class PlainState:
    """A conversation of `UncompiledLoop`: the model's own cache, and the likeliest next token."""

    cache: Any
    mask: Tensor  # int64 [B, tokens in the cache], 0 for padding
    token: Tensor  # int64 [B, 1]
    handed_out: bool = False  # whether `generate` has returned the token, so it is a part of the conversation


class UncompiledLoop:
    """Greedy decoding with the uncompiled model and its own growing cache, to compare with.

    Attributes:
        chunk: tokens of a prompt that are fed together; None for whole prompts.
        stop: tokens that end an answer after every row has come to one.
        state: the conversation; None before a prompt.
    """

    def __init__(self, model: Any, chunk: int | None, stop: Sequence[int] = ()) -> None:
        self.model_call, self.chunk = ModelCall.of(model), chunk
        self.device = model_access.device_of(model)
        self.stop = torch.tensor(list(stop), dtype=torch.int64)
        self.state: PlainState | None = None

    def reset(self) -> None:
        """Forget the conversation."""
        self.state = None

    @property
    def cache(self) -> Any:
        return None if self.state is None else self.state.cache

    @torch.no_grad()
    def prompt(self, ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Feed a prompt or the next turn, int64 [B, T]; the mask has 0 for padding, on the left."""
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        state = self.state
        if state is not None and state.handed_out:
            ids, mask = torch.cat([state.token, ids], 1), torch.cat([torch.ones_like(state.token), mask], 1)
        if state is not None:
            mask = torch.cat([state.mask, mask], 1)
        out = run_to_last(run_chunks(self.model_call, ids, mask, self.cache, self.chunk))
        self.state = PlainState(model_access.cache_of_output(out), mask, out.logits[:, -1:].argmax(-1))

    def generate(self, tokens: int) -> Tensor:
        """Return up to `tokens` new tokens, int64 [B, n] on the CPU; CacheHandleError before a prompt."""
        result: list[Tensor] = []
        while len(result) < tokens and not (result and bool(torch.isin(result[-1], self.stop).all())):
            if self.state is None:
                raise CacheHandleError("there is no conversation to continue; call prompt(ids) before generate")
            if self.state.handed_out:
                self.prompt(self.state.token[:, :0])
            self.state.handed_out = True
            result.append(self.state.token.cpu())
        return torch.cat(result, 1)


Loop = DecodeLoop | UncompiledLoop
"""Greedy decoding of a conversation, with and without kvpass."""


class Measure(Protocol):
    """One kind of measurement, a frozen dataclass whose fields are its settings."""

    name: ClassVar[str]
    x_key: ClassVar[str]
    """The key of rows on the horizontal axis of the picture, or "budget"."""
    y_key: ClassVar[str]
    """The key of rows on the vertical axis of the picture."""

    @property
    def needed_slots(self) -> int:
        """A number of slots that is always enough for a policy that evicts nothing."""

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield the measured rows."""

    def columns(self, rows: Sequence[Row]) -> Row:
        """Return the rows as one line of a table."""


@dataclasses.dataclass(frozen=True)
class PositionSnapshot:
    """The cached positions of a layer's first head in row 0, ascending, when the cache had seen `step` tokens."""

    step: int
    positions: list[int]


class PositionRecorder:
    """Takes snapshots of the first KV head of one layer of a cache; call it with the cache."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.snapshots: list[PositionSnapshot] = []

    def __call__(self, cache: Any) -> None:
        report = kvpass.inspect(cache).layers[self.layer]
        positions: list[int] = report.positions[0][0].tolist()
        self.snapshots.append(
            PositionSnapshot(report.seen, sorted(position for position in positions if position >= 0))
        )


def unless_refused(action: Callable[[], T]) -> T | KVPassError:
    """Return `action()`, or the error of kvpass that it raised, also from inside of an error of Dynamo."""
    try:
        return action()
    except Exception as error:
        refusals = [reason for reason in _reasons(error) if isinstance(reason, KVPassError)]
        if not refusals:
            raise
        return refusals[0]


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; Dynamo wraps errors of a backend."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__
