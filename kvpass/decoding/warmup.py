"""Warm-up: conversations of synthetic tokens that compile every graph that later conversations need.

The token values do not matter, only the rows and lengths with which the model is called.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.decoding.prefill import Caller, chunks, last_of
from kvpass.policies.base import Policy
from kvpass.policies.types import Clock

TOKEN = 1  # of prompts that are fed call by call
TURN = 5  # tokens in a later turn
TURNS = (TURN, TURN + 2)  # a chunk is compiled at its second run
STEPS = 2  # after a turn
WITHOUT_BUDGET = (32, 48)  # prompt lengths if nothing is evicted


def prompt_lengths(budget: float | None, chunk: int | None = None, evicts: bool = True) -> tuple[int, int]:
    """Return the lengths of two prompts; the second exceeds a budget that is a number of slots.

    Args:
        chunk: the tokens in a chunk of a prompt.  A chunk's graph is compiled at its second run, so the second prompt
            has three chunks, and a rest.
        evicts: whether the policy evicts; if not, the prompts leave half of such a budget for what follows them.
    """
    known = budget is not None and budget >= 1
    if budget and known and not evicts:
        return int(budget) // 4 + 1, int(budget) // 2
    short, long = (max(2, int(budget) * 3 // 4), int(budget) + 16) if budget and known else WITHOUT_BUDGET
    return short, long if chunk is None else max(long, 3 * chunk + chunk // 2)


def steps_until_compaction(policy: Policy, budget: int, clock: Clock) -> int:
    """Return the number of steps until the policy compacts; 0 if it does not within as many steps as slots."""
    if not clock:
        return 0
    for count in range(1, budget + 2):
        due, clock = policy.tick(clock, budget)
        if due:
            return count
    return 0


def visit_graphs(loop: Any, rows: int, prefixes: bool = False) -> None:
    """Run every graph that a `DecodeLoop` needs, on synthetic prompts and requests, and drop their caches.

    Args:
        loop: the loop.
        rows: the number of rows in prompts; requests have the loop's own.
        prefixes: whether requests will begin behind prefixes.
    """
    apart = copy.copy(loop)
    apart.state = apart.prefix = None
    apart.stop, apart.generator = loop.stop[:0], loop.sampling.generator(loop.device)
    budget, policy = loop.backend.budget, loop.backend.policy
    keeps_all = isinstance(budget, int) and not policy.evicts
    for length in prompt_lengths(budget, loop.prefill_chunk, policy.evicts):
        slots = budget if isinstance(budget, int) else length
        steps = loop.read_interval + 1 + steps_until_compaction(policy, slots, policy.clock((), length, slots))
        steps = max(STEPS, min(steps, budget - length - 4 * TURN)) if keeps_all else steps
        if loop.requests is None:
            for padded in (False, True) if rows > 1 and "attention_mask" in loop.caller.parameter_names else (False,):
                _converse(apart, rows, length, steps, padded)
        else:
            if prefixes:
                SyntheticConversation(loop.caller, loop.device).feed(length, *TURNS, 1, chunk=loop.prefill_chunk)
            apart.requests = type(loop.requests).of(apart, loop.requests.count)
            apart.generate_batch(list(synthetic_tokens(loop, length, 2)), max_new_tokens=steps)


def synthetic_tokens(loop: Any, count: int, rows: int = 1) -> Tensor:
    """Return different token ids of the model of a loop, int64 [rows, count]."""
    known = loop.caller.vocabulary or TOKEN + 1
    return (torch.arange(rows * count, device=loop.device) * 7919 % known).view(rows, count)


def _converse(loop: Any, rows: int, length: int, steps: int, padded: bool) -> None:
    """Run a prompt and two turns, with steps after each."""
    ids = synthetic_tokens(loop, length, rows)
    mask = torch.ones_like(ids)
    mask[0, 0] = not padded
    loop.state = None
    loop.prompt(ids, mask)
    loop.generate(steps)
    for turn in TURNS:
        loop.prompt(synthetic_tokens(loop, turn, rows))
        loop.generate(STEPS)


@dataclasses.dataclass
class SyntheticConversation:
    """A conversation of synthetic tokens, which are fed to a model call by call.

    Attributes:
        padded: whether the first row begins with padding.
        cache: the model's cache after the calls so far.
        seen: the number of tokens so far.
    """

    caller: Caller
    device: torch.device
    rows: int = 1
    padded: bool = False
    cache: Any = None
    seen: int = 0

    @torch.no_grad()
    def feed(self, *counts: int, chunk: int | None = None) -> None:
        """Feed so many tokens, one count after the other; each in chunks of `chunk` tokens if that is given."""
        for count in counts:
            self.seen += count
            outputs = chunks(self.caller, self.tokens(count), self.mask(self.seen), self.cache, chunk)
            self.cache = cache_names.cache_of_output(last_of(outputs))

    def tokens(self, count: int) -> Tensor:
        """Return token ids, int64 [rows, count]."""
        return torch.full((self.rows, count), TOKEN, device=self.device)

    def mask(self, count: int) -> Tensor:
        """Return the padding mask of `count` tokens, int64 [rows, count]."""
        mask = torch.ones_like(self.tokens(count))
        mask[0, 0] = not self.padded
        return mask
