"""Read sizes and integers among a step graph's arguments, and find which of them follow the cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import AttentionSite
from kvpass.fx import shapes, walk
from kvpass.fx.shapes import SizeResolver
from kvpass.runtime.lru_cache import LruCache
from kvpass.runtime.variants import DynamicDims

MAX_UNCLEAR = 4  # sizes that may or may not follow the cache; all combinations are tried

SizeSources = dict[Any, tuple[int, int]]
"""For each symbol, the index of an argument and its dimension of this size."""

Counted = Literal["seen", "new"] | int
"""The role of an integer argument: it counts the tokens seen, or the new tokens, or is another number."""

SizeInterpretation = tuple[int | None, ...]
"""An interpretation of the sizes of other inputs, None for sizes that follow the cache."""


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """The sizes of one call."""

    numbers: tuple[int, ...]  # the values of `StepSizeReader.sources`, such as rows and new tokens
    counters: tuple[Counted, ...]  # what each of `StepSizeReader.counters` counts
    windows: tuple[int | None, ...]  # for each layer, the window if it is full


class StepSizeReader:
    """The sizes of a step graph.

    Attributes:
        sources: the sizes that the graph is specialised for, such as the rows.
        other_sources: the sizes of other inputs; some follow the cache, such as the length of a padding mask.
        counters: the symbols that are arguments but no tensor's size, with their argument indices.
        rewritten_interpretations: interpretations of `other_sources` for which the graph has been rewritten.
    """

    def __init__(self, canonical_gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        self._canonical_gm, self._sites, self.counters = canonical_gm, sites, _counters(canonical_gm)
        self.sources, self.other_sources = _free_sizes(canonical_gm, sites)
        self.rewritten_interpretations = LruCache[SizeInterpretation, bool]()
        self._new_tokens = LruCache[tuple[int, ...], int]()
        self._resolved = LruCache[Any, SizeResolver]()

    def numbers(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the values of `sources`."""
        return tuple(int(arguments[index].shape[dim]) for index, dim in self.sources.values())

    def query_len(self, arguments: tuple[Any, ...]) -> int:
        """Return the number of new tokens q."""
        return self._new_token_count(self.numbers(arguments))

    def _new_token_count(self, numbers: tuple[int, ...]) -> int:
        count = self._new_tokens.find(numbers)
        if count is None:
            numbers_by_symbol = dict(zip(self.sources, numbers, strict=True))
            count = self._new_tokens.put(numbers, shapes.number(self._sites[0].query_len, numbers_by_symbol))
        return count

    def call_sizes(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> CallSizes:
        """Return the sizes of a call."""
        windows = tuple(cache.window if cache.stored_tokens < cache.length else None for cache in caches)
        numbers, length = self.numbers(arguments), caches[0].length
        new = self._new_token_count(numbers)
        counted: dict[int, Counted] = {length: "seen"}
        if new > 1:  # a single new token is a constant to Dynamo, so the number 1 counts nothing
            counted.setdefault(new, "new")
        counters = (arguments[index] for index in self.counters.values())
        return CallSizes(numbers, tuple(counted.get(number, number) for number in counters), windows)

    def size_interpretations(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> list[SizeInterpretation]:
        """Return the possible interpretations of `other_sources` in a call; one if it has served an earlier call.

        A size that follows the cache equals the tokens seen, but another size, such as the length of an encoder's
        input, may equal them by chance.  Interpretations in which more sizes follow the cache come first.
        """
        sizes = [int(arguments[index].shape[dim]) for index, dim in self.other_sources.values()]
        lengths = {cache.length for cache in caches} | {cache.stored_tokens for cache in caches}
        lengths |= {length + self.query_len(arguments) for length in lengths}
        unclear = [index for index, size in enumerate(sizes) if size in lengths]
        counts = range(len(unclear) + 1) if len(unclear) <= MAX_UNCLEAR else (0, len(unclear))
        fixed = [set(indices) for count in counts for indices in itertools.combinations(unclear, count)]
        interpretations = [
            tuple(None if index in unclear and index not in constant else size for index, size in enumerate(sizes))
            for constant in fixed
        ]
        worked = [each for each in interpretations if self.rewritten_interpretations.find(each)]
        return worked[-1:] or interpretations

    def share_symbols(self, other_sizes: SizeInterpretation, numbers: tuple[int, ...]) -> tuple[Any, ...]:
        """Replace each size that equals one of `numbers` by its symbol, so that dynamic code keeps both equal.

        Dynamo gives the rows of a padding mask another symbol if the graph does not relate them to the rows of the
        tokens.
        """
        symbols: dict[Any, Any] = dict(zip(reversed(numbers), reversed(self.sources), strict=True))
        return tuple(symbols.get(size, size) for size in other_sizes)

    def resolve(
        self, call_sizes: CallSizes, other_sizes: tuple[Any, ...], dynamic: DynamicDims | None = None
    ) -> SizeResolver:
        """Return the meaning of the graph's symbols in a call, perhaps with some sizes dynamic."""
        key = call_sizes, other_sizes, dynamic
        return self._resolved.find(key) or self._resolved.put(key, self._resolve(call_sizes, other_sizes, dynamic))

    def _resolve(
        self, call_sizes: CallSizes, other_sizes: tuple[Any, ...], dynamic: DynamicDims | None
    ) -> SizeResolver:
        values: dict[Any, Any] = dict(zip(self.sources, call_sizes.numbers, strict=True))
        new: Any = self._new_token_count(call_sizes.numbers)
        if dynamic:
            symbols = dynamic.symbols
            values.update({symbol: symbols[index] for index, symbol in enumerate(self.sources) if index in symbols})
            new = shapes.expr(self._sites[0].query_len).subs(values)
        lengths = []
        for symbol, counted in zip(self.counters, call_sizes.counters, strict=True):
            if counted == "seen":
                lengths.append(symbol)
            else:
                values[symbol] = new if counted == "new" else counted
        for symbol, size in zip(self.other_sources, other_sizes, strict=True):
            if size is not None:
                values[symbol] = values.get(size, size)  # a tied size is the symbol of a source
        for site, window in zip(self._sites, call_sizes.windows, strict=True):
            for stored in (shapes.expr(walk.example_value(past).shape[2]) for past in site.pasts):
                if window is None:
                    lengths.append(stored)
                else:
                    values.update(dict.fromkeys(stored.free_symbols, window))
        least = max((window + 1 for window in call_sizes.windows if window is not None), default=0)
        whole = [site for site, window in zip(self._sites, call_sizes.windows, strict=True) if window is None]
        totals = {shapes.expr(size): size for size in (walk.example_value(site.grown_key).shape[2] for site in whole)}
        sizes = dynamic.sizes if dynamic else None
        queries = sizes.size(new) if sizes else new
        return SizeResolver(tuple(dict.fromkeys(lengths)), values, queries, least, tuple(totals.values()), sizes)

    def holds_after(
        self, other_sizes: SizeInterpretation, arguments: tuple[Any, ...], length: int
    ) -> Callable[[int], bool]:
        """Return a predicate of n: whether the graph's guards are true n tokens after a call."""
        following = {symbol for symbol, size in zip(self.other_sources, other_sizes, strict=True) if size is None}
        counting = {symbol for symbol, index in self.counters.items() if arguments[index] == length}
        now = shapes.measure_symbols(self._canonical_gm.graph, arguments)
        growing = {symbol for site in self._sites for symbol in site.length_symbols if now.get(symbol) == length}
        return guard_predicate(shapes.guards(self._canonical_gm.graph), now, following | counting | growing)


def _free_sizes(canonical_gm: fx.GraphModule, sites: list[AttentionSite]) -> tuple[SizeSources, SizeSources]:
    """Return `StepSizeReader.sources` and `other_sources`; the sizes of the past keys and values are in neither."""
    sources: SizeSources = {}
    for index, node in enumerate(walk.placeholders(canonical_gm.graph)):
        for dim, size in enumerate(walk.example_value(node).shape if walk.is_tensor(node) else ()):
            if isinstance(size, torch.SymInt):
                sources.setdefault(shapes.expr(size), (index, dim))
    query_symbols = {
        symbol
        for site in sites
        for size in walk.example_value(site.query).shape
        for symbol in shapes.expr(size).free_symbols
    }
    grown = {symbol for site in sites for symbol in site.length_symbols}
    excluded = query_symbols | grown
    others = {symbol: index for symbol, index in sources.items() if symbol not in excluded and symbol.is_Symbol}
    return {symbol: index for symbol, index in sources.items() if symbol in query_symbols}, others


def _counters(canonical_gm: fx.GraphModule) -> dict[Any, int]:
    """Return the symbols that are arguments but no tensor's size, with their argument indices.

    A cache's own token count is one of them.  Dynamo also passes the strides and the offset of a tensor that is a slice
    of a growing tensor.  No node computes with these: where they matter, the tensor is copied, see
    `StepSignature.flat_arguments`.
    """
    placeholders = walk.placeholders(canonical_gm.graph)
    tensors = [walk.example_value(node) for node in placeholders if walk.is_tensor(node)]
    sized = {symbol for tensor in tensors for size in tensor.shape for symbol in shapes.expr(size).free_symbols}
    counters: dict[Any, int] = {}
    for index, node in enumerate(placeholders):
        if node.users and isinstance(walk.example_value(node), torch.SymInt) and shapes.expr(node).is_Symbol:
            counters.setdefault(shapes.expr(node), index)
    return {symbol: index for symbol, index in counters.items() if symbol not in sized}


def guard_predicate(guards: Iterable[Any], now: dict[Any, int], growing: set[Any]) -> Callable[[int], bool]:
    """Return a predicate of n: whether guards are true after the symbols in `growing` have grown by n.

    Args:
        guards: boolean expressions of the symbols.
        now: the present value of each symbol.
        growing: the symbols that grow.
    """
    growth = sympy.Symbol("n", integer=True, nonnegative=True)
    later = {symbol: sympy.Integer(number) + (growth if symbol in growing else 0) for symbol, number in now.items()}
    condition = sympy.And(*(each.xreplace(later) for each in guards))
    if condition.free_symbols - {growth}:
        return lambda _: False  # a guard depends on a symbol of unknown value
    functions = {each.func.__name__: each.func for each in condition.atoms(sympy.Function)}
    holds = sympy.lambdify(growth, condition, [functions, "math"])
    return lambda number: bool(holds(number))
