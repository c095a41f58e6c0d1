"""Hold conversations of synthetic tokens, which compile every graph that later conversations need.

The token values do not matter, only the rows and lengths with which the model is called.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.decoding.model_call import ModelCall, learned_positions
from kvpass.decoding.prefill import run_chunks, run_to_last
from kvpass.decoding.requests import GenerationOutput
from kvpass.errors import BudgetError, RequestError
from kvpass.policies.base import Policy
from kvpass.policies.types import Clock

TOKEN = 1  # the token of prompts that are fed call by call
TURNS = (5, 7)  # tokens in later turns: the graph of a chunk is compiled at the second
STEPS = 2  # after a turn of a loop
WITHOUT_BUDGET = (32, 48)  # prompt lengths if nothing is evicted

log = logging.getLogger("kvpass.warm")


@dataclasses.dataclass
class TokenAllowance:
    """The tokens that a synthetic conversation may still have.

    Attributes:
        prompts: the most tokens in further prompts and turns.
        tokens: the most tokens of all.
    """

    prompts: float = math.inf
    tokens: float = math.inf

    @staticmethod
    def of(policy: Policy, budget: float | None, length: int, model: Any) -> TokenAllowance:
        """Return the allowance of a conversation that begins with a prompt of `length` tokens.

        Args:
            budget: as the user gave it; under a policy that keeps every token, a share counts as the whole prompt.
            model: limits all tokens by its table of learned positions, if it has one.
        """
        tokens = learned_positions(model)
        if not policy.evicts and budget is not None:
            tokens = min(tokens, budget if isinstance(budget, int) else length)
        if policy.keep_prompt and isinstance(budget, int):  # prompts are pinned, and leave the policy its least
            return TokenAllowance(min(tokens, policy.compacted(budget) - policy.minimum_budget()), tokens)
        return TokenAllowance(tokens, tokens)

    def parts(self, length: int, steps: int, turns: Sequence[int], later: int) -> list[tuple[int, int]]:
        """Return the new tokens and the steps of a prompt and of the turns that fit.

        A turn has at least two tokens.

        Args:
            later: the number of steps after a turn.
        """
        if math.isfinite(self.tokens):  # more steps than a graph needs only if the turns also fit
            steps = int(min(steps, max(2 * STEPS, self.tokens - length - sum(turns) - len(turns) * later)))
        result = [self._take(length, steps)]
        for turn in turns:
            if min(self.prompts, self.tokens) > 2:  # the last token before a turn is fed with it
                new, steps = self._take(turn + 1, later)
                result.append((new - 1, steps))
        return result

    def _take(self, new: int, steps: int) -> tuple[int, int]:
        """Return how many of `new` tokens, at least one, and of the steps after them fit, and subtract them."""
        new = max(1, int(min(new, self.prompts, self.tokens)))
        steps = int(max(0, min(steps, self.tokens - new)))
        self.prompts, self.tokens = self.prompts - new, self.tokens - new - steps
        return new, steps


class SkippedConversations:
    """Log of the synthetic conversations that exceed a budget."""

    def __init__(self) -> None:
        self.errors: list[BudgetError | RequestError] = []
        self.ran = False

    @contextlib.contextmanager
    def conversation(self, name: str) -> Iterator[None]:
        """Return a context in which a conversation of this name runs, as far as the budget allows."""
        try:
            yield
            self.ran = True
        except (BudgetError, RequestError) as error:
            self.errors.append(error)
            log.warning("not all of %s is compiled ahead: %s", name, error)

    def check(self) -> None:
        """Raise the first error if no conversation ran to its end."""
        if self.errors and not self.ran:
            raise self.errors[0]


def prompt_lengths(budget: float | None, policy: Policy, model: Any, chunk: int | None = None) -> list[int]:
    """Return the lengths of the two prompts to run, which are equal where the longer one does not fit.

    The second exceeds a budget of slots.  Graphs of prompts and of chunks are compiled at their second run.

    Args:
        chunk: the tokens in a chunk of a prompt; the first prompt then fits into a chunk, and the second has three
            chunks and a remainder.  Two lengths show which arguments of a prompt's graph are lengths.
    """
    slots = budget if isinstance(budget, int) else None
    short, long = WITHOUT_BUDGET if slots is None else (max(2, slots * 3 // 4), slots + 16)
    if chunk is not None:
        short, long = min(short, chunk), max(long, 3 * chunk + chunk // 2)
        long += chunk // 2 if long % chunk == 0 else 0
    allowance = TokenAllowance.of(policy, budget, long, model)
    if isinstance(budget, int | None) and min(allowance.prompts, allowance.tokens) < long + 4 * TURNS[0]:
        most = max(1, int(allowance.prompts))  # half of it is for the turns and steps after the prompts
        short, long = (max(min(2, most), length) for length in (min(short, most // 4 + 1), min(long, most // 2)))
    return sorted((short, long))


def steps_until_compaction(policy: Policy, budget: int, clock: Clock) -> int:
    """Return the number of steps until the policy compacts; 0 if it does not within one step for each slot."""
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
        rows: the number of rows in prompts; requests have the loop's `rows`.
        prefixes: whether requests will continue prefixes.

    Raises:
        BudgetError: the budget is too small for every prompt.
    """
    own_loop = copy.copy(loop)
    own_loop.stop, own_loop.generator = loop.stop[:0], loop.sampling.generator(loop.device)
    pads = rows > 1 and "attention_mask" in loop.model_call.parameter_names
    skipped = SkippedConversations()
    for length in prompt_lengths(loop.backend.budget, loop.backend.policy, loop.model, loop.prefill_chunk):
        parts = _parts(loop, length)
        if loop.rows is None:
            for padded in (False, True) if pads and length > 1 else (False,):
                with skipped.conversation(f"prompts [{rows}, {length}]"):
                    _converse(own_loop, rows, parts, padded)
        else:
            with skipped.conversation(f"requests of {length} tokens"):
                if prefixes:
                    counts = [count for new, steps in parts for count in (new, *[1] * (steps > 0))]
                    SyntheticConversation(loop.model_call, loop.device).feed(*counts, chunk=loop.prefill_chunk)
                _request(own_loop, length, parts[0][1])
    skipped.check()


