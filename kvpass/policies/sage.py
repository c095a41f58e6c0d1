"""Select prompt tokens once, by the last token's logits, and keep a ring of recent tokens.

SAGE-KV ("LLMs Know What to Drop: Self-Attention Guided KV Cache Eviction"; its section 2, sizes by its appendix).
https://arxiv.org/abs/2503.08879

Once, at the end of the prompt of N tokens: sinks [0, S), candidates E = [S, N - 1 - R), recent tokens and the last one.
Every QUERY head selects the k candidates of the last token's highest logits; a KV head keeps the tokens that its G
query heads selected.  A budget of B is split S = B/4, k = B/(2G), R = the rest.  Then the recent tokens become a ring:
each new token evicts the oldest unselected one, and nothing is scored.  If N <= B + 1 nothing is selected, and the
first S + G k tokens stay, unless `select_at="overflow"` lets the first token without a free slot select.  A token that
two heads selected needs one slot; the saved slots go to recent tokens.

A chunk is a prompt: its last token selects again, among the cached tokens and the chunk.  `refresh_interval=n` (the
paper's future work) selects again every n tokens.  Since only cached tokens can be selected, the candidates then extend
to the tokens that would leave the ring before the next selection.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import torch
from torch import Tensor

from kvpass.arguments import Natural, Positive, require
from kvpass.errors import BudgetError
from kvpass.policies.base import Policy
from kvpass.policies.budgets import Count
from kvpass.policies.ranking import INT64_MAX, keep_highest
from kvpass.policies.types import Attention, Clock, State, Tokens

UNSEEN = torch.finfo(torch.float32).min
MAX_GROUPS = 62


def budget_split(budget: int, groups: int, sinks: int | None = None, top: int | None = None) -> tuple[int, int, int]:
    """Split a budget into sinks, tokens per query head, and recent tokens.

    >>> budget_split(8192, 4), budget_split(8192, 7, top=512)
    ((2048, 1024, 2048), (2048, 512, 2560))

    Raises:
        BudgetError: nothing is left for recent tokens.
    """
    sinks = budget // 4 if sinks is None else sinks
    top = budget // (2 * groups) if top is None else top
    recent = budget - sinks - groups * top
    if recent < 1:
        parts = f"sinks={sinks} and top={top} for each of {groups} query heads"
        raise BudgetError(f"budget={budget} is too small for {parts}: it needs at least {budget - recent + 1}")
    return sinks, top, recent


@dataclasses.dataclass(frozen=True)
class Sage(Policy):
    """The SAGE-KV policy.

    Attributes:
        share: which tokens a query head sees of those that its KV head's G heads selected: "union" all, "concat" all
            and a token as often as it was selected, "private" only its own.
        refresh_interval: select again after this number of tokens; None for never.
        sinks, top: S and k; None for the budget's split.  The rest is for recent tokens.
        select_at: "prompt_end", or "overflow": if a prompt fits, the token that finds no free slot selects, once.
    """

    share: Literal["union", "concat", "private"] = "union"
    refresh_interval: Positive | None = None
    sinks: Natural | None = None
    top: Positive | None = None
    select_at: Literal["prompt_end", "overflow"] = "prompt_end"
    name = "sage"
    interval_refusal = "it selects on its own schedule, `refresh_interval`"
    keep_prompt_refusal = "it selects among the tokens of a prompt; later tokens are kept as by policy='window'"
    shardable = "heads"
    heads = "kv"
    statistics = frozenset({"logits"})

    def minimum_budget(self) -> int:
        """Return the least budget for one query head per KV head, as only a model has the number."""
        selected = (self._sinks(budget) + (self.top or budget // 2) for budget in itertools.count(1))
        return next(budget for budget, count in enumerate(selected, start=1) if count < budget)

    def _sinks(self, budget: Count) -> Count:
        return budget // 4 if self.sinks is None else self.sinks  # type: ignore[return-value]

    def _split(self, budget: int | Tensor, groups: int) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
        """Return `budget_split`; the budgets of rows were checked by it when their prompts ended."""
        if not isinstance(budget, Tensor):
            return budget_split(budget, groups, self.sinks, self.top)
        sinks, top = self._sinks(budget), budget // (2 * groups) if self.top is None else self.top
        return sinks, top, budget - sinks - groups * top

    def _max_unselected(self, budget: Count) -> Count:
        """Return the length of the longest prompt from which nothing is selected at its end."""
        return budget if self.select_at == "overflow" else budget + 1  # type: ignore[return-value]

    def state(self) -> dict[str, torch.dtype]:
        return {"takers": torch.int64}  # how many query heads selected it ("private": a bit for each); -1 for all

    def row_state(self) -> dict[str, int | float]:
        return {"since": 0}  # tokens since the last selection

    def observe(self, tokens: Tokens, attention: Attention) -> State:
        takers = self._heads_without_selection(tokens, attention.last.shape[2])
        return {"takers": takers, "since": tokens.state["since"] + attention.queries}

    def _heads_without_selection(self, tokens: Tokens, groups: int) -> Tensor:
        """Return the takers without a selection; while all tokens fit, all heads take the first S + G k tokens."""
        sinks, top, _ = self._split(tokens.budget, groups)
        first_tokens = (tokens.position < sinks + groups * top) & (tokens.seen <= self._max_unselected(tokens.budget))
        return torch.where(first_tokens & tokens.live, -1, tokens.state["takers"])

    def observe_chunk(self, tokens: Tokens, attention: Attention) -> State:
        groups, is_step = attention.logits.shape[2], tokens.cached_columns == tokens.position.shape[-1]
        since = tokens.state["since"] + attention.queries
        if not is_step and isinstance(tokens.budget, Tensor):
            for budget in set(tokens.budget.flatten().tolist()):
                budget_split(budget, groups, self.sinks, self.top)  # may raise an error, as does `_split` for a number
        due, size = attention.queries > 0, self._split(tokens.budget, groups)[2]
        recent = size.expand_as(since) if isinstance(size, Tensor) else torch.full_like(since, size)
        if is_step:
            overflows, refreshes = self._selection_due(tokens, since)
            due = due & (overflows | refreshes)
            # Without the tokens that would leave the ring before the next selection.
            unrefreshed = recent if self.refresh_interval is None else (recent - self.refresh_interval).clamp(min=0)
            recent = torch.where(overflows, recent, unrefreshed)
        selects = due & (tokens.seen > self._max_unselected(tokens.budget))
        takers = torch.where(
            selects,
            self._selecting_heads(tokens, attention.logits, recent),
            self._heads_without_selection(tokens, groups),
        )
        return {"takers": takers, "since": torch.where(due, 0, since)}

    def _selection_due(self, tokens: Tokens, since: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether a step is the first without a free slot, and whether the interval of selections ended."""
        never = torch.zeros_like(since, dtype=torch.bool)  # [B, H', 1]
        overflows = (tokens.seen == tokens.budget + 1) | never if self.select_at == "overflow" else never
        return overflows, never if self.refresh_interval is None else since >= self.refresh_interval

    def _selecting_heads(self, tokens: Tokens, logits: Tensor, recent: Tensor) -> Tensor:
        """Return which heads select each token, [B, Hkv, N]: every query head its top k; recent is [B, Hkv, 1]."""
        groups = logits.shape[2]
        sinks, top, _ = self._split(tokens.budget, groups)
        candidate = (tokens.position >= sinks) & (tokens.position < tokens.seen - 1 - recent)
        position = torch.where(candidate, tokens.position, -1)[:, :, None].expand(-1, -1, groups, -1)
        top = top[:, :, None] if isinstance(top, Tensor) else top
        selected = keep_highest(logits, position, top)  # [B, Hkv, G, N]
        if self.share != "private":
            return selected.sum(2)
        require(groups <= MAX_GROUPS, "share", self.share, f"is for up to {MAX_GROUPS} query heads per KV head")
        return (selected.long() << torch.arange(groups, device=logits.device)[:, None]).sum(2)

    def score(self, tokens: Tokens) -> Tensor:
        """Return scores: sinks and selected tokens stay, then the latest."""
        sink = tokens.position < self._sinks(tokens.budget)
        return torch.where(sink | (tokens.state["takers"] != 0), INT64_MAX, tokens.position)

    def bias(self, tokens: Tokens, groups: int) -> Tensor | None:
        if self.share == "union" or groups == 1:
            return None
        takers = tokens.state["takers"][:, :, None]  # [B, Hkv, 1, C]
        if self.share == "concat":
            return takers.clamp(min=1).float().log()
        selected = (takers >> torch.arange(groups, device=takers.device)[:, None]) & 1  # [B, Hkv, G, C]
        return torch.where((selected == 0) & (takers != 0), UNSEEN, 0.0)

    # The host counts for each row the tokens since the last selection, and the tokens seen.

    def clock(self, clock: Clock, new: int, budget: int) -> Clock:
        return 0, sum(clock[1:]) + new

    def tick(self, clock: Clock, budget: int) -> tuple[bool, Clock]:
        since, seen = clock[0] + 1, clock[1] + 1
        due = self.refresh_interval is not None and since >= self.refresh_interval
        due = due or (self.select_at == "overflow" and seen == budget + 1)
        return due, (0 if due else since, seen)
