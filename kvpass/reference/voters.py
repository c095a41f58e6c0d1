"""Keep the attention of queries until they vote, for references whose policies let the last queries vote."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpass.reference.base import HeadStream, Reference, Token

Ballot = dict[int, list[float]]
"""A number of each query head for each token that a query saw, by the position of the token."""


class VotingReference(Reference):
    def rows(self, probabilities: Tensor, logits: Tensor) -> Tensor:
        """Return the votes of queries, [queries, heads, tokens]."""
        return probabilities

    def take(self, stream: HeadStream, new: list[Token], probabilities: Tensor, logits: Tensor) -> None:
        tokens = stream.tokens + new
        remember(stream, tokens, new, self.rows(probabilities, logits))
        exceeds = len(tokens) > stream.budget
        if exceeds:
            self.rescore(tokens, stream)
        if exceeds or not stream.step:  # the queries have voted, or came in a prompt or chunk
            stream.notes["queries"].clear()
        stream.tokens = self.keep_tokens(tokens, stream)


def remember(stream: HeadStream, tokens: list[Token], new: list[Token], rows: Tensor) -> None:
    """Store the queries of a call, whose rows are [queries, heads, tokens]; a prompt or chunk forgets earlier ones."""
    queries: dict[int, Ballot] = stream.notes.setdefault("queries", {})
    if not stream.step:
        queries.clear()
    for token, row in zip(new, rows, strict=True):
        by_token = zip(tokens, row.T.tolist(), strict=True)
        queries[token.position] = {cached.position: numbers for cached, numbers in by_token}


def shares(numbers: Sequence[float]) -> list[float]:
    """Return numbers divided by their sum; zeros if all are zero, as probabilities of few tokens may be."""
    total = sum(numbers)
    return [number / total if total else 0.0 for number in numbers]


def ballots(stream: HeadStream, window: int) -> list[Ballot]:
    """Return the stored ballots of the last queries: `window`, of single tokens no more than come in an interval.

    They vote among tokens older than the last `window`, and in a chunk among those older than all voters.
    """
    queries: dict[int, Ballot] = stream.notes["queries"]
    count = min(window, stream.interval) if stream.step else window
    chosen = {position: ballot for position, ballot in queries.items() if position >= stream.seen - count}
    first = stream.seen - window if stream.step else min(chosen, default=0)
    return [{position: row for position, row in ballot.items() if position < first} for ballot in chosen.values()]
