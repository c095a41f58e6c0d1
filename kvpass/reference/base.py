"""Define the base class of references, which add and evict tokens in lists, as the papers do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor


@dataclasses.dataclass(eq=False)
class Token:
    """One cached token.

    Attributes:
        position: its index among the real tokens of its row.
        index: its index in the padded sequence.
        key, value: [h, D] and [h, Dv]; h = Hkv if the heads keep the same tokens, else 1.
        pinned: whether the token is never evicted, because a caller pinned it or as a part of a prompt under
            `Policy.keep_prompt`.
        score: the policy's score.
        notes: other state of the policy, by name.
    """

    position: int
    index: int
    key: Tensor
    value: Tensor
    pinned: bool = False
    score: float = 0.0
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class HeadStream:
    """The cached tokens of one row and KV head.

    Heads of a row that keep the same tokens share a stream.

    Attributes:
        head: the KV head, 0 if the heads share their tokens.
        budget: tokens to keep between steps.
        interval: tokens that are evicted together when the budget is exceeded.
        seen: real tokens seen, including the tokens of the current call.
        step: the current call adds a single token to a cache, not a prompt or chunk.
        layer: the index of the layer, for policies that need it.
        stored: returns a key [h, D], or with `key=False` a value, as attention reads it back from storage.
        notes: state of the policy for the stream, by name.
        evicted: tokens just evicted, for `Reference.settle`.
        output_projection: the weights of the head's output projection, [G, Dv, E]; None if the output is not projected.
        spans: positions at which spans of the text begin that share the budget, see `kvpass.policies.fair_spans`.
    """

    head: int
    budget: int
    tokens: list[Token] = dataclasses.field(default_factory=list)
    seen: int = 0
    step: bool = False
    layer: int = 0
    stored: Callable[..., Tensor] = lambda row, key=True: row
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    evicted: list[Token] = dataclasses.field(default_factory=list)
    interval: int = 1
    output_projection: Tensor | None = None
    spans: tuple[int, ...] = ()

    @property
    def kept(self) -> int:
        """The tokens that stay when the budget is exceeded."""
        return self.budget - (self.interval - 1)


def in_order(tokens: Iterable[Token]) -> list[Token]:
    """Return tokens sorted by position."""
    return sorted(tokens, key=lambda token: token.position)


def split_at(tokens: list[Token], position: int) -> tuple[list[Token], list[Token]]:
    """Return the tokens before a position, and the tokens from there."""
    return [t for t in tokens if t.position < position], [t for t in tokens if t.position >= position]


def highest_scored(tokens: list[Token], count: int, score: Callable[[Token], float]) -> list[Token]:
    """Return the `count` tokens of highest score, sorted by position; of equal scores the earlier tokens."""
    return in_order(sorted(tokens, key=lambda token: (-score(token), token.position))[:count])


def neighbours(values: Sequence[float], kernel: int) -> list[Sequence[float]]:
    """Return for each value the values around it, `kernel` values except at either end."""
    return [values[max(0, n - kernel // 2) : n + kernel // 2 + 1] for n in range(len(values))]


def share_of(count: int, share: float) -> int:
    """Return a share of a count, rounded down; 0.29 of 100 is 29, although the float is a little less."""
    return math.floor(Fraction(str(share)) * count)


class Reference:
    """The reference of a policy; one object serves all streams of a layer."""

    def __init__(self, policy: Any = None) -> None:
        """Make the reference of a policy, whose options it reads; None without options."""
        self.policy = policy

    def prepare(self, stream: HeadStream) -> None:
        """Evict tokens before a single new token attends; by default none."""

    def bias(self, stream: HeadStream, group: int) -> Tensor | None:
        """Return the bias that later queries add to their logits, [h, G = group, tokens], or None."""
        return None

    def read(self, stream: HeadStream) -> list[tuple[Tensor, Tensor]]:
        """Return the key and value of each cached token as attention sees them; by default as stored."""
        return [(token.key, token.value) for token in stream.tokens]

    def logit_scale(self, count: int) -> float:
        """Return the factor on the logits of queries that attend to `count` tokens."""
        return 1.0

    def observe(self, tokens: list[Token], probabilities: Tensor) -> None:
        """Update scores from new probabilities, float32 [queries, heads, tokens], without padding queries."""

    def rescore(self, tokens: list[Token], stream: HeadStream) -> None:
        """Give each token the value that `evict` compares, if probabilities are not enough, before any is evicted."""

    def evict(self, tokens: list[Token], head: int, seen: int, budget: int) -> list[Token]:
        """Return the tokens to keep in a stream that has more than its budget.

        Args:
            head: the KV head, 0 if the heads share their tokens.
            seen: real tokens seen so far.
        """
        raise NotImplementedError

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        """Add new tokens to a stream after they have attended, and evict.

        Args:
            probabilities: float32 [queries, heads, cached + new], without padding queries.
            logits: the logits of the probabilities, without the policy's own bias.
        """
        tokens = stream.tokens + new
        self.observe(tokens, probabilities)
        self.rescore(tokens, stream)
        stream.tokens = self.keep_tokens(tokens, stream)

    def keep_tokens(self, tokens: list[Token], stream: HeadStream) -> list[Token]:
        """Return all tokens if the budget is not exceeded; else the pinned ones, and others that `evict` keeps."""
        if len(tokens) <= stream.budget:
            return tokens
        if stream.spans and (stream.interval > 1 or not stream.step):
            return self._kept_of_spans(tokens, stream)
        pinned, others = [t for t in tokens if t.pinned], [t for t in tokens if not t.pinned]
        return in_order([*pinned, *self._kept(others, stream, stream.kept - len(pinned))])

    def _kept(self, tokens: list[Token], stream: HeadStream, count: int) -> list[Token]:
        if len(tokens) <= count:
            return tokens
        return self.evict(tokens, stream.head, stream.seen, count) if count > 0 else []

    def _kept_of_spans(self, tokens: list[Token], stream: HeadStream) -> list[Token]:
        """Return the tokens that stay if each span of the text has a share of the budget by its length."""
        kept, starts = list[Token](), (*stream.spans, stream.seen)
        first, before = 0, 0
        for stop in (min(start, stream.seen) for start in starts):
            share = stream.kept * stop // stream.seen
            span = [token for token in tokens if first <= token.position < stop]
            kept += self._kept(span, stream, share - before)
            first, before = stop, share
        rest = [token for token in tokens if token not in kept]
        return in_order([*kept, *self._kept(rest, stream, stream.kept - len(kept))])

    def settle(self, row: list[HeadStream]) -> None:
        """Finish a call after all KV heads of a row have added their tokens."""


class DividedBudgets(Reference):
    """The reference of a policy that divides a layer's budget among its heads at the end of the first prompt."""

    def head_counts(self, row: list[HeadStream]) -> list[float]:
        """Return a score of each head of a row: higher scores get larger budgets."""
        raise NotImplementedError

    def keep_tokens(self, tokens: list[Token], stream: HeadStream) -> list[Token]:
        return super().keep_tokens(tokens, stream) if "divided" in stream.notes else tokens

    def settle(self, row: list[HeadStream]) -> None:
        if "divided" in row[0].notes:
            return
        counts, budgets = self.head_counts(row), sorted((stream.budget for stream in row), reverse=True)
        by_count = sorted(row, key=lambda stream: (-counts[stream.head], stream.head))
        for stream, budget in zip(by_count, budgets, strict=True):
            stream.budget, stream.notes["divided"] = budget, True
            stream.tokens = self.keep_tokens(stream.tokens, stream)
