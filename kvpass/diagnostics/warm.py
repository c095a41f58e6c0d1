"""Compiling ahead of the first user (`warm`): a made-up conversation visits every graph that a real one will need.

Its tokens mean nothing; what counts is in which ways the model is called.  Lengths and batch sizes come in pairs, as
torch.compile makes a graph for any of them when it has seen two.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.arguments import Condition, Positive, checked
from kvpass.backend import compile as compile_model
from kvpass.cache.handle import LayerCache, caches_in
from kvpass.decoding.prefill import Caller, chunks, last_of
from kvpass.errors import PolicyError
from kvpass.policies.base import Policy

M = TypeVar("M", bound=torch.nn.Module)
Tick = Callable[[str], object]

TOKEN = 1  # that everything made up consists of
STEPS = 3  # the first may have had a number as a constant, the second has it as a symbol, the third needs nothing new
TURNS = (5, 7, 6)  # tokens of later turns
WITHOUT_BUDGET = (32, 48)  # tokens of prompts, where nothing is evicted


@checked
def warm(
    model: M,
    policy: str | Policy = "full",
    *,
    rows: Annotated[Sequence[Positive], Condition("and one at least", bool)] = (1,),
    turns: bool = True,
    progress: bool = True,
    **settings: Any,
) -> M:
    """Compile a model in place, as `kvpass.compile` does, and at once all graphs that conversations with it need.

    Two prompts, one longer than the budget, steps behind them, the policy's sweep if it has one, and further turns are
    run for each batch size.  What the compiler makes goes into its caches on disk: called in a later process with the
    same arguments, `warm` finds it there.

    Args:
        model: one with a `generate` that takes `input_ids`, as transformers' have, or one that `kvpass.prefill` takes;
            in eval mode.
        rows: batch sizes that will come; two sizes above one stand for all of them, on a CPU.
        turns: whether several tokens will come on a live cache: a second turn, or a prompt in chunks.
        progress: show a bar, if tqdm is installed.
        settings: what `kvpass.backend` takes; a share as the budget is one of these prompts.

    Returns:
        The model.

    Raises:
        PolicyError: rows that cannot be, or a model that reads something else than token ids.
        UnsupportedGraph: the model cannot be rewritten.
    """
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise PolicyError(f"warm makes up token ids, and {type(model).__name__} reads {reads}: run an input of yours")
    compile_model(model, policy, **settings)
    lengths = _prompts(settings.get("budget"))
    batches = [(size, padded) for size in rows for padded in _paddings(size)]
    batches += [(size, True) for size in _third(rows)]
    talks = [(size, padded, length) for size, padded in batches for length in lengths]
    several = TURNS if turns and not _encodes(model) else ()
    with torch.no_grad(), _bar(len(talks) * (1 + len(several)), progress) as tick:
        for size, padded, length in talks:
            _converse(_Talk(model, size, padded), length, several, tick)
    return model


def _prompts(budget: float | None) -> tuple[int, int]:
    """Lengths of two prompts, of which the second does not fit if the budget is a number of slots."""
    return WITHOUT_BUDGET if budget is None or budget < 1 else (max(2, int(budget) * 3 // 4), int(budget) + 16)


def _paddings(rows: int) -> tuple[bool, ...]:
    """Whether a batch may be padded; `generate` leaves out arguments where it is not."""
    return (False, True) if rows > 1 else (False,)


def _third(rows: Sequence[int]) -> list[int]:
    """A batch size for padded rows after two others.

    A padding mask's size is a number in the first graph that has one, so the second graph begins to count anew.
    """
    several = {size for size in rows if size > 1}
    return [max(several) + 1] if len(several) == 2 else []


def _encodes(model: Any) -> bool:
    """Whether the prompt goes to an encoder, so that there are no further turns."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _converse(talk: _Talk, length: int, turns: Sequence[int], tick: Tick) -> None:
    """A prompt, steps up to the next sweep, and further turns."""
    talk.say(length, STEPS)
    talk.say(0, _until_compaction(caches_in(talk.cache)))
    tick(f"prompt [{talk.rows}, {length}]")
    for turn in turns:
        talk.say(turn, STEPS)
        tick(f"turn [{talk.rows}, {turn}]")


def _until_compaction(caches: Sequence[LayerCache]) -> int:
    """Steps until the policy sweeps; none if it never does within as many as there are slots."""
    if not caches or not caches[0].clocks:
        return 0
    policy, limit, clock = caches[0].layout.policy, caches[0].limits[0], caches[0].clocks[0]
    for count in range(1, limit + 2):
        due, clock = policy.tick(clock, limit)
        if due:
            return count
    return 0


@dataclasses.dataclass
class _Talk:
    """One conversation of so many rows, by the way that the model is used: `generate`, or calls."""

    model: Any
    rows: int
    padded: bool
    cache: Any = None
    seen: int = 0

    def say(self, new: int, answer: int) -> None:
        """Feed `new` tokens, and then as many as an answer has, one by one."""
        if not new + answer:
            return
        if hasattr(self.model, "generate"):
            self._generate(self._tokens(self.seen + new + (not new)), answer + 1)
        else:
            self._call([*([new] if new else []), *[1] * answer])

    def _tokens(self, count: int) -> Tensor:
        device = next(self.model.parameters()).device
        return torch.full((self.rows, count), TOKEN, device=device)

    def _mask(self, count: int) -> Tensor:
        mask = torch.ones_like(self._tokens(count))
        mask[0, 0] = not self.padded
        return mask

    def _generate(self, ids: Tensor, answer: int) -> None:
        out = self.model.generate(
            ids,
            attention_mask=self._mask(ids.shape[1]),
            **cache_names.arguments(self.model, self.cache),
            min_new_tokens=answer,
            max_new_tokens=answer,
            do_sample=False,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        self.cache, self.seen = cache_names.returned(out), out.sequences.shape[1] - 1

    def _call(self, counts: Sequence[int]) -> None:
        caller = Caller.of(self.model)
        for count in counts:
            self.seen += count
            made = chunks(caller, self._tokens(count), self._mask(self.seen), self.cache, None)
            self.cache = cache_names.returned(last_of(made))


@contextlib.contextmanager
def _bar(total: int, shown: bool) -> Iterator[Tick]:
    """What is called with the name of each part that is through."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda name: None
        return
    with tqdm(total=total, unit="part", desc="warm", disable=not shown, dynamic_ncols=True) as bar:

        def tick(name: str) -> None:
            bar.set_description(f"warm: {name}", refresh=False)
            bar.update()

        yield tick
