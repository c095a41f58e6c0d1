"""Hold the rows of a batch in which each request has one, on the device.

A prompt runs in a batch of one row, and then its slots are copied into a free row; the other rows continue on the same
graph.  Slots have a fixed size, so there are no pages, and no row moves.

Rows have seen different numbers of tokens, but the masks of a model count positions in one padded sequence.  So rows
are treated as padded on the left: all are as long as the longest, and a row's tokens are at its end.  A model that
takes no position ids would count that padding, so its requests have the batch alone, at their own length.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from kvpass.cache.handle import Handle
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.model_cache import caches_in, other_integers, refresh_handles
from kvpass.cache.slots import AnySlots, empty_slots
from kvpass.decoding.requests import MAX_STOPS, Request
from kvpass.decoding.sampling import RowSampling
from kvpass.decoding.stepping import DecodeState, LoopContext
from kvpass.errors import BudgetError, CacheHandleError
from kvpass.runtime.cache_changes import equalize_layouts, mark_addresses_static


class RequestBatch(DecodeState):
    """The rows of a batch of requests on the device.

    Attributes:
        generated: int64 [R], the number of tokens that each row has generated.
        max_new_tokens: int64 [R], the largest number of tokens for each row.
        stops: int64 [R, MAX_STOPS], the stop tokens of each row, -1 after the last.
        sampling: the settings of sampling of each row.
    """

    def __init__(self, loop: LoopContext, cache: Any, rows: int) -> None:
        super().__init__(loop, cache, torch.zeros(rows, 1, dtype=torch.int64, device=loop.device))
        self.stopped.fill_(True)
        self.generated, self.max_new_tokens = self.position.new_zeros(rows), self.position.new_ones(rows)
        self.stops = self.position.new_full((rows, MAX_STOPS), -1)
        self.sampling = RowSampling.of(rows, loop.device)

    @staticmethod
    def of(loop: LoopContext, cache: Any, rows: int) -> RequestBatch:
        """Return free rows for requests whose caches are like `cache`, which is consumed.

        Raises:
            BudgetError: there is no memory for `rows` rows.
            CacheHandleError: the model's cache holds more than slots.
        """
        one = caches_in(cache)
        needed = rows * sum(layer.slots.nbytes for layer in one)
        free = _free_bytes(loop.device)
        if free is not None and needed > free:
            raise BudgetError(
                f"rows={rows}: their slots take {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free"
            )
        enlarged = {id(layer): _with_rows(layer, rows) for layer in one}
        return RequestBatch(loop, refresh_handles(cache, 0, enlarged), rows)

    def fit_slots(self, caches: Sequence[LayerCache]) -> None:
        """Give a prompt's caches and the rows equally many slots, or raise CacheHandleError if they do not fit."""
        for layer, one in zip(self.caches, caches, strict=True):
            equalize_layouts(layer, one)
            found, here = (one.layout.capacity, one.slots.capacity), (layer.layout.capacity, layer.slots.capacity)
            if found != here:
                raise CacheHandleError(
                    f"{one.layout.policy} needs {one.slots.capacity} slots for this prompt and the rows have "
                    f"{layer.slots.capacity}: requests need a policy with the same number of slots for every prompt"
                )

    def insert(self, row: int, caches: Sequence[LayerCache], request: Request, logits: Tensor) -> int:
        """Copy a request's caches of one row into a row; return the token sampled from its logits [1, vocabulary]."""
        length = caches[0].length
        self.set_length(max(length, self.length) if self.loop.takes_positions else length)
        for layer, one in zip(self.caches, caches, strict=True):
            _write_row(layer, row, one)
        self.sampling.set_row(row, request.sampling)
        first = int(self.sampling.of_row(row).sample(logits, torch.zeros(1, dtype=torch.int64, device=logits.device)))
        ended = first in request.stop or request.max_new_tokens == 1
        self.ids[row], self.position[row] = first, length - ended
        self.generated[row], self.max_new_tokens[row] = 1, request.max_new_tokens
        self.stops[row] = torch.tensor([*request.stop, *[-1] * (MAX_STOPS - len(request.stop))])
        self.stopped[row] = ended
        return first

    def cached_tokens(self, row: int) -> float:
        """Return how many tokens are in a row's slots, the mean over layers and heads."""
        cached = [[(each.position[row] >= 0).sum() for each in layer.slots.by_class] for layer in self.caches]
        counts = [
            torch.stack(parts).sum() / x.layout.metadata_heads for x, parts in zip(self.caches, cached, strict=True)
        ]
        return float(torch.stack(counts).mean())

    @torch.inference_mode(False)  # as slots are made, which steps outside of inference mode also write to
    def extract(self, row: int, length: int) -> Any:
        """Return a model's cache object with a copy of one row, for `length` tokens, padding included."""
        self.refresh_cache_object()
        one = {id(layer): _row_of(layer, row, length) for layer in self.caches}
        # shallow, since only the handles are replaced, and the batch keeps its own
        cache = copy.copy(self.cache)
        if hasattr(cache, "layers"):
            cache.layers = [copy.copy(layer) for layer in cache.layers]
        return refresh_handles(cache, length - self.length, one)

    @property
    def length(self) -> int:
        """Number of tokens that all rows have seen, padding included."""
        return self.caches[0].length

    def set_length(self, length: int) -> None:
        """Give all rows the same length by padding them on the left.

        With a policy that evicts, rows only grow.  They shrink too with a policy that keeps every token, which has
        slots for a limited length, and for a model that takes no position ids.
        """
        shift, only_grows = length - self.length, self.caches[0].layout.policy.evicts and self.loop.takes_positions
        if shift == 0 or (shift < 0 and only_grows):
            return
        if self.step is not None:
            self.step.shift_counts(shift)
        for layer in self.caches:
            _pad_left(layer.slots, shift)
            layer.length += shift
        self.seen += shift
        if self.step is None:
            self.cache = refresh_handles(self.cache, shift)

    def run(self, count: int, exact: bool = False) -> list[list[int]]:
        """Decode `count` tokens for each row; on a CPU, and with `exact`, stop as soon as a row ends.

        A policy's clocks advance for all rows together, so a row whose cache is copied at its end must stop exactly
        there.
        """
        self.invalidate_if_model_changed()
        exact = exact and bool(self.caches[0].clocks)
        ended = int(self.stopped.sum()) if exact or self.stopped.device.type == "cpu" else None
        for _ in range(min(count, len(self.token_buffer))):
            self.advance()
            if ended is not None and int(self.stopped.sum()) > ended:
                break
        tokens: list[list[int]] = self.unread_tokens().tolist()
        self.unread_count = 0
        return tokens

    def refresh_cache_object(self) -> None:
        """Update the cache object as `DecodeState` does, and drop records of padding, as a row's request changes."""
        super().refresh_cache_object()
        for layer in self.caches:
            layer.absent = layer.absent[:, :0]

    def mask(self) -> Tensor:
        """Return the padding mask [R, tokens seen]; a row's own tokens are at its end, and free rows are arbitrary."""
        indices = torch.arange(self.length, device=self.stopped.device)
        return (indices >= self.length - self.caches[0].slots.seen[:, None]).to(torch.int64)

    @property
    def variant(self) -> Any:
        """The facts about sampling in the rows on which a CUDA graph depends."""
        return self.sampling.draws, self.sampling.has_limits

    def mark_new_tokens(self, mask: Tensor) -> None:
        """Write into a padding mask which of the new tokens are real, in every column.

        The column that the graph reads depends on the length.
        """
        mask.copy_((~self.stopped)[:, None].expand_as(mask))

    def _stops(self, tokens: Tensor) -> Tensor:
        """Return bool [R], true where a token is a stop token of its row, or its last one."""
        return (tokens[:, None] == self.stops).any(-1) | (self.generated >= self.max_new_tokens)

    def sample_and_record(self, logits: Tensor) -> None:
        """Sample the next tokens from logits [R, 1, vocabulary] and advance the state, all on the device."""
        drawn = self.sampling.sample(logits[:, -1], self.generated)
        self.generated.add_(~self.stopped)
        self._record(drawn)


