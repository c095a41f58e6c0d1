"""Layers that hold their tokens in the eager reference's lists: a `kvpass.runtime.holding.Holding`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvpass.capture.sites import AttentionSite
from kvpass.layer.slots import Chunk, Layout
from kvpass.layer.statistics import Asked
from kvpass.layer.undo import Untouched
from kvpass.policies.base import Clock, Plan
from kvpass.reference.base import ReferenceLayer, Taken
from kvpass.reference.layer import REFERENCE_PASSES, take_prompt
from kvpass.rewrite.context import Pass


@dataclasses.dataclass(frozen=True)
class InLists:
    """A `ReferenceLayer` for each cache; its calls in a step's graph take tokens in by themselves, and count."""

    asks = True
    whole = True
    validates = False
    spreads = False

    @property
    def passes(self) -> Sequence[Pass]:
        return REFERENCE_PASSES

    def admitted(
        self, layout: Layout, chunk: Chunk, asked: Asked | None, site: AttentionSite, plan: Plan
    ) -> tuple[ReferenceLayer, tuple[int, ...], tuple[Clock, ...]]:
        assert asked is not None  # `asks`
        return take_prompt(layout, chunk, asked, site, plan.limits(layout.batch)), (), ()

    def prepare(self, cache: Any, valid: Callable[[], Tensor]) -> None:
        cache.slots.prepare(valid())

    def kept(self, cache: Any, chunk: bool) -> Untouched:
        return Untouched(cache.slots.copied())

    def take_in(self, cache: Any, site: AttentionSite, results: list[Tensor]) -> Taken:
        taken: Taken = cache.slots.taken
        return taken
