"""Decode steps of one token whose constant arguments are looked up once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpass.cache.handle import LayerCache
from kvpass.rewrite.result import StepRewrite
from kvpass.runtime.caches import count
from kvpass.torch_private import inductor


class FastStep:
    """A decode step of one token on fixed slots and fixed compiled code.

    The step does what `StepRunner.advance` does for a known kind of step, as long as the slots are the same objects.
    """

    def __init__(self, caches: list[LayerCache], rewrite: StepRewrite, run: inductor.Compiled) -> None:
        """
        Args:
            rewrite: the rewrite of a step of one token, whose `repeats` is true.
            run: the compiled code of the rewrite.
        """
        self.caches, self.rewrite, self.run = caches, rewrite, run
        self.slots = [cache.slots for cache in caches]
        self.held = rewrite.fixed_arguments(self.slots)

    def __call__(self, arguments: tuple[Any, ...], clocks: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """Run the step and return the results of the graph.

        Args:
            arguments: Dynamo's arguments for this token.
            clocks: the policy clocks of each layer after this token.
        """
        given = self.rewrite.call_arguments(arguments, [], self.slots, self.caches[0].seen)
        for cache in self.caches:
            cache.interrupted = True
        results = self.run(*self.held, *given)
        self.rewrite.count(self.slots, results)
        count(self.caches, 1, clocks)
        return results
