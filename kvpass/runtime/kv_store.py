"""Storage of cached tokens, as the runtime sees it: slots, or the lists of the eager reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvpass.cache.history import Restorable
from kvpass.cache.slots import Chunk, Layout
from kvpass.cache.statistics import StatisticsSpec
from kvpass.capture.sites import AttentionSite
from kvpass.policies.budgets import Plan
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Clock
from kvpass.rewrite.context import Pass


class TakenIn(Protocol):
    """A chunk that a store has admitted.

    Attributes:
        chunk: the rows of the chunk.
    """

    @property
    def chunk(self) -> Chunk: ...

    def first(self, count: int) -> TakenIn:
        """Return the first `count` tokens of the chunk."""
        ...

    def take_into(self, cache: Any) -> None:
        """Admit the chunk again to a cache in the state from before the chunk."""
        ...


class KVStore(Protocol):
    """Storage of cached tokens; equal stores belong to backends that can continue each other's caches.

    Attributes:
        asks: whether a prompt graph returns its queries, keys and masks even if the policy needs no statistics.
        whole: whether a step's masks read per-token inputs at full length, with an entry for every token; see
            `StepGraph`.
        validates: whether a rewritten step can be run on random slots, beside the slots of the model.
        spreads: whether the heads of a layer may be sharded over processes.
        passes: the passes over a step graph.
    """

    @property
    def asks(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def validates(self) -> bool: ...
    @property
    def spreads(self) -> bool: ...
    @property
    def passes(self) -> Sequence[Pass]: ...

    def admitted(
        self, layout: Layout, chunk: Chunk, spec: StatisticsSpec | None, site: AttentionSite, plan: Plan
    ) -> tuple[Any, tuple[int, ...], tuple[Clock, ...]]:
        """Return the storage of a prompt's tokens (`LayerCache.slots`), and the host's `limits` and `clocks`."""
        ...

    def make_room(self, cache: Any, pins: Pins) -> None:
        """Prepare a cache for a call that pins some of its new tokens.

        Raises:
            BudgetError: the pinned tokens leave less of the budget than the policy needs.
        """
        ...

    def pin(self, cache: Any, pins: Pins) -> None:
        """Pin the token of a decode step that is about to run."""
        ...

    def prepare(self, cache: Any, valid: Callable[[], Tensor]) -> None:
        """Prepare a cache for a step; `valid` returns bool [B, q], False for padding among the new tokens."""
        ...

    def kept(self, cache: Any, chunk: bool) -> Restorable:
        """Return the record that restores the cache after a step, or after a chunk, that is about to run."""
        ...

    def take_in(self, cache: Any, site: AttentionSite, results: list[Tensor]) -> TakenIn | None:
        """Admit the new tokens that a step graph returned (`StepRewrite.chunks`).

        Returns:
            The admitted chunk, or None for a single token on slots, which the graph itself has written.
        """
        ...
