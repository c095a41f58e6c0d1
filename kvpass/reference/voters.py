"""Keep the attention of queries until they vote, for references whose policies let the last queries vote."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvpass.reference.base import HeadStream, Token


@dataclasses.dataclass(frozen=True)
class Query:
    """One query: its position, and a number of each query head for each token that it saw."""

    position: int
    seen: dict[int, list[float]]


def remember(stream: HeadStream, tokens: list[Token], new: list[Token], rows: Tensor) -> None:
    """Store the queries of a call, whose rows are [queries, heads, tokens]; a prompt or chunk forgets earlier ones."""
    queries: list[Query] = stream.notes.setdefault("queries", [])
    if not stream.step:
        queries.clear()
    for token, row in zip(new, rows, strict=True):
        by_token = zip(tokens, row.T.tolist(), strict=True)
        queries.append(Query(token.position, {held.position: numbers for held, numbers in by_token}))


def voters(stream: HeadStream, window: int) -> list[Query]:
    """Return the stored queries that vote: the last `window`, of single tokens no more than come in an interval."""
    count = min(window, stream.interval) if stream.step else window
    return [query for query in stream.notes["queries"] if query.position >= stream.seen - count]


def forget(stream: HeadStream, compacted: bool) -> None:
    """Forget queries that have voted, or that came in a prompt or chunk."""
    if compacted or not stream.step:
        stream.notes["queries"].clear()


def eligible(query: Query, stream: HeadStream, window: int, chosen: list[Query]) -> list[int]:
    """Return the positions that a query votes among: tokens older than the last `window`, and in a chunk than it."""
    first = stream.seen - window if stream.step else min(voter.position for voter in chosen)
    return [position for position in query.seen if position < first]
