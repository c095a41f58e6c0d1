"""The sizes and numbers among a step graph's arguments, and where to look for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.cache.handle import LayerCache
from kvpass.capture.sites import AttentionSite
from kvpass.fx import shapes, walk


@dataclasses.dataclass(frozen=True)
class Counter:
    """What a number among a graph's arguments is in a call.

    Attributes:
        counts: the tokens seen, or those that are new, as of how many logits are wanted; None for neither.
        number: what it is beyond them.
    """

    counts: Literal["seen", "new"] | None
    number: int

    @staticmethod
    def of(number: int, seen: int, new: int) -> Counter:
        """A number that equals the tokens seen is taken to count them; one new token is a constant to Dynamo."""
        if number == seen:
            return Counter("seen", 0)
        return Counter("new", 0) if number == new > 1 else Counter(None, number)


def lengths_of(caches: list[LayerCache], queries: int) -> set[int]:
    """The sizes of what follows the cache: a padding mask's, say."""
    lengths = {cache.seen for cache in caches} | {cache.stored for cache in caches}
    return lengths | {length + queries for length in lengths}


SizeSources = dict[Any, tuple[int, int]]
"""For a symbol an argument's place and the dimension to look at."""


def free_sizes(gm: fx.GraphModule, sites: list[AttentionSite]) -> tuple[SizeSources, SizeSources]:
    """Symbols that a step graph is compiled for as numbers, such as the rows, and those of other inputs.

    Of the latter some follow the cache: a padding mask's length, say.  The past's own is left out.
    """
    known: SizeSources = {}
    for index, node in enumerate(walk.placeholders(gm.graph)):
        if not walk.is_tensor(node):
            continue
        for dim, size in enumerate(walk.value(node).shape):
            if isinstance(size, torch.SymInt):
                known.setdefault(shapes.expr(size), (index, dim))
    wanted = {
        symbol for site in sites for size in walk.value(site.query).shape for symbol in shapes.expr(size).free_symbols
    }
    pasts = [past for site in sites for past in (site.past_key, site.past_value)]
    grown = {symbol for past in pasts for symbol in shapes.expr(walk.value(past).shape[2]).free_symbols}  # type: ignore[arg-type]
    others = {symbol: index for symbol, index in known.items() if symbol not in wanted | grown and symbol.is_Symbol}
    return {symbol: index for symbol, index in known.items() if symbol in wanted}, others


@dataclasses.dataclass(frozen=True)
class SizeTie:
    """A size that is one of `StepRunner.sizes` in a call, by its place among them.

    Dynamo gives the rows of a padding mask a symbol of their own if nothing says that they are those of the tokens.
    """

    arg_index: int


def ties(others: Iterable[int | None], numbers: tuple[int, ...]) -> tuple[int | SizeTie | None, ...]:
    """Sizes of other inputs, as the first of `numbers` that they equal, if there is one."""
    return tuple(SizeTie(numbers.index(size)) if size in numbers else size for size in others)


def counters(gm: fx.GraphModule) -> dict[Any, int]:
    """Symbols that are arguments themselves and no tensor's size, such as a cache's own count, and their places.

    Dynamo also hands over the strides and the offset of a tensor that is a slice of a growing one.  No node computes
    with these: the tensor that they belong to is copied where that matters, see `StepRewrite.flat`.
    """
    holders = walk.placeholders(gm.graph)
    tensors = [walk.value(node) for node in holders if walk.is_tensor(node)]
    sized = {symbol for tensor in tensors for size in tensor.shape for symbol in shapes.expr(size).free_symbols}
    found: dict[Any, int] = {}
    for index, node in enumerate(holders):
        if node.users and isinstance(walk.value(node), torch.SymInt) and shapes.expr(node).is_Symbol:
            found.setdefault(shapes.expr(node), index)
    return {symbol: index for symbol, index in found.items() if symbol not in sized}


def size_at(arguments: tuple[Any, ...], index: tuple[int, int]) -> int:
    argument, dim = index
    return int(arguments[argument].shape[dim])


def measured(gm: fx.GraphModule, arguments: tuple[Any, ...]) -> dict[Any, int]:
    """What the symbols of a graph are that are arguments or sizes of arguments."""
    found: dict[Any, int] = {}
    for node, argument in zip(walk.placeholders(gm.graph), arguments, strict=True):
        is_tensor = walk.is_tensor(node)
        sizes = zip(walk.value(node).shape, argument.shape, strict=True) if is_tensor else [(node, argument)]
        for size, number in sizes:
            if is_tensor or isinstance(walk.value(node), torch.SymInt):
                found[shapes.expr(size)] = int(number)
    return {symbol: number for symbol, number in found.items() if symbol.is_Symbol}


def lasting(asked: Iterable[Any], now: dict[Any, int], moving: set[Any]) -> Callable[[int], bool]:
    """Whether what was asked of symbols is true when so many of them have grown by a number.

    Args:
        asked: boolean expressions of them.
        now: what each is.
        moving: those that grow.
    """
    by = sympy.Symbol("by", integer=True, nonnegative=True)
    later = {symbol: sympy.Integer(number) + (by if symbol in moving else 0) for symbol, number in now.items()}
    said = sympy.And(*(each.xreplace(later) for each in asked))
    if said.free_symbols - {by}:
        return lambda _: False  # something is asked that cannot be known here
    functions = {each.func.__name__: each.func for each in said.atoms(sympy.Function)}
    holds = sympy.lambdify(by, said, [functions, "math"])
    return lambda number: bool(holds(number))
