"""Judge a model: compare it compiled with kvpass to itself uncompiled, with nothing evicted."""

from __future__ import annotations

import copy
import dataclasses
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import kvpass
from kvpass.cache.handle import Handle
from tests.adversary.models import Feed

Kind = Literal["held", "refused", "wrong", "foreign"]
ROOM = 32  # slots for policies that evict: more than any conversation here has tokens
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    held: outputs are equal, and the cache is on slots.
    refused: an error of kvpass that names a line or an argument.
    wrong: other numbers, an ordinary cache without an error, or an error of kvpass that names nothing.
    foreign: any other exception.
    """

    kind: Kind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change to a cache between two calls.

    Attributes:
        apply: function from the cache that a call returned to the cache of the next call.
        rows: indices of the input rows that belong to the cache's rows from then on.
    """

    apply: Callable[[Any], Any]
    rows: Sequence[int] = (0, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its calls.

    Attributes:
        model: a module; call(ids, past, **inputs) -> (output, new past), through `wrap` if given.
        inputs: function for the value of each argument in a call.
        pieces: numbers of tokens fed in each call.
        rows: B.
        real: function from a call's start and end to the tokens whose output counts; None for all.
        edits: changes to the cache, by the number of the call that they precede.
        uncompiled: number of initial calls that run without torch.compile.
        wrap: makes the call from the model or the compiled model.
        vocabulary: size of the vocabulary.
        grown: number of initial layers of the cache that grow, None for all; the others are not checked.
        within: dtype of the model's products, if it differs from the dtype of the output, as under autocast.
        late: whether an error may come after a wrong output; checking in the same call would make the host wait.
    """

    model: torch.nn.Module
    inputs: Mapping[str, Feed] = dataclasses.field(default_factory=dict)
    pieces: Sequence[int] = (5, 1, 1, 3, 1)
    rows: int = 2
    real: Feed | None = None
    edits: Mapping[int, Edit] = dataclasses.field(default_factory=dict)
    uncompiled: int = 0
    wrap: Callable[[Any], Callable[..., Any]] = lambda model: model
    vocabulary: int = 16
    grown: int | None = None
    within: torch.dtype | None = None
    late: bool = False


class Invalid(Exception):
    """The uncompiled model fails, or returns numbers that are not finite."""


@torch.no_grad()
def judge(case: Case, policy: str = "full", **settings: Any) -> Verdict:
    """Run a case compiled and uncompiled, and return the verdict.

    Raises:
        Invalid: the uncompiled model fails, so there is nothing to compare with.
    """
    expected = _uncompiled(case)
    settings = {"inner": "eager", **settings, **({} if policy == "full" else {"budget": ROOM})}
    torch._dynamo.reset()
    limits = torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024)
    with limits, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = _compare(case, expected, kvpass.backend(policy, **settings))
    torch._dynamo.reset()
    return verdict


def _uncompiled(case: Case) -> list[Tensor]:
    try:
        outputs = [output for output, _ in _run(case, case.model)]
    except Exception as error:
        raise Invalid(f"the uncompiled model fails: {error!r}") from error
    for number, output in enumerate(outputs):
        if not output[_real(case, number)].isfinite().all():
            raise Invalid(f"the uncompiled model gives no numbers in call {number}")
    return outputs


def _compare(case: Case, expected: list[Tensor], backend: Any) -> Verdict:
    compiled = torch.compile(case.model, backend=backend)
    difference, past, number = "", None, -1
    try:
        for number, (output, cache) in enumerate(_run(case, compiled)):
            past = cache
            difference = difference or _difference(output, expected[number], _real(case, number), number, case.within)
            if difference and not case.late:
                return Verdict("wrong", difference)
        if kinds := {type(part) for part in leaves(past, case.grown)} - {Handle}:
            return Verdict("wrong", f"an ordinary cache ({', '.join(kind.__name__ for kind in kinds)}), and no error")
        kvpass.inspect(past)
    except kvpass.KVPassError as error:
        where = f"call {number + 1}: {type(error).__name__}: {' '.join(str(error).split())}"
        return Verdict("refused", where) if names_a_place(str(error)) else Verdict("wrong", f"names nothing: {where}")
    except Exception as error:
        return Verdict("foreign", f"call {number + 1}: {_told(error)}")
    return Verdict("wrong", difference) if difference else Verdict("held")


def _run(case: Case, model: Any) -> Any:
    """Yield the output and cache of each call in turn."""
    call, first = case.wrap(model), case.wrap(case.model)
    total = sum(case.pieces)
    ids = torch.randint(0, case.vocabulary, (case.rows, total), generator=torch.Generator().manual_seed(total))
    past, start, rows = None, 0, list(range(case.rows))
    for number, count in enumerate(case.pieces):
        if edit := case.edits.get(number):
            past, rows = edit.apply(past), list(edit.rows)
        stop = start + count
        inputs = {name: _picked(feed(start, stop), rows) for name, feed in case.inputs.items()}
        run = first if number < case.uncompiled else call
        output, past = run(ids[rows, start:stop].contiguous(), past, **inputs)
        yield output.clone(), past
        start = stop


def _picked(argument: Any, rows: list[int]) -> Any:
    """Select rows of an argument that has one entry for each row."""
    batched = isinstance(argument, Tensor) and argument.ndim > 1 and argument.shape[0] != 1
    return argument[rows] if batched else argument


def _real(case: Case, number: int) -> Tensor:
    """Return a mask bool [B, q] of the tokens in a call whose output counts."""
    start = sum(case.pieces[:number])
    stop = start + case.pieces[number]
    made = [list(edit.rows) for at, edit in case.edits.items() if at <= number]
    rows = made[-1] if made else list(range(case.rows))
    real = torch.ones(case.rows, stop - start) if case.real is None else case.real(start, stop)
    return real[rows, start - stop :].bool()


def _difference(output: Tensor, expected: Tensor, real: Tensor, number: int, within: torch.dtype | None = None) -> str:
    """Describe the call and size of a difference; empty if there is none."""
    if output.dtype != expected.dtype or output.shape != expected.shape:
        return f"call {number}: {output.dtype} {list(output.shape)} for {expected.dtype} {list(expected.shape)}"
    ours, theirs = output[real].double(), expected[real].double()
    if not theirs.numel():
        return ""
    off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))  # an output may be all zeros
    return "" if off <= TOLERANCE[within or expected.dtype] else f"call {number}: off by {off:.2g}"


def leaves(past: Any, layers: int | None = None) -> list[Tensor]:
    """Return keys and values of the first layers of a cache: pairs of tensors, or an object with layers."""
    if hasattr(past, "layers"):
        return [part for layer in past.layers[:layers] for part in (layer.keys, layer.values)]
    return [part for pair in past[:layers] for part in pair]


def names_a_place(message: str) -> bool:
    """True if a message names a source line or an argument: the cache, its keys and values, or an option."""
    return re.search(r"\.py:\d+|\bcache|\bthe keys and the values\b|\w+=|'\w+'", message) is not None


def _told(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/kvpass/" in frame.filename]
    where = f" at {own[-1].filename.rsplit('/kvpass/', 1)[1]}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{where}: {first[:160]}"


def twin(case: Case, **changes: Any) -> Case:
    """Return the case with a copy of the model, and with changes."""
    return dataclasses.replace(case, **{"model": copy.deepcopy(case.model), **changes})
