"""Sizes and integers among a step graph's arguments, and the argument indices at which to read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.cache.handle import LayerCache
from kvpass.capture.canonical import AttentionSite
from kvpass.fx import shapes, walk


@dataclasses.dataclass(frozen=True)
class Counter:
    """Meaning of an integer argument of a graph in one call.

    Attributes:
        counts: "seen" for the tokens seen, "new" for the new tokens, as in the number of wanted logits; None for
            neither.
        number: the difference to that count.
    """

    counts: Literal["seen", "new"] | None
    number: int

    @staticmethod
    def of(number: int, seen: int, new: int) -> Counter:
        """Classify an integer argument by the count that it equals: the tokens seen, the new tokens, or neither.

        A single new token is a constant to Dynamo, so the number 1 counts nothing.
        """
        if number == seen:
            return Counter("seen", 0)
        return Counter("new", 0) if number == new > 1 else Counter(None, number)


def lengths_of(caches: list[LayerCache], queries: int) -> set[int]:
    """Return the lengths that an input may have if it grows with the cache, as a padding mask does."""
    lengths = {cache.seen for cache in caches} | {cache.stored for cache in caches}
    return lengths | {length + queries for length in lengths}


SizeSources = dict[Any, tuple[int, int]]
"""For each symbol, the index of an argument and its dimension of this size."""


def free_sizes(gm: fx.GraphModule, sites: list[AttentionSite]) -> tuple[SizeSources, SizeSources]:
    """Return the sizes that a step graph is specialised for, such as the rows, and the sizes of other inputs.

    Some of the latter grow with the cache, as the length of a padding mask does.  The sizes of the past keys and values
    are in neither.
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
    grown = {symbol for site in sites for symbol in site.growing}
    others = {symbol: index for symbol, index in known.items() if symbol not in wanted | grown and symbol.is_Symbol}
    return {symbol: index for symbol, index in known.items() if symbol in wanted}, others


@dataclasses.dataclass(frozen=True)
class SizeTie:
    """A size that equals one of `StepRunner.sizes` in a call, given by its index among them.

    Dynamo gives the rows of a padding mask a symbol of their own if the graph does not relate them to the tokens' rows.
    """

    arg_index: int


def ties(others: Iterable[int | None], numbers: tuple[int, ...]) -> tuple[int | SizeTie | None, ...]:
    """Replace each size of other inputs by a `SizeTie` to the first equal one of `numbers`, if there is one."""
    return tuple(SizeTie(numbers.index(size)) if size in numbers else size for size in others)


def counters(gm: fx.GraphModule) -> dict[Any, int]:
    """Return the symbols that are arguments but no tensor's size, with their argument indices.

    A cache's own token count is one of them.  Dynamo also passes the strides and the offset of a tensor that is a slice
    of a growing tensor.  No node computes with those: the tensor that they belong to is copied where that matters, see
    `StepRewrite.flat`.
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


def lasting(asked: Iterable[Any], now: dict[Any, int], moving: set[Any]) -> Callable[[int], bool]:
    """Return a predicate that tells whether guards hold once some symbols have grown by a given number.

    Args:
        asked: the guards: boolean expressions of the symbols.
        now: the present value of each symbol.
        moving: the symbols that grow.
    """
    by = sympy.Symbol("by", integer=True, nonnegative=True)
    later = {symbol: sympy.Integer(number) + (by if symbol in moving else 0) for symbol, number in now.items()}
    said = sympy.And(*(each.xreplace(later) for each in asked))
    if said.free_symbols - {by}:
        return lambda _: False  # a guard depends on a symbol of unknown value
    functions = {each.func.__name__: each.func for each in said.atoms(sympy.Function)}
    holds = sympy.lambdify(by, said, [functions, "math"])
    return lambda number: bool(holds(number))
