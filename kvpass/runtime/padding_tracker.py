"""Find the padding among the new tokens of a call, and compare the mask of earlier tokens with the caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import AttentionSite
from kvpass.errors import CacheHandleError
from kvpass.fx import walk
from kvpass.policies.ranking import INT64_MAX
from kvpass.rewrite.pipeline import new_columns
from kvpass.rewrite.step_graph import PaddingInputs

SHOWN_AGAIN = (
    "the mask shows a token that it hid before, and that is therefore not in the cache; leave the mask of earlier "
    "tokens unchanged, or pass the whole conversation again"
)
CHANGED_SINCE = (
    "the mask of earlier tokens has changed since they were cached; on a GPU a cache cannot follow that: start again "
    "with the whole conversation, or leave its mask unchanged"
)
HIDDEN_BEFORE = (
    "earlier masks hid padding, which is therefore not in the cache, and nothing proves that the mask of this call "
    "hides it too; pass rows of equal length, or one row at a time"
)


class PaddingTracker:
    """The padding among the new tokens of a step graph's calls.

    Attributes:
        inputs: for each site the argument indices of the inputs that mark padding.
    """

    def __init__(self, inputs: Sequence[tuple[int, ...]]) -> None:
        self.inputs = inputs

    def check_hidden(self, caches: list[LayerCache], sites: Sequence[AttentionSite]) -> None:
        """Check that this step's mask can hide padding, which is not cached; some models mask only their prompts.

        Raises:
            UnsupportedGraph: padding was left out, and no input is known to mark padding in this graph.
        """
        for site, cache, indices in zip(sites, caches, self.inputs, strict=True):
            if cache.absent.shape[1] and not indices:
                walk.refuse(site.call, HIDDEN_BEFORE)

    def ones_for_cached(self, caches: list[LayerCache], arguments: tuple[Any, ...], query_len: int) -> frozenset[int]:
        """Return the argument indices of the padding inputs that are 1 for every cached token, as in earlier calls.

        The inputs of one cache are compared together, because one of them may show a token that another one hides.

        The rewritten graph relies on these ones; of other inputs, it reads the entry of each slot.  On a GPU the host
        does not wait for the comparison: if it fails, a later step raises the error.

        Raises:
            CacheHandleError: the mask shows a token that was left out of the cache as padding.
        """
        changed = set[int]()
        for indices, cache in dict(zip(self.inputs, caches, strict=True)).items():
            if not indices:
                continue
            same, hides_absent = compare_with_cache(cache, *(arguments[index] for index in sorted(indices)))
            if same.is_cuda and query_len == 1:
                cache.deferred_checks.add(same & hides_absent, CacheHandleError(CHANGED_SINCE))
                continue
            if not bool(hides_absent):
                raise CacheHandleError(SHOWN_AGAIN)
            if not bool(same):
                changed.update(indices)
        return frozenset(index for indices in self.inputs for index in indices) - changed

    def as_padding_inputs(self, ones_for_cached: frozenset[int], placeholders: Sequence[fx.Node]) -> PaddingInputs:
        """Return the inputs for a rewrite, as nodes; from the result of `ones_for_cached`."""
        by_layer = tuple(tuple(placeholders[index] for index in indices) for indices in self.inputs)
        return PaddingInputs(by_layer, frozenset(placeholders[index] for index in ones_for_cached))

    def valid_tokens(self, layer: int, cache: LayerCache, arguments: tuple[Any, ...], query_len: int) -> Tensor:
        """Return bool [B, q] for a layer, False for padding among the new tokens."""
        columns = _columns(self.inputs[layer], arguments, cache.length, query_len)
        return ~padding_from_columns(columns, cache.layout.batch, query_len, cache.layout.device)

    def valid_rows(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> list[list[bool] | None]:
        """Return for each layer which rows of a single token are not padding, for policies with a clock.

        The entry of a layer is None if no row has padding.
        """
        if not any(cache.clocks for cache in caches):
            return [None] * len(caches)
        padding_by_layer = self._padding(caches, arguments, caches[0].length, 1)
        return [None if padding is None else (~padding[:, 0]).tolist() for padding in padding_by_layer]

    def record_padding(self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int, query_len: int) -> None:
        """Add the indices of new padding, counted from `before`, to the caches, except for one token on a GPU."""
        for cache, padding in zip(caches, self._padding(caches, arguments, before, query_len), strict=True):
            if padding is not None:
                cache.absent = torch.cat([cache.absent, true_indices(padding, before)], 1)

    def _padding(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int, query_len: int
    ) -> list[Tensor | None]:
        """Return for each layer bool [B, q], True for padding; None without padding, or if the host would wait."""
        padding_by_inputs: dict[tuple[int, ...], Tensor | None] = {}
        for cache, indices in zip(caches, self.inputs, strict=True):
            if indices not in padding_by_inputs:
                columns = _columns(indices, arguments, before, query_len)
                waits = query_len == 1 and bool(columns) and columns[0].is_cuda
                if waits or all(bool(column.all()) for column in columns):
                    padding_by_inputs[indices] = None
                else:
                    padding_by_inputs[indices] = padding_from_columns(
                        columns, cache.layout.batch, query_len, columns[0].device
                    )
        return [padding_by_inputs[indices] for indices in self.inputs]


def _columns(indices: tuple[int, ...], arguments: tuple[Any, ...], before: int, query_len: int) -> list[Tensor]:
    """Return the new tokens' entries in the inputs that mark padding, each [B or 1, q] or [q]."""
    return [new_columns(arguments[index], before, query_len) for index in indices]


