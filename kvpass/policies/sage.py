"""SAGE-KV ("LLMs Know What to Drop: Self-Attention Guided KV Cache Eviction"; the paper's sections 3.1-3.3).
https://arxiv.org/abs/2503.08879

Once, at the end of the prompt of N tokens: sinks [0, S), candidates E = [S, N - 1 - R), recent tokens and
the last one.  Every QUERY head takes the k candidates to which the last token's logits are highest; a KV
head holds what its G query heads took.  A budget of B is split S = B/4, k = B/(2G), R = the rest.  From
then on the recent tokens are a ring: the oldest of those that nobody took makes room for each new token,
and nothing is scored.  N <= B + 1: nothing is selected, the first S + G k tokens stay.  What two heads
both took needs one slot; the slots that this saves go to recent tokens.

A chunk is a prompt: the selection is made again by its last token, among the held tokens and the chunk.
`refresh_interval=n` (the paper's future work) makes it again every n tokens; since only held tokens can
be taken, the candidates then reach up to those that would leave the ring before the next time.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpass.policies.base import Attention, Clock, Policy, State, Statistic, Tokens, highest, require

HIDDEN = torch.finfo(torch.float32).min
MOST_GROUPS = 62


def budget_split(budget: int, groups: int) -> tuple[int, int, int]:
    """Sinks S, tokens per query head k and recent tokens R: S + groups * k + R == budget.

    >>> budget_split(8192, 4)
    (2048, 1024, 2048)
    """
    sinks, top = budget // 4, budget // (2 * groups)
    return sinks, top, budget - sinks - groups * top


@dataclasses.dataclass(frozen=True)
class Sage(Policy):
    """Options.

    share: what a query head sees of what the G heads of its KV head took: "union" all of it, "concat" all
        of it and a token as often as it was taken, "private" only its own.
    refresh_interval: select again every so many tokens; None for never.
    """

    share: Literal["union", "concat", "private"] = "union"
    refresh_interval: int | None = None
    name: ClassVar[str] = "sage"
    spreads: ClassVar[Literal["never", "heads", "always"]] = "heads"
    heads: ClassVar[Literal["shared", "kv"]] = "kv"
    statistics: ClassVar[frozenset[Statistic]] = frozenset({"logits"})

    def __post_init__(self) -> None:
        known = ("union", "concat", "private")
        require(self.share in known, "share", self.share, f"must be one of {', '.join(known)}")
        every = self.refresh_interval
        require(every is None or every >= 1, "refresh_interval", every, "must be None or at least 1")

    def state(self) -> dict[str, torch.dtype]:
        return {"takers": torch.int64}  # how many query heads took it ("private": a bit for each); -1: all do

    def row_state(self) -> dict[str, int | float]:
        return {"since": 0}  # tokens since the last selection

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        assert attention.last is not None
        assert attention.queries is not None
        takers = self._unselected(tokens, attention.last.shape[2])
        return {"takers": takers, "since": tokens.state["since"] + attention.queries}

    def _unselected(self, tokens: Tokens, groups: int) -> Tensor:
        """The takers; while all still fits, the first S + G k tokens are taken by all."""
        sinks, top, _ = budget_split(tokens.budget, groups)
        block = (tokens.position < sinks + groups * top) & (tokens.seen <= tokens.budget + 1)
        return torch.where(block & tokens.live, -1, tokens.state["takers"])

    def absorb(self, tokens: Tokens, attention: Attention) -> State:
        assert attention.logits is not None
        assert attention.queries is not None
        groups, step = attention.logits.shape[2], tokens.held == tokens.position.shape[-1]
        since = tokens.state["since"] + attention.queries
        due = attention.queries > 0
        recent = budget_split(tokens.budget, groups)[2]
        if step:
            assert self.refresh_interval is not None
            due, recent = due & (since >= self.refresh_interval), max(recent - self.refresh_interval, 0)
        selects = due & (tokens.seen > tokens.budget + 1)
        takers = torch.where(selects, self._takers(tokens, attention.logits, recent), self._unselected(tokens, groups))
        return {"takers": takers, "since": torch.where(due, 0, since)}

    def _takers(self, tokens: Tokens, logits: Tensor, recent: int) -> Tensor:
        """Who took what, [B, Hkv, N]: every query head its top k."""
        groups = logits.shape[2]
        sinks, top, _ = budget_split(tokens.budget, groups)
        candidate = (tokens.position >= sinks) & (tokens.position < tokens.seen - 1 - recent)
        position = torch.where(candidate, tokens.position, -1)[:, :, None].expand(-1, -1, groups, -1)
        took = highest(logits, position, top)  # [B, Hkv, G, N]
        if self.share != "private":
            return took.sum(2)
        require(groups <= MOST_GROUPS, "share", self.share, f"is for up to {MOST_GROUPS} query heads per KV head")
        return (took.long() << torch.arange(groups, device=logits.device)[:, None]).sum(2)

    def worth(self, tokens: Tokens) -> Tensor:
        """Sinks and what was taken are safe; then the latest."""
        sink = tokens.position < tokens.budget // 4
        return torch.where(sink | (tokens.state["takers"] != 0), torch.iinfo(torch.int64).max, tokens.position)

    def bias(self, tokens: Tokens, groups: int) -> Tensor | None:
        if self.share == "union" or groups == 1:
            return None
        takers = tokens.state["takers"][:, :, None]  # [B, Hkv, 1, C]
        if self.share == "concat":
            return takers.clamp(min=1).float().log()
        took = (takers >> torch.arange(groups, device=takers.device)[:, None]) & 1  # [B, Hkv, G, C]
        return torch.where((took == 0) & (takers != 0), HIDDEN, 0.0)

    def clock(self, clock: Clock, new: int, budget: int) -> Clock:
        return (0,)

    def tick(self, clock: Clock, budget: int) -> tuple[bool, Clock]:
        since = clock[0] + 1
        due = self.refresh_interval is not None and since >= self.refresh_interval
        return due, (0 if due else since,)
