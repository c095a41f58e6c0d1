"""Simulate the sub-caches of `cascade` as one line of tokens ordered by age."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

BASES = {"pow2": 2, "pow3": 3, "pow4": 4}
NO_VICTIM = -2
DROPPED = -1.0  # the score of a dropped token; scores are never negative


def intervals(cascades: int, growth: str) -> list[int]:
    """Return f_i: how often each sub-cache accepts a token."""
    return [i + 1 if growth == "linear" else BASES[growth] ** i for i in range(cascades)]


def approximate_context(slots: int, cascades: int = 4, growth: str = "pow2") -> int:
    """Return how far back `slots` slots, sinks not counted, reach: (|C| / N) * sum of f_i.

    >>> approximate_context(2048, 4), approximate_context(2048, 8)
    (7680, 65280)
    """
    return slots * sum(intervals(cascades, growth)) // cascades


@dataclasses.dataclass(frozen=True)
class CascadeRule:
    """Decide which token is evicted for a new one.

    Attributes:
        size: |C|, the slots of all sub-caches: a number, or for `boundary` and `victim_rank` also a tensor with one for
            each row.
        accepts: f_i for each sub-cache.
        eager: whether all sub-caches accept while no more than |C| tokens came before.
        select: whether the higher score stays of two competing tokens; otherwise the older token stays.
    """

    size: int | Tensor
    accepts: list[int]
    eager: bool
    select: bool = True

    def boundary(self, number: Tensor, held: Tensor) -> Tensor:
        """Return the rank b W at which token `number` stops pushing; `held` if every sub-cache accepts.

        Args:
            number: int64, counted from the first token that is no sink.
            held: int64, tokens in the line.
        """
        rank = held
        for i in reversed(range(1, len(self.accepts))):
            start = i * self.size // len(self.accepts)
            refuses = (number % self.accepts[i] != 0) & (start < held)
            rank = torch.where(refuses & (number > self.size) if self.eager else refuses, start, rank)
        return rank

    def victim_rank(self, number: Tensor, held: Tensor, score_at: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rank, from the newest, of the token that is evicted for token `number`, or NO_VICTIM."""
        rank = self.boundary(number, held)
        newer = rank - 1
        loser = torch.where(score_at(newer) >= score_at(rank), rank, newer) if self.select else newer
        return torch.where(rank < held, loser, torch.where(held < self.size, NO_VICTIM, held - 1))

    def insert(self, line: list[int], token: int, number: int, score: Sequence[float]) -> None:
        """Insert a token into a line, unless its number is negative.

        Args:
            line: tokens by age, the newest first; modified in place.
            score: of every token.
        """
        if number < 0:
            return
        rank, held = self._boundary(number, len(line)), len(line)
        if rank < held:
            keeps_old = self.select and score[line[rank - 1]] >= score[line[rank]]
            del line[rank if keeps_old else rank - 1]
        elif held == self.size:
            line.pop()
        line.insert(0, token)

    @property
    def slots(self) -> int:
        """`size` as a number."""
        assert not isinstance(self.size, Tensor)
        return self.size

    def _boundary(self, number: int, held: int) -> int:
        """Return `boundary` for numbers."""
        if self.eager and number <= self.size:
            return held
        for i, accepts in enumerate(self.accepts):
            start = i * self.slots // len(self.accepts)
            if i and number % accepts and start < held:
                return start
        return held

    def insert_prompt(self, blocks: Iterable[Tensor], number: Tensor, early: bool) -> Tensor:
        """Return the scores [B, H', N] after a prompt whose tokens were inserted one by one; DROPPED for dropped ones.

        Each token's slot depends on that of the previous token.  The host computes this a hundred times as fast as
        operations on tensors.

        Args:
            blocks: the scores after each token, [B, H', n, s], of at least all tokens up to the last of the block.
            number: int64 [B, q], negative for sinks and padding.
            early: whether a token is inserted before its own query has changed the scores.
        """
        numbers, lines, last, token = number.tolist(), list[list[list[int]]](), torch.empty(0), 0
        for scores in blocks:
            if token == 0:
                lines = [[[] for _ in range(scores.shape[1])] for _ in numbers]
                last = torch.zeros_like(scores[:, :, 0])
            previous, rows_of_scores = last.cpu().numpy(), scores.cpu().numpy()
            for row, row_numbers in enumerate(numbers):
                for line, first, head_scores in zip(lines[row], previous[row], rows_of_scores[row], strict=True):
                    visible_scores = [first, *head_scores[:-1]] if early else head_scores
                    for n in range(len(head_scores)):
                        self.insert(line, token + n, row_numbers[token + n], visible_scores[n])
            last, token = scores[:, :, -1], token + scores.shape[2]
        return survivors(self._as_tensor(lines, last), last)

    def insert_chunk(self, number: Tensor, held: int, score: Tensor) -> Tensor:
        """Return the scores [B, H', N] after inserting tokens `held` and later one by one; DROPPED for dropped ones.

        Args:
            number: int64 [B, H', N], negative for sinks and free slots.
        """
        by_age = torch.where(number < 0, -1, number)[..., :held].sort(dim=-1, descending=True)
        ordered = torch.where(by_age.values < 0, -1, by_age.indices)[..., : self.slots].tolist()
        lines = [[[token for token in line if token >= 0] for line in row] for row in ordered]
        scores, numbers = score.cpu().numpy(), number.tolist()
        for row, row_lines in enumerate(lines):
            for head, line in enumerate(row_lines):
                for token in range(held, number.shape[-1]):
                    self.insert(line, token, numbers[row][head][token], scores[row, head])
        return survivors(self._as_tensor(lines, score), score)

    def _as_tensor(self, lines: list[list[list[int]]], like: Tensor) -> Tensor:
        """Return lines as int64 [B, H', |C|], -1 after the last token."""
        filled = [[[*line, *[-1] * (self.slots - len(line))] for line in row] for row in lines]
        return torch.tensor(filled, device=like.device)


def moving_averages(blocks: Iterable[Tensor], valid: Tensor, decay: float) -> Iterator[Tensor]:
    """Yield the moving average mu <- decay mu + (1 - decay) s after each query; padding changes nothing.

    Args:
        blocks: s for consecutive queries, [B, H', n, N], where N never decreases; s is zero for later keys.
        valid: bool [B, q].
    """
    start, score = 0, None
    for probs in blocks:
        real = valid[:, start : start + probs.shape[2]]
        start, count = start + probs.shape[2], real.cumsum(-1)
        distance = (count[:, :, None] - count[:, None]).clamp(min=0)  # [B, n, n], real queries in between
        weight = ((1 - decay) * decay**distance * real[:, None]).tril()
        averages = weight[:, None] @ probs
        if score is not None:
            averages[..., : score.shape[-1]].addcmul_(decay ** count[:, None, :, None], score[..., None, :])
        score = averages[:, :, -1]
        yield averages


def survivors(line: Tensor, score: Tensor) -> Tensor:
    """Return the scores [B, H', N] of the tokens in the line, DROPPED for the others."""
    kept = torch.nn.functional.pad(torch.full_like(score, DROPPED), (0, 1))
    index = torch.where(line < 0, score.shape[-1], line)  # free entries write to an extra column
    return kept.scatter(-1, index, score.gather(-1, line.clamp(min=0)))[..., :-1]
