"""Feed tokens to a compiled model one by one and write down what happens."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvpass
from kvpass import cache_names
from kvpass.apps.switch import CounterMark
from kvpass.torch_private import counters

PROMPT = 2  # tokens of the first step: sizes of one are special to torch.compile and cost a graph of their own


@dataclasses.dataclass(frozen=True)
class HeldSnapshot:
    """The positions that layer 0, head 0 of row 0 held after `step` tokens."""

    step: int
    positions: list[int]


@dataclasses.dataclass(frozen=True)
class StreamRun:
    """One policy on one batch of streams of T tokens.

    Attributes:
        losses: float32 [B, T - 1], the negative log-likelihood of each token but the first, in nats.
        seconds: [T - prompt], the time of each decode step, from the token to the loss on the host.
        busy: [T - prompt], True where something was compiled during the step.
        snapshots: which positions were held, every few steps.
        cache_bytes, full_bytes: of all rows at the end, and of a cache that kept everything.
        decode_graphs: graphs that ran after the prompt, beside the prompt's own.
        graph_breaks: from the prompt on.
    """

    losses: Tensor
    seconds: list[float]
    busy: list[bool]
    snapshots: list[HeldSnapshot]
    cache_bytes: int
    full_bytes: int
    decode_graphs: int
    graph_breaks: int

    @property
    def tokens_per_second(self) -> float | None:
        """All rows together, without the steps that compiled something; None if that was every step."""
        timed = [seconds for seconds, busy in zip(self.seconds, self.busy, strict=True) if not busy]
        return self.losses.shape[0] * len(timed) / sum(timed) if timed else None


class StreamRecorder:
    """Takes one column of tokens after another; `finish` makes a `StreamRun` of it."""

    def __init__(self, model: Any, every: int, mark: Callable[[], CounterMark] = CounterMark.now) -> None:
        self.model = model
        self.every = every
        self.mark = mark
        self.seen = 0
        self.cache: Any = None
        self.start = mark()
        self.after_prompt = self.start
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.busy: list[bool] = []
        self.snapshots: list[HeldSnapshot] = []

    def prompt(self, tokens: Tensor, targets: Tensor) -> None:
        """Feed the first tokens [B, P]; the targets [B, P] are what follows each of them."""
        self._feed(tokens, targets)
        self.after_prompt = self.mark()

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Feed tokens [B, 1]; the targets [B, 1] are what follows, [B, 0] at the end."""
        before, start = counters.activity(), time.perf_counter()
        self._feed(tokens, targets)
        self.seconds.append(time.perf_counter() - start)
        self.busy.append(counters.activity() != before)
        if self.seen % self.every == 0:
            self.snapshots.append(HeldSnapshot(self.seen, held_positions(self.cache)))

    def _feed(self, tokens: Tensor, targets: Tensor) -> None:
        output = self.model(input_ids=tokens, use_cache=True, **cache_names.arguments(self.model, self.cache))
        self.cache = cache_names.returned(output)
        self.seen += tokens.shape[1]
        self.losses.append(negative_log_likelihood(output.logits[:, : targets.shape[1]], targets).cpu())

    def finish(self) -> StreamRun:
        report, end = kvpass.inspect(self.cache), self.mark()
        return StreamRun(
            losses=torch.cat(self.losses, 1),
            seconds=self.seconds,
            busy=self.busy,
            snapshots=self.snapshots,
            cache_bytes=report.nbytes,
            full_bytes=report.full_nbytes,
            decode_graphs=end.graphs - self.after_prompt.graphs,
            graph_breaks=end.graph_breaks - self.start.graph_breaks,
        )


def run(
    model: Any,
    tokens: Tensor,
    *,
    every: int,
    tick: Callable[[], object],
    prompt: int = PROMPT,
    mark: Callable[[], CounterMark] = CounterMark.now,
) -> StreamRun:
    """Stream tokens [B, T] from an empty cache through a compiled causal model, one by one after the prompt.

    Args:
        every: take a snapshot of the held positions after this many tokens.
        tick: called after every step.
        prompt: how many tokens are fed at once to begin with; at least 2.
        mark: counts graphs and breaks.
    """
    recorder, following = StreamRecorder(model, every, mark), tokens[:, 1:]
    recorder.prompt(tokens[:, :prompt], following[:, :prompt])
    for place in range(prompt, tokens.shape[1]):
        one = slice(place, place + 1)
        recorder.step(tokens[:, one], following[:, one])
        tick()
    return recorder.finish()


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """float32 [B, n] in nats, from logits [B, n, V] and targets [B, n]."""
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")


def held_positions(cache: Any) -> list[int]:
    """What layer 0, head 0 of row 0 holds, ascending."""
    positions: list[int] = kvpass.inspect(cache).layers[0].positions[0, 0].tolist()
    return sorted(position for position in positions if position >= 0)


def perplexity(losses: Tensor) -> float:
    """exp of the mean of losses in nats, of any shape."""
    return math.exp(losses.double().mean().item())


def running_perplexity(losses: Tensor, window: int) -> Tensor:
    """Perplexity over a window that slides along the stream, all rows together.

    Args:
        losses: [B, N] in nats.
        window: tokens per row; a shorter stream makes one window.

    Returns:
        float64 [N - window + 1]; entry i covers the tokens i .. i + window - 1.
    """
    along = losses.double().mean(0)
    return along.unfold(0, min(window, len(along)), 1).mean(-1).exp()
