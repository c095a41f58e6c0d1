"""Layers that hold their tokens in slots: a `Holding`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from kvpass.capture.sites import AttentionSite
from kvpass.layer.slots import Chunk, Layout, Slots, admit
from kvpass.layer.statistics import Asked
from kvpass.layer.undo import Kept, Untouched
from kvpass.policies.base import Clock, Plan
from kvpass.rewrite.context import Pass
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.runtime import history
from kvpass.runtime.caches import keep_address, valid_counts
from kvpass.runtime.cropping import take_results
from kvpass.runtime.handle import LayerCache
from kvpass.runtime.holding import Taken


@dataclasses.dataclass(frozen=True)
class OnSlots:
    """Slots that a step writes in place, and that a prompt or chunk is admitted to."""

    asks = False
    whole = False
    validates = True
    spreads = True

    @property
    def passes(self) -> Sequence[Pass]:
        return STEP_PASSES

    def admitted(
        self, layout: Layout, chunk: Chunk, asked: Asked | None, site: AttentionSite, plan: Plan
    ) -> tuple[Slots, tuple[int, ...], tuple[Clock, ...]]:
        limits = plan.limits(layout.batch)
        slots = admit(layout, None, chunk, limits)
        keep_address(slots)
        counts = valid_counts(layout.policy, chunk.valid)
        return slots, limits, tuple(layout.policy.clock((), *row) for row in zip(counts, limits, strict=False))

    def prepare(self, cache: LayerCache, valid: Callable[[], Tensor]) -> None:
        """Nothing: the graph makes room."""

    def kept(self, cache: LayerCache, chunk: bool) -> history.Kept:
        return Untouched(cache.slots) if chunk else Kept.before_step(cache.layout, cache.slots)

    def take_in(self, cache: LayerCache, site: AttentionSite, results: list[Tensor]) -> Taken | None:
        return take_results(cache, site, results) if results else None
