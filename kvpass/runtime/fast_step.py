"""A step of one token with all looked up that stays from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpass.cache.handle import LayerCache
from kvpass.rewrite.result import StepRewrite
from kvpass.runtime.caches import count
from kvpass.torch_private import inductor


class FastStep:
    """One token a call, on the same slots and by the same code.

    It is what `StepRunner.advance` does of a kind of step that has run, for as long as the slots are the same objects.
    """

    def __init__(self, caches: list[LayerCache], rewrite: StepRewrite, run: inductor.Compiled) -> None:
        """
        Args:
            rewrite: of one token, whose arguments `repeats`; run: what runs it.
        """
        self.caches, self.rewrite, self.run = caches, rewrite, run
        self.slots = [cache.slots for cache in caches]
        self.held = rewrite.held(self.slots)

    def __call__(self, arguments: tuple[Any, ...], clocks: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """What the graph gives.

        Args:
            arguments: Dynamo's, for this token; clocks: of each layer, after it.
        """
        given = self.rewrite.given(arguments, [], self.slots, self.caches[0].seen)
        for cache in self.caches:
            cache.interrupted = True
        results = self.run(*self.held, *given)
        self.rewrite.count(self.slots, results)
        count(self.caches, 1, clocks)
        return results
