"""Translation validation of a prompt: Dynamo's graph, its canonical form, and the graph with what a policy asks for.

They go in lockstep, see `kvpass.rewrite.validation.lockstep`.  A graph for all lengths runs on a short made-up prompt,
whose length and rows are numbers that nothing else in the graph has, so that a dimension taken for another one shows.
A graph for one length runs on the call at hand: one layer of each kind, and some of the queries of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.sites import AttentionSite
from kvpass.fx import walk
from kvpass.fx.shapes import expr
from kvpass.fx.walk import value
from kvpass.rewrite.prompt import PromptRewrite
from kvpass.rewrite.validation.constants import of_lengths, smallest_table
from kvpass.rewrite.validation.interpreter import DoesNotRun, GraphRun, Visit, copied
from kvpass.rewrite.validation.kinds import last_new_kind
from kvpass.rewrite.validation.lockstep import (
    Lockstep,
    Validation,
    leaving_out,
    validated,
)
from kvpass.torch_private import symbolic_shapes

LENGTHS = (11, 13, 17, 19, 23, 9, 7)
"""Lengths of a made-up prompt, of which the first is taken that is no other size of the graph."""
ROWS = (3, 5, 2)
"""Rows, likewise."""
LONG = 64
"""Of prompts of more tokens, all rows together, only one layer of each kind is run."""
LONGEST, MORE = 600, 3
"""The longest prompts behind constants of a graph, and how many of them."""
QUERIES = 24
"""Most queries of a call that are looked at."""


@dataclasses.dataclass(frozen=True)
class PromptCase:
    """A prompt graph, the result of its rewrite, and the call at hand.

    Attributes:
        gm: the model's own graph; canonical, sites: its canonical form.
        rewrite: makes the rewritten graph, with the model's own logits; None if the policy changes positions as well.
        padding_inputs: the numbers of the inputs that mark padding.
    """

    gm: fx.GraphModule
    canonical: fx.GraphModule
    sites: Sequence[AttentionSite]
    rewrite: Callable[[], PromptRewrite] | None
    padding_inputs: Sequence[int]


def validate_prompt(prompt: PromptCase, arguments: tuple[Any, ...]) -> Validation:
    """Run the graphs and compare.

    Raises:
        UnsupportedGraph: they differ; names the first attention call that does.
    """
    return validated(
        _calls(prompt, arguments),
        lambda made: _compare(prompt, made),
        lambda _, left: _try_longer(prompt, arguments, left),
        "prompts",
        "no call was tried",
    )


def _try_longer(prompt: PromptCase, arguments: tuple[Any, ...], left: list[str]) -> None:
    """Run prompts behind the constants of the graph, as far as the model's own graph runs on them; note the others."""
    lengths = [number + 2 for number in of_lengths(prompt.gm.graph) if LENGTHS[0] < number <= LONGEST][-MORE:]
    if value(prompt.sites[0].query).device.type != "cpu":  # where a lookup out of range cannot be caught
        lengths = [number for number in lengths if number <= smallest_table(prompt.gm.graph)]
    for made in _made_up(prompt, arguments, lengths, 2):
        with leaving_out(left, made.said):
            _compare(prompt, made)


@dataclasses.dataclass(frozen=True)
class _PromptCall:
    """Arguments of a prompt.

    Attributes:
        real: bool [B or 1, q], which tokens are no padding.
    """

    arguments: tuple[Any, ...]
    rows: int
    queries: int
    real: Tensor
    said: str

    def argument(self, number: int) -> Any:
        return copied(self.arguments[number])


def _calls(prompt: PromptCase, arguments: tuple[Any, ...]) -> Iterator[_PromptCall]:
    """Made-up prompts, if the graph serves other sizes, then the call at hand."""
    yield from _made_up(prompt, arguments, LENGTHS, max(ROWS))
    now = _sizes(walk.placeholders(prompt.canonical.graph), arguments)
    call = _described(prompt, arguments, now, "on a prompt")
    if call is not None:
        yield call