def check_holds_only_slots(cache: Any, empty: Any) -> None:
    """Raise CacheHandleError for a model's cache object that holds more than slots, such as recurrent states.

    A tensor without dimensions that was the same before any token belongs to the model and not to a row.

    Args:
        empty: the cache that the model's prompts begin with, None if the model makes its cache itself.
    """
    empty_layers = itertools.chain(getattr(empty, "layers", ()), itertools.repeat(None))  # without end
    for number, (layer, before) in enumerate(zip(getattr(cache, "layers", ()), empty_layers, strict=False)):
        attributes = {name: _tensors(value) for name, value in vars(layer).items()}
        other = [
            name
            for name, found in attributes.items()
            if not _are_constants(found, _tensors(getattr(before, name, None)))
        ]
        empty_counts = other_integers(before)  # an integer that differs from these counts tokens
        other += [name for name, value in other_integers(layer).items() if empty_counts.get(name, value) != value]
        if other:
            raise CacheHandleError(
                f"layer {number} of the model's cache, a {type(layer).__name__}, has {', '.join(other)} in addition to "
                "keys and values; requests need a cache of slots alone: use DecodeLoop without rows, or model.generate"
            )


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers that are not handles."""
    return [x for x in optree.tree_leaves(value) if isinstance(x, Tensor) and not isinstance(x, Handle)]


def _are_constants(found: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Return whether tensors have no dimensions and are equal to the tensors before; true for no tensors."""
    if len(found) != len(before):
        return not found
    return all(x.ndim == 0 and torch.equal(x, was.to(x.device)) for x, was in zip(found, before, strict=True))


