"""Compile a model ahead of its use (`kvpass.warm`): synthetic conversations visit every graph that later ones need.

Lengths and batch sizes come in pairs, because torch.compile makes a graph for any size when it has seen two.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import torch

from kvpass import model_access
from kvpass.arguments import Condition, Positive, check_arguments
from kvpass.backend import Backend
from kvpass.backend import compile as compile_model
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.model_cache import caches_in
from kvpass.decoding.model_call import ModelCall
from kvpass.decoding.synthetic_conversation import (
    TURNS,
    SkippedConversations,
    SyntheticConversation,
    TokenAllowance,
    prompt_lengths,
    steps_until_compaction,
)
from kvpass.errors import PolicyError
from kvpass.policies.base import Policy
from kvpass.runtime.clocks import clock_by_class
from kvpass.torch_private import dynamo

M = TypeVar("M", bound=torch.nn.Module)
Tick = Callable[[str], object]

DECODE_STEPS = 3  # the first may specialise on a number, the second makes it a symbol, the third needs no new graph


@check_arguments
def warm(
    model: M,
    policy: str | Policy = "full",
    *,
    rows: Annotated[Sequence[Positive], Condition("and one at least", bool)] = (1,),
    turns: bool = True,
    prefill_chunk: Positive | None = None,
    progress: bool = True,
    **settings: Any,
) -> M:
    """Compile a model in place, as `kvpass.compile` does, and compile all graphs that conversations need in advance.

    For each batch size, `warm` runs two prompts, one of them longer than the budget, decode steps after them, the
    policy's compacting step if it has one, and further turns.  The compiler stores its results in its caches on disk:
    in a later process, `warm` with the same arguments finds them there.

    >>> model = kvpass.warm(model, policy="h2o", budget=1024, rows=(1, 4, 8))

    Args:
        model: a model in eval mode, with a `generate` that takes `input_ids`, as transformers' models have, or a model
            for `kvpass.prefill`.
        policy: the eviction policy, see `kvpass.backend`.
        rows: the batch sizes to expect; two sizes above one stand for all of them, on a CPU.
        turns: whether several tokens will arrive on an existing cache: a second turn, or a prompt in chunks.
        prefill_chunk: the number of tokens in a chunk, if prompts will be fed by `kvpass.prefill`.
        progress: show a progress bar after two seconds, on a terminal and if tqdm is installed.
        settings: the other arguments of `kvpass.backend`; a budget that is a share is a share of these prompts.

    Returns:
        The model.

    Raises:
        PolicyError: invalid rows or settings, or a model whose input is not token ids.
        BudgetError: a budget that the policy cannot work with, or that is too small for any prompt.
        UnsupportedGraph: the model cannot be rewritten.
    """
    input_name = getattr(model, "main_input_name", "input_ids")
    if input_name != "input_ids":
        raise PolicyError(f"warm feeds token ids, and {type(model).__name__} reads {input_name}: run your own input")
    compile_model(model, policy, **settings)
    compiler: Backend = dynamo.backend_of(model)
    chosen, budget, skipped = compiler.policy, compiler.budget, SkippedConversations()
    lengths = prompt_lengths(budget, chosen, model)
    batches = [(size, padded) for size in rows for padded in (False, True)[:size]]  # `generate` omits masks of ones
    prompts = [(size, padded, length) for size, padded in batches for length in lengths if length > 1 or not padded]
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)  # it reads the prompt
    several = TURNS if turns and not has_encoder else ()
    in_chunks = [] if prefill_chunk is None else prompt_lengths(budget, chosen, model, prefill_chunk)
    chunked = [(size, padded, length) for size, padded in batches for length in in_chunks]
    begin = functools.partial(SyntheticConversation, ModelCall.of(model), model_access.device_of(model))
    with torch.no_grad(), _bar(len(prompts) * (1 + len(several)) + len(chunked), progress) as tick:
        for size, padded, length in prompts:
            allowance = TokenAllowance.of(chosen, budget, length, model)
            with skipped.conversation(f"prompts [{size}, {length}]"):
                _run_turns(begin(size, padded), (length, *several), allowance, tick)
        for size, padded, length in chunked:
            with skipped.conversation(f"prompts [{size}, {length}] in chunks"):
                _feed_chunks(begin(size, padded), length, prefill_chunk, tick)
    skipped.check()
    return model


def _run_turns(
    conversation: SyntheticConversation, lengths: Sequence[int], allowance: TokenAllowance, tick: Tick
) -> None:
    """Run a prompt, decode steps up to the next compaction as far as allowed, and further turns."""
    (length, steps), *turns = allowance.parts(lengths[0], DECODE_STEPS, lengths[1:], DECODE_STEPS)
    conversation.converse(length, steps)
    conversation.converse(0, int(min(_until_compaction(caches_in(conversation.cache)), allowance.tokens)))
    tick(f"prompt [{conversation.rows}, {length}]")
    for turn, steps in turns:
        conversation.converse(turn, steps)
        tick(f"turn [{conversation.rows}, {turn}]")


def _feed_chunks(conversation: SyntheticConversation, length: int, chunk: int | None, tick: Tick) -> None:
    """Run a prompt in chunks, and a decode step."""
    conversation.feed(length, chunk=chunk)
    conversation.converse(0, 1)
    tick(f"chunks of [{conversation.rows}, {chunk}]")


def _until_compaction(caches: Sequence[LayerCache]) -> int:
    if not caches or not caches[0].clocks:
        return 0
    layout, clock, limit = caches[0].layout, caches[0].clocks[0], caches[0].row_budgets[0]
    parts = clock_by_class(layout, clock, limit)
    return min(steps_until_compaction(layout.policy, budget, own) for own, budget in parts)


@contextlib.contextmanager
def _bar(total: int, shown: bool) -> Iterator[Tick]:
    """Return a context with a callback that takes the name of each finished part and advances a progress bar."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda name: None
        return
    hidden = None if shown else True  # None: hidden unless there is a terminal
    with tqdm(total=total, unit="part", desc="warm", disable=hidden, delay=2, dynamic_ncols=True) as bar:

        def tick(name: str) -> None:
            bar.set_description(f"warm: {name}", refresh=False)
            bar.update()

        yield tick