def _made_up(
    prompt: PromptCase, arguments: tuple[Any, ...], lengths: Sequence[int], most_rows: int
) -> Iterator[_PromptCall]:
    """Prompts of some lengths, as far as the graph serves them."""
    holders = walk.placeholders(prompt.canonical.graph)
    for sizes in _other_sizes(prompt, holders, _sizes(holders, arguments), lengths, most_rows):
        made = tuple(_resized(node, x, sizes) for node, x in zip(holders, arguments, strict=True))
        call = _described(prompt, _with_padding(prompt, made), sizes, "on a made-up prompt")
        if call is not None:
            yield call


def _sizes(holders: Sequence[fx.Node], arguments: tuple[Any, ...]) -> dict[Any, int]:
    """The values of the symbols that are arguments or sizes of arguments."""
    found: dict[Any, int] = {}
    for node, argument in zip(holders, arguments, strict=True):
        pairs = zip(value(node).shape, argument.shape, strict=True) if walk.is_tensor(node) else [(node, argument)]
        for size, number in pairs:
            if walk.is_tensor(node) or isinstance(value(node), torch.SymInt):
                found[expr(size)] = int(number)
    return {symbol: number for symbol, number in found.items() if symbol.is_Symbol}


def _other_sizes(
    prompt: PromptCase, holders: Sequence[fx.Node], now: dict[Any, int], lengths: Sequence[int], most_rows: int
) -> Iterator[dict[Any, int]]:
    """Sizes of made-up prompts that the guards of the graph allow, each length once.

    What equals the length, or else the rows, in the call at hand goes with it; inputs that mark padding must have one
    row, or all of them.
    """
    site = prompt.sites[0]
    length, rows = expr(site.queries), expr(value(site.key).shape[0])
    if not length.is_Symbol or length not in now or site.past_key is not None:
        return
    asked = symbolic_shapes.guarded(*(value(node) for node in holders))
    taken = {size for node in (site.query, site.key, site.value) for size in value(node).shape if isinstance(size, int)}
    free = rows.is_Symbol and rows in now
    counts = [x for x in ROWS if x not in taken and x <= most_rows] + [now[rows]] if free else [0]
    for new in (x for x in lengths if x not in taken):
        for count in (x for x in counts if x != new):
            wide = {symbol: count for symbol, number in now.items() if free and number == now[rows]}
            changed = {symbol: new for symbol, number in now.items() if symbol == length or number == now[length]}
            sizes = {**now, **wide, **changed, **({rows: count} if free else {})}
            served = _holds(asked, sizes) and all(_allowed(node, sizes) for node in holders)
            if served and all(
                _marks_rows(holders[index], value(site.key).shape[0], sizes) for index in prompt.padding_inputs
            ):
                yield sizes
                break


def _marks_rows(node: fx.Node, rows: Any, sizes: dict[Any, int]) -> bool:
    """Whether an input that marks padding has one row, or as many as the prompt."""
    return math.prod(_number(size, sizes) for size in value(node).shape[:-1]) in (1, _number(rows, sizes))


def _holds(asked: Sequence[Any], sizes: dict[Any, int]) -> bool:
    known = {symbol: sympy.Integer(number) for symbol, number in sizes.items()}
    return all(each.xreplace(known) == sympy.true for each in asked)


def _allowed(node: fx.Node, sizes: dict[Any, int]) -> bool:
    """Whether the ranges of an input's symbols allow some values."""
    shape = value(node).shape if walk.is_tensor(node) else (value(node),)
    symbols = [size for size in shape if isinstance(size, torch.SymInt)]
    return all(symbolic_shapes.may_equal(size, _number(size, sizes)) for size in symbols)


