"""The sizes and numbers among a step graph's arguments, and where to look for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx

from kvpass import graphs
from kvpass.capture.sites import AttentionSite
from kvpass.runtime.handle import LayerCache


@dataclasses.dataclass(frozen=True)
class Counter:
    """A number among a graph's arguments: the tokens seen plus `number`, or `number` itself."""

    counts: bool
    number: int


def lengths_of(caches: list[LayerCache], queries: int) -> set[int]:
    """The sizes of what follows the cache: a padding mask's, say."""
    lengths = {cache.seen for cache in caches} | {cache.stored for cache in caches}
    return lengths | {length + queries for length in lengths}


Places = dict[Any, tuple[int, int]]
"""For a symbol an argument's place and the dimension to look at."""


def free_sizes(gm: fx.GraphModule, sites: list[AttentionSite]) -> tuple[Places, Places]:
    """Symbols that a step graph is compiled for as numbers, such as the rows, and those of other inputs.

    Of the latter some follow the cache: a padding mask's length, say.  The past's own is left out.
    """
    known: Places = {}
    for place, node in enumerate(graphs.placeholders(gm.graph)):
        if not graphs.is_tensor(node):
            continue
        for dim, size in enumerate(graphs.value(node).shape):
            if isinstance(size, torch.SymInt):
                known.setdefault(graphs.expr(size), (place, dim))
    wanted = {
        symbol for site in sites for size in graphs.value(site.query).shape for symbol in graphs.expr(size).free_symbols
    }
    pasts = [past for site in sites for past in (site.past_key, site.past_value)]
    grown = {symbol for past in pasts for symbol in graphs.expr(graphs.value(past).shape[2]).free_symbols}  # type: ignore[arg-type]
    others = {symbol: place for symbol, place in known.items() if symbol not in wanted | grown and symbol.is_Symbol}
    return {symbol: place for symbol, place in known.items() if symbol in wanted}, others


def counters(gm: fx.GraphModule) -> dict[Any, int]:
    """Symbols that are arguments themselves and no tensor's size, such as a cache's own count, and their places.

    Dynamo also hands over the strides and the offset of a tensor that is a slice of a growing one.  No node computes
    with these: the tensor that they belong to is copied where that matters, see `StepRewrite.flat`.
    """
    holders = graphs.placeholders(gm.graph)
    tensors = [graphs.value(node) for node in holders if graphs.is_tensor(node)]
    sized = {symbol for tensor in tensors for size in tensor.shape for symbol in graphs.expr(size).free_symbols}
    found: dict[Any, int] = {}
    for place, node in enumerate(holders):
        if node.users and isinstance(graphs.value(node), torch.SymInt) and graphs.expr(node).is_Symbol:
            found.setdefault(graphs.expr(node), place)
    return {symbol: place for symbol, place in found.items() if symbol not in sized}


def size_at(arguments: tuple[Any, ...], place: tuple[int, int]) -> int:
    argument, dim = place
    return int(arguments[argument].shape[dim])
