"""Make conversations with kvpass under any policy, and move them to any number of tokens seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

import kvpass
from benchmarks.model import Conversation, tokens
from benchmarks.timing import timed
from kvpass import model_access, policies
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.model_cache import refresh_handles
from kvpass.policies import Policy, Tokens

BUDGET = 1024
FLOOR = 8  # slots of a step that reads little more than the weights
SINKS = 4  # the first tokens, which keep their positions when a conversation moves on


@dataclasses.dataclass(frozen=True)
class Untended(Policy):
    """Overwrite the latest token with every new one, and keep the other slots: a step without a choice.

    The step reads as many slots as a policy with the same budget, and scores no token.
    """

    name: ClassVar[str] = "untended"

    def score(self, tokens: Tokens) -> Tensor:
        return -tokens.position

    def victim(self, tokens: Tokens) -> Tensor:
        return torch.zeros_like(tokens.position[..., 0])


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy and its settings; `positions` is None for the default of the policy."""

    policy: str
    positions: str | None = None
    budget: int = BUDGET

    @property
    def name(self) -> str:
        return {
            None: self.policy,
            "absolute": f"{self.policy}, absolute",
            "cache": f"{self.policy}, by rank",
        }[self.positions]

    @property
    def resolved(self) -> Policy:
        return Untended() if self.policy == "untended" else policies.resolve(self.policy, {})

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `kvpass.backend`."""
        return dict(policy=self.resolved, budget=self.budget, positions=self.positions)


NOTHING, LEAST = Case("untended"), Case("untended", budget=FLOOR)


def everything() -> list[str]:
    """Return the names of all policies that bound the cache of this model."""
    return [name for name in policies.names() if name != "full" and not policies.get(name).needs_weights]


def conversation(model: Any, case: Case, prompt: int, **more: Any) -> Conversation:
    """Return a conversation after its prompt, with a compiled decode graph.

    The prompt runs uncompiled under the same policy, because its graph is not timed.

    Args:
        more: further settings of `kvpass.backend`.
    """
    chosen = {**case.settings(), **more}
    ids = tokens(prompt)
    first = torch.compile(model, backend=kvpass.backend(inner="eager", **chosen))
    cache = model_access.cache_of_output(first(ids, use_cache=True, logits_to_keep=1))
    made = Conversation(torch.compile(model, backend=kvpass.backend(**chosen)), cache)
    for _ in range(2):
        made.step()
    return made


@dataclasses.dataclass(frozen=True)
class Loop:
    """A contender that decodes with `kvpass.DecodeLoop`, without Dynamo and the model's Python."""

    name: str
    loop: kvpass.DecodeLoop

    @staticmethod
    def of(model: Any, case: Case, prompt: int, rows: int = 1) -> Loop:
        """Return a loop after its prompt, with a compiled decode graph."""
        loop = kvpass.DecodeLoop(model, **case.settings())
        loop.prompt(torch.cat([tokens(prompt, seed) for seed in range(rows)]))
        loop.generate(2 * loop.read_interval)
        return Loop(f"DecodeLoop, {case.name}", loop)

    def seconds(self, count: int) -> list[float]:
        """Return the mean for each step, because the host reads the tokens once for all steps."""
        return [timed(lambda: self.loop.generate(count)) / count] * count


def layers(cache: Any) -> Iterator[LayerCache]:
    """Yield the layers that kvpass holds behind a cache of transformers."""
    for layer in cache.layers:
        yield layer.keys.cache


def move_on(talk: Conversation, seen: int) -> None:
    """Move the cached tokens to later positions, so that the conversation has seen `seen` tokens.

    The tokens between are not decoded, because a step does the same work at any position; `benchmarks.stream` decodes
    all tokens.
    """
    for layer in layers(talk.cache):
        by = seen - layer.length
        slots = layer.slots
        for places in (slots.position, slots.index):
            places.copy_(torch.where(places >= SINKS, places + by, places))
        slots.seen.add_(by)
        slots.length.add_(by)
        layer.length += by
    talk.cache = refresh_handles(talk.cache, 0)