def _number(size: Any, sizes: dict[Any, int]) -> int:
    return int(expr(size).xreplace({symbol: sympy.Integer(number) for symbol, number in sizes.items()}))


def _resized(node: fx.Node, argument: Any, sizes: dict[Any, int]) -> Any:
    """An argument at other sizes: its first entries, then these again; numbers that count go on."""
    if isinstance(value(node), torch.SymInt):
        return _number(node, sizes)
    if not isinstance(argument, Tensor) or not symbolic_shapes.symbols(value(node)):
        return argument
    for dim, size in enumerate(value(node).shape):
        wanted = _number(size, sizes)
        if wanted != argument.shape[dim]:
            chosen = torch.arange(wanted, device=argument.device)
            counts = argument.dtype == torch.int64 and bool((argument.diff(dim=dim) == 1).all())
            counts = counts and argument.shape[dim] > 1  # positions go on
            taken = argument.index_select(dim, chosen % max(argument.shape[dim], 1))
            shape = [-1 if d == dim else 1 for d in range(taken.ndim)]
            argument = argument.narrow(dim, 0, 1) + chosen.view(shape) if counts else taken
    return argument


def _with_padding(prompt: PromptCase, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every row has another number of tokens of padding on its left; those behind the first have one in the middle."""
    made = list(arguments)
    for number in prompt.padding_inputs:
        column = torch.ones_like(made[number])
        for row, entries in enumerate(column.reshape(-1, column.shape[-1])):
            entries[: (row + 1) % 3] = 0
            entries[5 : 5 + min(row, 1)] = 0
        made[number] = column
    return tuple(made)


def _described(prompt: PromptCase, arguments: tuple[Any, ...], sizes: dict[Any, int], said: str) -> _PromptCall | None:
    """A call with these arguments; None if its sizes are not known."""
    site = prompt.sites[0]
    try:
        rows, queries = _number(value(site.key).shape[0], sizes), _number(site.queries, sizes)
    except TypeError:  # they are not those of inputs
        return None
    real = torch.ones(1, queries, dtype=torch.bool)
    for number in prompt.padding_inputs:
        total = arguments[number].shape[-1] if site.past_key is not None else queries
        column = arguments[number].reshape(-1, arguments[number].shape[-1])[:, total - queries : total]
        real = real & (column != 0).cpu()
    return _PromptCall(arguments, rows, queries, real, f"{said} of {queries} tokens")


def _compare(prompt: PromptCase, call: _PromptCall) -> None:
    """Run the three graphs on one prompt.

    Raises:
        UnsupportedGraph: the graphs differ.
        Unfit: the model's own graph does not run.
    """
    device = value(prompt.sites[0].query).device
    last = last_new_kind(prompt.canonical.graph, prompt.sites) if call.rows * call.queries > LONG else None
    queries = None
    if call.queries > QUERIES:
        drawn = torch.randperm(call.queries, generator=torch.Generator().manual_seed(0))[: QUERIES - 2].tolist()
        queries = torch.tensor(sorted({*drawn, 0, call.queries - 1}), device=device)
    common = (prompt.gm, prompt.canonical, prompt.sites, call.argument, call.queries, call.said)
    pair = Lockstep(*common, last, queries, call.real.to(device))
    theirs = pair.run_model()
    pair.run_canonical()
    if prompt.rewrite is None:
        return
    made = prompt.rewrite()
    visits: dict[fx.Node, Visit] = {}
    for _, site in pair.calls:
        for node in (site.call, site.lse):
            if node is not None:
                visits[made.calls[node.name]] = pair.at_call(site, node, "the prompt's attention is not the model's")
    end = None if last is None else made.calls[last.name]
    try:
        ours = GraphRun(made.gm, call.argument, visits, pair.caches).run_to(end)
    except DoesNotRun as error:
        pair.refuse(prompt.sites[0], f"the rewritten graph does not run: {error}")
    pair.compare_outputs(ours[: len(theirs)], theirs, ())
