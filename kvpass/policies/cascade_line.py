"""The sub-caches of `cascade` as one line of tokens by age: who makes room for a token, and the line after that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

BASES = {"pow2": 2, "pow3": 3, "pow4": 4}
NOBODY = -2
LOST = -1.0  # the score of a token that was dropped; scores are never negative


def intervals(cascades: int, growth: str) -> list[int]:
    """f_i: how often each sub-cache accepts."""
    return [i + 1 if growth == "linear" else BASES[growth] ** i for i in range(cascades)]


def approximate_context(slots: int, cascades: int = 4, growth: str = "pow2") -> int:
    """How far back `slots` slots, sinks not counted, reach: (|C| / N) * sum of f_i.

    >>> approximate_context(2048, 4), approximate_context(2048, 8)
    (7680, 65280)
    """
    return slots * sum(intervals(cascades, growth)) // cascades


@dataclasses.dataclass(frozen=True)
class CascadeRule:
    """Who makes room.

    Attributes:
        size: |C|, the slots of all sub-caches; a number, but for `border` and `leaving` it may be that of each row.
        accepts: f_i for each sub-cache.
        eager: all accept as long as no more than |C| tokens came before.
        select: of two that compete the higher score stays; else the one that was there.
    """

    size: int | Tensor
    accepts: list[int]
    eager: bool
    select: bool = True

    def border(self, number: Tensor, held: Tensor) -> Tensor:
        """The rank b W from the newest at which token `number` stops pushing; `held` if every sub-cache accepts.

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

    def leaving(self, number: Tensor, held: Tensor, score_at: Callable[[Tensor], Tensor]) -> Tensor:
        """The rank from the newest of the token that makes room for token `number`, or NOBODY."""
        rank = self.border(number, held)
        arriving = rank - 1
        loser = torch.where(score_at(arriving) >= score_at(rank), rank, arriving) if self.select else arriving
        return torch.where(rank < held, loser, torch.where(held < self.size, NOBODY, held - 1))

    def insert(self, line: list[int], token: int, number: int, score: Sequence[float]) -> None:
        """Put one more token into a line, unless its number is negative.

        Args:
            line: tokens by age, the newest first; changed in place.
            score: of every token.
        """
        if number < 0:
            return
        rank, held = self._border(number, len(line)), len(line)
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

    def _border(self, number: int, held: int) -> int:
        """`border` of numbers."""
        if self.eager and number <= self.size:
            return held
        for i, accepts in enumerate(self.accepts):
            start = i * self.slots // len(self.accepts)
            if i and number % accepts and start < held:
                return start
        return held

    def replay(self, blocks: Iterable[Tensor], number: Tensor, early: bool) -> Tensor:
        """The scores [B, H', N] after a prompt whose tokens were inserted one after the other, or LOST.

        Each token's place depends on where the one before it went, which a host follows a hundred times as fast as
        operations on tensors do.

        Args:
            blocks: the scores after each token, [B, H', n, s], of all tokens up to the last of the block at least.
            number: int64 [B, q], negative for sinks and padding.
            early: a token is inserted before its own query has changed the scores.
        """
        numbers, lines, last, token = number.tolist(), list[list[list[int]]](), torch.empty(0), 0
        for after in blocks:
            if token == 0:
                lines = [[[] for _ in range(after.shape[1])] for _ in numbers]
                last = torch.zeros_like(after[:, :, 0])
            before, here = last.cpu().numpy(), after.cpu().numpy()
            for row, counted in enumerate(numbers):
                for line, first, scores in zip(lines[row], before[row], here[row], strict=True):
                    seen = [first, *scores[:-1]] if early else scores
                    for n in range(len(scores)):
                        self.insert(line, token + n, counted[token + n], seen[n])
            last, token = after[:, :, -1], token + after.shape[2]
        return survivors(self._as_tensor(lines, last), last)

    def extend(self, number: Tensor, held: int, score: Tensor) -> Tensor:
        """The scores [B, H', N] after the tokens from place `held` on were inserted one after the other, or LOST.

        Args:
            number: int64 [B, H', N], negative for sinks and for places that hold no token.
        """
        by_age = torch.where(number < 0, -1, number)[..., :held].sort(dim=-1, descending=True)
        ordered = torch.where(by_age.values < 0, -1, by_age.indices)[..., : self.slots].tolist()
        lines = [[[token for token in line if token >= 0] for line in row] for row in ordered]
        scores, numbers = score.cpu().numpy(), number.tolist()
        for row, found in enumerate(lines):
            for head, line in enumerate(found):
                for token in range(held, number.shape[-1]):
                    self.insert(line, token, numbers[row][head][token], scores[row, head])
        return survivors(self._as_tensor(lines, score), score)

    def _as_tensor(self, lines: list[list[list[int]]], like: Tensor) -> Tensor:
        """Lines as int64 [B, H', |C|], -1 after the last token."""
        filled = [[[*line, *[-1] * (self.slots - len(line))] for line in row] for row in lines]
        return torch.tensor(filled, device=like.device)


def averaged(blocks: Iterable[Tensor], valid: Tensor, decay: float) -> Iterator[Tensor]:
    """The moving average mu <- decay mu + (1 - decay) s after each query; padding changes nothing.

    Args:
        blocks: s for consecutive queries, [B, H', n, N], of no fewer keys than those before; others are paid nothing.
        valid: bool [B, q].
    """
    start, score = 0, None
    for probs in blocks:
        arrived = valid[:, start : start + probs.shape[2]]
        start, count = start + probs.shape[2], arrived.cumsum(-1)
        passed = (count[:, :, None] - count[:, None]).clamp(min=0)  # [B, n, n], real queries in between
        weight = ((1 - decay) * decay**passed * arrived[:, None]).tril()
        after = weight[:, None] @ probs
        if score is not None:
            after[..., : score.shape[-1]].addcmul_(decay ** count[:, None, :, None], score[..., None, :])
        score = after[:, :, -1]
        yield after


def survivors(line: Tensor, score: Tensor) -> Tensor:
    """The scores [B, H', N] of the tokens in the line, LOST for the others."""
    kept = torch.nn.functional.pad(torch.full_like(score, LOST), (0, 1))
    index = torch.where(line < 0, score.shape[-1], line)  # a place of its own for what is not there
    return kept.scatter(-1, index, score.gather(-1, line.clamp(min=0)))[..., :-1]
