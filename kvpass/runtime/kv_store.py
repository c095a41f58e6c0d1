"""What the tokens of layers are held in, as the runtime sees it: slots, or the lists of the eager reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvpass.cache.history import Restorable
from kvpass.cache.slots import Chunk, Layout
from kvpass.cache.statistics import StatisticsSpec
from kvpass.capture.sites import AttentionSite
from kvpass.policies.base import Clock, Plan
from kvpass.rewrite.context import Pass


class TakenIn(Protocol):
    """A chunk that was taken in.

    Attributes:
        chunk: its rows.
    """

    @property
    def chunk(self) -> Chunk: ...

    def first(self, count: int) -> TakenIn:
        """Its first tokens."""
        ...

    def take_into(self, cache: Any) -> None:
        """Take it in once more, on a cache as it was before it."""
        ...


class KVStore(Protocol):
    """How layers hold their tokens; equal for backends of which one can go on with what another held.

    Attributes:
        asks: a prompt is to give its queries, keys and masks, whatever the policy asks for.
        whole: a step's masks look up entries in tensors that have one for every token, see `StepGraph`.
        validates: what a step was rewritten to can be run on slots drawn at random, beside the model's own.
        spreads: a layer's heads may be spread over processes.
        passes: those over a step graph.
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
        """What holds a prompt's tokens (`LayerCache.slots`), and `limits` and `clocks`, by which the host counts."""
        ...

    def prepare(self, cache: Any, valid: Callable[[], Tensor]) -> None:
        """A step is about to run; `valid` gives bool [B, q], which of its tokens are not padding."""
        ...

    def kept(self, cache: Any, chunk: bool) -> Restorable:
        """What undoes a step, or a chunk, that is about to run."""
        ...

    def take_in(self, cache: Any, site: AttentionSite, results: list[Tensor]) -> TakenIn | None:
        """Take in what a step's graph gave of new tokens (`StepRewrite.chunks`): nothing of a single one on slots."""
        ...