def _with_rows(one: LayerCache, rows: int) -> LayerCache:
    """Return a cache like `one` with `rows` empty rows."""
    layout = dataclasses.replace(one.layout, batch=rows)
    slots = empty_slots(layout)
    mark_addresses_static(slots)
    for class_slots in slots.by_class:
        class_slots.length.fill_(one.length)
    none = one.absent.new_zeros(rows, 0)
    fresh: dict[str, Any] = dict(absent=none, first_ids=None, _selections=[])
    fresh |= dict(row_budgets=one.row_budgets * rows, clocks=one.clocks * rows)
    return dataclasses.replace(one, layout=layout, slots=slots, **fresh)


def _pad_left(slots: AnySlots, shift: int) -> None:
    """Add `shift` tokens of padding to the left of all rows; remove as many if it is negative."""
    for each in slots.by_class:
        each.index.copy_(torch.where(each.position >= 0, (each.index + shift).clamp(min=0), each.index))
        each.length.add_(shift)
        each.seen.clamp_(max=each.length)  # of a free row, which may have seen more tokens than the rows in use


def _row_of(layer: LayerCache, row: int, length: int) -> LayerCache:
    """Return a copy of one row of a cache, for `length` tokens, padding included; `_write_row` is the inverse."""
    one = layer.map_rows(lambda tensor: tensor[row : row + 1].clone())
    _pad_left(one.slots, length - layer.length)
    one.length, one.absent = length, layer.absent.new_zeros(1, 0)
    one.row_budgets, one.clocks = layer.row_budgets[row : row + 1], layer.clocks[row : row + 1]
    mark_addresses_static(one.slots)
    return one


def _write_row(layer: LayerCache, row: int, one: LayerCache) -> None:
    """Move the only row of a cache into a row of a wider cache, replacing all of that row."""
    _pad_left(one.slots, layer.length - one.length)
    for there, here in zip(layer.slots.tensors(), one.slots.tensors(), strict=True):
        there[row].copy_(here[0])
    layer.row_budgets = (*layer.row_budgets[:row], *one.row_budgets, *layer.row_budgets[row + 1 :])
    layer.clocks = (*layer.clocks[:row], *one.clocks, *layer.clocks[row + 1 :])


def _free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has free; None if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    file = Path("/proc/meminfo")
    lines = file.read_text(encoding="ascii").splitlines() if device.type == "cpu" and file.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
