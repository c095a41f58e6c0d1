"""What a policy is: pure tensor functions over the metadata of the held tokens.

A policy knows nothing of graphs, kernels or models.  It says what it needs (`statistics`, `heads`), what
it remembers for each token (`state`), how it learns from attention (`observe`) and what each held token
is worth (`worth`).  The token that is worth least goes first; the same function ranks the tokens of a
prompt and names the victim of a decode step, so a policy cannot disagree with itself.

Shapes: B rows, H' = 1 (`heads = "shared"`) or Hkv (`heads = "kv"`), G query heads per KV head, N tokens.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpass.errors import BudgetError, PolicyError

Statistic = Literal["total", "squares", "last", "window"]


@dataclasses.dataclass(frozen=True)
class Attention:
    """What the newest queries paid to each token; a field is None unless the policy asked for it.

    All are float32 [B, Hkv, G, N].  In a decode step there is one query, and the fields coincide.

    Attributes:
        total: probabilities summed over the queries.
        squares: squared probabilities summed over the queries.
        last: the probabilities of the last real query of each row.
        window: probabilities averaged over the last `Policy.window` real queries.
        queries: int64 [B, 1, 1], how many real queries were summed.
    """

    total: Tensor | None = None
    squares: Tensor | None = None
    last: Tensor | None = None
    window: Tensor | None = None
    queries: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens that a policy judges.

    Attributes:
        position: int64 [B, H', N], the token's place among the real tokens of its row; -1 is a free slot.
        seen: int64 [B, 1, 1], real tokens seen so far, the newest included.
        state: what the policy remembers, by name, each [B, H', N].
        budget: tokens to keep between steps.
    """

    position: Tensor
    seen: Tensor
    state: dict[str, Tensor]
    budget: int

    @property
    def live(self) -> Tensor:
        """bool [B, H', N]: holds a token."""
        return self.position >= 0

    def newest(self, count: int) -> Tensor:
        """bool [B, H', N]: among the last `count` real tokens seen."""
        return self.position >= self.seen - count


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of every policy: a frozen dataclass whose fields are its options.

    Class attributes:
        name: what `kvpass.backend(policy=...)` calls it.
        heads: "shared" when all KV heads of a layer keep the same tokens, "kv" when each chooses its own.
        positions: the default of `positions=`; "cache" numbers the held tokens 0..n-1 at read.
        statistics: the fields of `Attention` that `observe` reads.
        window: how many queries `Attention.window` averages over.
        evicts: False for a policy that never lets go of a token.
    """

    name: ClassVar[str]
    heads: ClassVar[Literal["shared", "kv"]] = "shared"
    positions: ClassVar[Literal["absolute", "cache"]] = "absolute"
    statistics: ClassVar[frozenset[Statistic]] = frozenset()
    window: ClassVar[int] = 1
    evicts: ClassVar[bool] = True

    def minimum_budget(self) -> int:
        """The smallest budget that makes sense."""
        return 1

    def check_budget(self, budget: int) -> None:
        """Raise BudgetError when the policy cannot work with `budget` slots."""
        least = self.minimum_budget()
        if budget < least:
            raise BudgetError(f"budget={budget} is too small for {self.name!r} with {self}: it needs at least {least}")

    def state(self) -> dict[str, torch.dtype]:
        """Names and dtypes of what is remembered for each token; a new token starts at zero."""
        return {}

    def observe(self, tokens: Tokens, attention: Attention) -> dict[str, Tensor]:
        """The state after the newest queries have attended; by default it does not change."""
        return tokens.state

    def worth(self, tokens: Tokens) -> Tensor:
        """[B, H', N] int64 or float32: the token worth least is evicted first; of two equals the later one.

        What it says about free slots does not matter.
        """
        raise NotImplementedError


def require(condition: bool, option: str, value: object, why: str) -> None:
    """Raise a PolicyError that names the option unless `condition` holds."""
    if not condition:
        raise PolicyError(f"{option}={value!r}: {why}")
