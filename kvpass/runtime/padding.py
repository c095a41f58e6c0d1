"""Padding among the tokens of a conversation, read from the inputs that mark it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.padding_analysis import padding_inputs
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.fx import walk
from kvpass.policies.ranking import LATE
from kvpass.rewrite.pipeline import of_new
from kvpass.rewrite.step_graph import PaddingInputs

SHOWN_AGAIN = (
    "a token that the mask hid when it came, and that was left out of the cache for that, is no longer hidden; give "
    "the whole conversation anew, or leave its mask as it was"
)
HIDDEN_BEFORE = (
    "padding was hidden when it came, and left out of the cache for that, and nothing proves that the mask of this "
    "call hides it too; give rows of one length, or one row at a time"
)


def wrong_mask(gm: fx.GraphModule, sites: Sequence[AttentionSite], arguments: Sequence[Any], tokens: int) -> str | None:
    """Describe what is wrong with an attention mask that does not have `tokens` columns; None if none is wrong.

    An encoder's mask, which no self-attention reads, has columns of its own.
    """
    masks = {each.mask for site in sites for each in site.all if isinstance(each.mask, fx.Node)}
    reads = {node for mask in masks for node in walk.ancestors(mask)}
    for node, given in zip(walk.placeholders(gm.graph), arguments, strict=True):
        if node not in reads or "attention_mask" not in node.name:
            continue
        if isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] != tokens:
            return (
                f"attention_mask has {given.shape[1]} columns, {tokens} are needed: one for each token that the cache "
                "has seen and for each new one"
            )
    return None


def inputs_of_sites(gm: fx.GraphModule, sites: list[AttentionSite], step: bool) -> list[tuple[fx.Node, ...]]:
    """Return for each site the inputs that mark padding in all masks on its cache."""
    masks = [tuple(each.mask for each in site.all) for site in sites]
    known = {among: padding_inputs(gm, list(among), step) for among in dict.fromkeys(masks)}
    return [known[among] for among in masks]


class PaddingTracker:
    """The padding among the new tokens of a step graph's calls.

    Attributes:
        inputs: for each site the inputs that mark padding.
        indices: the argument index of each of these inputs.
    """

    def __init__(self, gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        holders = walk.placeholders(gm.graph)
        self._sites = sites
        self.inputs = inputs_of_sites(gm, sites, step=True)
        self.indices = {node: holders.index(node) for nodes in self.inputs for node in nodes}

    def check_hidden(self, caches: list[LayerCache]) -> None:
        """Check that the graph can hide padding that was left out of the cache; some models mask their prompts alone.

        Raises:
            UnsupportedGraph: padding was left out, and no input is known to mark padding in this graph.
        """
        for site, cache, nodes in zip(self._sites, caches, self.inputs, strict=True):
            if cache.absent.shape[1] and not nodes:
                raise UnsupportedGraph(f"{walk.source_line(site.call)}: {HIDDEN_BEFORE}")

    def known(self, caches: list[LayerCache], arguments: tuple[Any, ...], queries: int) -> frozenset[int]:
        """Return the argument indices of the padding inputs that agree with their earlier values for all cached tokens.

        The rewritten graph takes these inputs to be one for every cached token; of other inputs, it looks up the entry
        of each slot.  On a GPU the host does not wait for the comparison: if it fails, a later step raises the error.

        Raises:
            CacheHandleError: the mask shows a token that was left out of the cache as padding.
        """
        known = set()
        for node, index in self.indices.items():
            cache = next(cache for cache, nodes in zip(caches, self.inputs, strict=True) if node in nodes)
            same, hides_absent = agreement(cache, arguments[index])
            if same.is_cuda and queries == 1:
                cache.deferred_checks.add(same & hides_absent)
                known.add(index)
                continue
            if not bool(hides_absent):
                raise CacheHandleError(SHOWN_AGAIN)
            if bool(same):
                known.add(index)
        return frozenset(known)

    def as_known(self, known: frozenset[int]) -> PaddingInputs:
        """Return the inputs for a rewrite; `known` is a result of the method `known`."""
        return PaddingInputs(tuple(self.inputs), frozenset(n for n, index in self.indices.items() if index in known))

    def valid(self, layer: int, cache: LayerCache, arguments: tuple[Any, ...], queries: int) -> Tensor:
        """Return bool [B, q] for a layer, False for padding among the new tokens."""
        columns = self._columns(self.inputs[layer], arguments, cache.seen, queries)
        return ~padding_of(columns, cache.layout.batch, queries, cache.layout.device)

    def valid_rows(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> list[list[bool] | None]:
        """Return for each layer which rows of a single token are not padding, for policies with a clock.

        The entry of a layer is None if no row has padding.
        """
        if not any(cache.clocks for cache in caches):
            return [None] * len(caches)
        found = self._padding(caches, arguments, caches[0].seen, 1)
        return [None if padding is None else (~padding[:, 0]).tolist() for padding in found]

    def note(self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int, queries: int) -> None:
        """Add the positions of new padding to the caches, except for one token on a GPU, which the device counts.

        Args:
            before: the number of tokens seen before the call.
        """
        for cache, padding in zip(caches, self._padding(caches, arguments, before, queries), strict=True):
            if padding is not None:
                cache.absent = torch.cat([cache.absent, indices_of(padding, before)], 1)

    def _padding(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int, queries: int
    ) -> list[Tensor | None]:
        """Return for each layer bool [B, q], True for padding; None without padding, or if the host would wait."""
        found: dict[tuple[fx.Node, ...], Tensor | None] = {}
        for cache, nodes in zip(caches, self.inputs, strict=True):
            if nodes not in found:
                columns = self._columns(nodes, arguments, before, queries)
                waits = queries == 1 and bool(columns) and columns[0].is_cuda
                if waits or all(bool(column.all()) for column in columns):
                    found[nodes] = None
                else:
                    found[nodes] = padding_of(columns, cache.layout.batch, queries, columns[0].device)
        return [found[nodes] for nodes in self.inputs]

    def _columns(
        self, nodes: tuple[fx.Node, ...], arguments: tuple[Any, ...], before: int, queries: int
    ) -> list[Tensor]:
        """Return the new tokens' entries in the inputs that mark padding, each [B or 1, q] or [q]."""
        return [of_new(arguments[self.indices[node]], before, queries) for node in nodes]