def true_indices(mask: Tensor, start: int = 0) -> Tensor:
    """Return the indices where bool [B, n] is true: int64 [B, P], padded with -1."""
    most = int(mask.sum(-1).max())
    indices = torch.arange(start, start + mask.shape[1], device=mask.device)
    ordered = torch.where(mask, indices, INT64_MAX).sort(-1).values[:, :most]
    return torch.where(ordered == INT64_MAX, -1, ordered)


def compare_with_cache(cache: LayerCache, *columns: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the earlier tokens' entries in all inputs that mark padding in a cache with its contents.

    A token is padding if any input is zero there.

    Args:
        columns: the inputs, each [B or 1, S] or [S].

    Returns:
        Two bool tensors on the device.  (1) Every input is 1 for each real cached token, some input is 0 for each
        padding token before the new ones, and entries of new tokens are 0 or 1.  (2) Some input is 0 for each token
        that was left out of the cache as padding.  An input that is shorter than the cache makes (1) false, and (2)
        ignores the tokens after its end.

    Raises:
        CacheHandleError: an input has other rows than the cache.
    """
    inputs, absent = [column[None] if column.ndim == 1 else column.flatten(0, -2) for column in columns], cache.absent
    if wrong := [len(each) for each in inputs if len(each) not in (1, cache.layout.batch)]:
        raise CacheHandleError(f"the attention mask has {wrong[0]} rows, and the cache has {cache.layout.batch}")
    length = min(cache.length, *(each.shape[1] for each in inputs))
    before, new = [each[:, :length] for each in inputs], [each[:, cache.length :] for each in inputs]
    nonzero = functools.reduce(torch.logical_and, [each != 0 for each in before])
    ones = functools.reduce(torch.logical_and, [each == 1 for each in before])
    shown = torch.zeros((), dtype=torch.bool, device=absent.device)
    if absent.shape[1] and length:
        row = torch.arange(absent.shape[0], device=absent.device)[:, None].clamp(max=nonzero.shape[0] - 1)
        is_there = (absent >= 0) & (absent < length)
        shown = (nonzero[row, absent.clamp(0, length - 1)] & is_there).any()
    same = (ones.sum(-1) == cache.slots.seen) & (nonzero.sum(-1) == cache.slots.seen)
    binary = torch.stack([((x == 0) | (x == 1)).all() for x in new]).all()
    return same.all() & binary & (length == cache.length), ~shown


def padding_from_columns(columns: list[Tensor], rows: int, query_len: int, device: torch.device) -> Tensor:
    """Mark the tokens that are zero in any of the columns: bool [B, q]."""
    none = torch.zeros(rows, query_len, dtype=torch.bool, device=device)
    return torch.stack([none, *((column == 0).expand(rows, -1) for column in columns)]).any(0)
