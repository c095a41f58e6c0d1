"""Storage of cached tokens in the lists of the eager reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvpass.cache.history import UnchangedSlots
from kvpass.cache.slots import Chunk, Layout
from kvpass.cache.statistics import StatisticsSpec
from kvpass.capture.canonical import AttentionSite, SiteFacts
from kvpass.policies.budgets import Plan
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Clock
from kvpass.reference.base import ReferenceLayer, TakenByReference
from kvpass.rewrite.context import Pass
from kvpass.rewrite.on_reference import REFERENCE_PASSES, take_prompt
from kvpass.runtime.kv_store import KVStore


@dataclasses.dataclass(frozen=True)
class ReferenceStore(KVStore):
    """Storage in a `ReferenceLayer` per cache, whose calls in a step graph admit and count tokens themselves."""

    is_reference = True

    @property
    def passes(self) -> Sequence[Pass]:
        return REFERENCE_PASSES

    def admitted(
        self, layout: Layout, chunk: Chunk, spec: StatisticsSpec | None, site: SiteFacts, plan: Plan
    ) -> tuple[ReferenceLayer, tuple[int, ...], tuple[Clock, ...]]:
        assert spec is not None  # `is_reference`
        return take_prompt(layout, chunk, spec, site, plan.budgets_of_rows(layout.batch)), (), ()

    def make_room(self, cache: Any, pins: Pins) -> None:
        cache.slots.expect(pins)

    def pin(self, cache: Any, pins: Pins) -> None:
        """Do nothing, as a step takes its token in with its pin."""

    def prepare(self, cache: Any, valid: Callable[[], Tensor]) -> None:
        cache.slots.prepare(valid())

    def kept(self, cache: Any, chunk: bool) -> UnchangedSlots:
        return UnchangedSlots(cache.slots.copied())

    def take_in(self, cache: Any, site: AttentionSite, results: list[Tensor]) -> TakenByReference:
        taken: TakenByReference = cache.slots.taken
        return taken