def indices_of(chosen: Tensor, start: int = 0) -> Tensor:
    """Return the indices where bool [B, n] is true: int64 [B, P], counted from `start`, -1 after a row's last one."""
    most = int(chosen.sum(-1).max())
    indices = torch.arange(start, start + chosen.shape[1], device=chosen.device)
    ordered = torch.where(chosen, indices, LATE).sort(-1).values[:, :most]
    return torch.where(ordered == LATE, -1, ordered)


def agreement(cache: LayerCache, column: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the earlier tokens' entries in an input that marks padding with the contents of the cache.

    Args:
        column: the input, [B or 1, S] or [S].

    Returns:
        Two bools on the device: whether the input has one for every real token and zero for all others, and whether it
        has zero for every token that was left out of the cache as padding.
    """
    before, absent = column.reshape(-1, column.shape[-1])[:, : cache.seen], cache.absent
    shown = torch.zeros((), dtype=torch.bool, device=absent.device)
    if absent.shape[1]:
        row = torch.arange(absent.shape[0], device=absent.device)[:, None].clamp(max=before.shape[0] - 1)
        shown = ((before[row, absent.clamp(min=0)] != 0) & (absent >= 0)).any()
    same = ((before == 1).sum(-1) == cache.valid_seen) & ((before != 0).sum(-1) == cache.valid_seen)
    return same.all(), ~shown


def padding_of(columns: list[Tensor], rows: int, queries: int, device: torch.device) -> Tensor:
    """Return bool [B, q], true for tokens that are zero in any of the columns, each [B or 1, q] or [q]."""
    none = torch.zeros(rows, queries, dtype=torch.bool, device=device)
    return torch.stack([none, *((column == 0).expand(rows, -1) for column in columns)]).any(0)
