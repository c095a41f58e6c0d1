"""Storage of cached tokens in slots: a `KVStore`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from kvpass.cache import history
from kvpass.cache.handle import LayerCache
from kvpass.cache.slots import Chunk, Layout, Slots, admit
from kvpass.cache.snapshot import SlotSnapshot, UnchangedSlots
from kvpass.cache.statistics import StatisticsSpec
from kvpass.capture.sites import AttentionSite
from kvpass.policies.budgets import Plan
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Clock
from kvpass.rewrite.context import Pass
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.runtime.caches import keep_address, valid_counts
from kvpass.runtime.cropping import take_results
from kvpass.runtime.kv_store import TakenIn
from kvpass.runtime.pins import make_room, pin_next


@dataclasses.dataclass(frozen=True)
class SlotStore:
    """Storage in slots: a decode step writes them in place, a prompt or chunk is admitted to them."""

    asks = False
    whole = False
    validates = True
    spreads = True

    @property
    def passes(self) -> Sequence[Pass]:
        return STEP_PASSES

    def admitted(
        self, layout: Layout, chunk: Chunk, spec: StatisticsSpec | None, site: AttentionSite, plan: Plan
    ) -> tuple[Slots, tuple[int, ...], tuple[Clock, ...]]:
        budgets_of_rows = plan.budgets_of_rows(layout.batch)
        slots = admit(layout, None, chunk, budgets_of_rows)
        keep_address(slots)
        budgets_of_rows = chunk.raised(layout.policy, budgets_of_rows)
        counts = valid_counts(layout.policy, chunk.valid)
        return (
            slots,
            budgets_of_rows,
            tuple(layout.policy.clock((), *row) for row in zip(counts, budgets_of_rows, strict=False)),
        )

    def make_room(self, cache: LayerCache, pins: Pins) -> None:
        make_room(cache, pins)

    def pin(self, cache: LayerCache, pins: Pins) -> None:
        pin_next(cache, pins)

    def prepare(self, cache: LayerCache, valid: Callable[[], Tensor]) -> None:
        """Do nothing, as the graph itself frees a slot."""

    def kept(self, cache: LayerCache, chunk: bool) -> history.Restorable:
        return UnchangedSlots(cache.slots) if chunk else SlotSnapshot.before_step(cache.layout, cache.slots)

    def take_in(self, cache: LayerCache, site: AttentionSite, results: list[Tensor]) -> TakenIn | None:
        return take_results(cache, site, results) if results else None
