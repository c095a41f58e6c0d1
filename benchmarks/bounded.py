"""Conversations with kvpass for timing: any policy, at any number of tokens seen, without decoding them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

import kvpass
from benchmarks.model import Conversation, tokens
from benchmarks.timing import timed
from kvpass import cache_names, policies
from kvpass.cache.handle import LayerCache
from kvpass.decoding.stepping import refreshed
from kvpass.policies import Policy, Tokens

BUDGET = 1024
FLOOR = 8  # slots of the model that does little but read its weights
SINKS = 4  # the first tokens, which keep their positions when the others are moved on
LEFT_OUT = ("full", "kv_align")  # bounds nothing; needs networks that were trained for the model


@dataclasses.dataclass(frozen=True)
class Untended(Policy):
    """No policy at all: every new token is written over the one before it, and the other slots stay.

    The step reads as many slots as one of a policy with the same budget, and looks at no token.
    """

    name: ClassVar[str] = "untended"

    def score(self, tokens: Tokens) -> Tensor:
        return -tokens.position

    def victim(self, tokens: Tokens) -> Tensor:
        return torch.zeros_like(tokens.position[..., 0])


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy as it is timed; `positions` is None for the policy's own default."""

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
        """What `kvpass.backend` takes."""
        return dict(policy=self.resolved, budget=self.budget, positions=self.positions)


NOTHING, LEAST = Case("untended"), Case("untended", budget=FLOOR)


def everything() -> list[str]:
    """Every policy that bounds this model's cache."""
    return [name for name in policies.names() if name not in LEFT_OUT]


def conversation(model: Any, case: Case, prompt: int, **more: Any) -> Conversation:
    """A conversation whose prompt has run and whose decode graph is compiled.

    The prompt runs uncompiled, under the same policy: its graph is not what is timed.

    Args:
        more: further settings of `kvpass.backend`.
    """
    chosen = {**case.settings(), **more}
    ids = tokens(prompt)
    first = torch.compile(model, backend=kvpass.backend(inner="eager", **chosen))
    cache = cache_names.returned(first(ids, use_cache=True, logits_to_keep=1))
    made = Conversation(torch.compile(model, backend=kvpass.backend(**chosen)), cache)
    for _ in range(2):
        made.step()
    return made


@dataclasses.dataclass(frozen=True)
class Loop:
    """A contender that decodes without Dynamo and the model's Python: `kvpass.DecodeLoop`."""

    name: str
    loop: kvpass.DecodeLoop

    @staticmethod
    def of(model: Any, case: Case, prompt: int, rows: int = 1) -> Loop:
        """A loop whose prompt has run and whose decode graph is compiled."""
        loop = kvpass.DecodeLoop(model, **case.settings())
        loop.prompt(torch.cat([tokens(prompt, seed) for seed in range(rows)]))
        loop.generate(2 * loop.every)
        return Loop(f"DecodeLoop, {case.name}", loop)

    def seconds(self, count: int) -> list[float]:
        """The same for each: the host looks at the tokens once, when all are made."""
        return [timed(lambda: self.loop.generate(count)) / count] * count


def layers(cache: Any) -> Iterator[LayerCache]:
    """What kvpass holds behind a cache of transformers."""
    for layer in cache.layers:
        yield layer.keys.cache


def move_on(talk: Conversation, seen: int) -> None:
    """Make the conversation one of `seen` tokens: what it holds stands that much later in the text.

    The tokens between are not decoded.  A step does the same work at any count; `benchmarks.stream` decodes them.
    """
    for layer in layers(talk.cache):
        by = seen - layer.seen
        slots = layer.slots
        for places in (slots.position, slots.index):
            places.copy_(torch.where(places >= SINKS, places + by, places))
        slots.seen.add_(by)
        slots.length.add_(by)
        layer.seen += by
    talk.cache = refreshed(talk.cache, 0)