def _parts(loop: Any, length: int) -> list[tuple[int, int]]:
    """Return the new tokens and the steps of a prompt and of the turns after it."""
    policy, budget = loop.backend.policy, loop.backend.budget
    slots = budget if isinstance(budget, int) else length
    steps = loop.read_interval + 1 + steps_until_compaction(policy, slots, policy.clock((), length, slots))
    return TokenAllowance.of(policy, budget, length, loop.model).parts(length, steps, TURNS, STEPS)


def _request(loop: Any, length: int, steps: int) -> None:
    """Run two requests, and raise the error if one failed."""
    loop.reset()
    outputs = loop.generate_batch(list(synthetic_tokens(loop, length, 2)), max_new_tokens=max(1, steps))
    if (cause := failure(outputs)) is not None:
        raise cause


def failure(outputs: Mapping[str, GenerationOutput]) -> Exception | None:
    """Return the error of a failed request, None if none failed."""
    return next((output.cause for output in outputs.values() if output.cause is not None), None)


def synthetic_tokens(loop: Any, count: int, rows: int = 1) -> Tensor:
    """Return different token ids of the model of a loop, int64 [rows, count]."""
    vocabulary = loop.model_call.vocabulary or TOKEN + 1
    return (torch.arange(rows * count, device=loop.device) * 7919 % vocabulary).view(rows, count)


def _converse(loop: Any, rows: int, parts: Sequence[tuple[int, int]], padded: bool) -> None:
    """Run a prompt and turns, with steps after each."""
    loop.reset()
    for new, steps in parts:
        ids = synthetic_tokens(loop, new, rows)
        mask = torch.ones_like(ids)
        mask[0, 0] = loop.cache is not None or not padded
        loop.prompt(ids, mask)
        loop.generate(steps)


@dataclasses.dataclass
class SyntheticConversation:
    """A conversation of synthetic tokens with a model."""

    model_call: ModelCall
    device: torch.device
    rows: int = 1
    padded: bool = False  # whether the first row begins with padding
    cache: Any = None
    seen: int = 0  # tokens so far

    @torch.no_grad()
    def feed(self, *counts: int, chunk: int | None = None) -> None:
        """Feed these numbers of tokens in turn, each in chunks of `chunk` tokens if `chunk` is given."""
        for count in counts:
            self.seen += count
            outputs = run_chunks(self.model_call, self.tokens(count), self.mask(self.seen), self.cache, chunk)
            self.cache = model_access.cache_of_output(run_to_last(outputs))

    def converse(self, new: int, answer: int) -> None:
        """Feed `new` tokens and decode `answer` tokens one by one, by `generate` if the model has it."""
        model: Any = self.model_call.call
        if not hasattr(model, "generate"):
            self.feed(*([new] if new else []), *[1] * answer)
        elif new + answer:
            ids = self.tokens(self.seen + new + (not new))
            out = model.generate(
                ids,
                attention_mask=self.mask(ids.shape[1]),
                **model_access.cache_arguments(model, self.cache),
                min_new_tokens=answer + 1,
                max_new_tokens=answer + 1,
                do_sample=False,
                return_dict_in_generate=True,
                pad_token_id=0,
            )
            self.cache, self.seen = model_access.cache_of_output(out), out.sequences.shape[1] - 1

    def tokens(self, count: int) -> Tensor:
        """Return token ids, int64 [rows, count]."""
        return torch.full((self.rows, count), TOKEN, device=self.device)

    def mask(self, count: int) -> Tensor:
        """Return the padding mask of `count` tokens, int64 [rows, count]."""
        mask = torch.ones_like(self.tokens(count))
        mask[0, 0] = not self.padded
        return mask
