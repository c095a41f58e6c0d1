"""Hold the slots of one layer and one conversation, and shorten the conversation by undoing its last calls."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvpass.cache.layout import Layout
from kvpass.cache.slots import AnySlots
from kvpass.cache.undo_records import UndoRecords, check_croppable
from kvpass.errors import CacheHandleError, KVPassError
from kvpass.lowering.formats import KVDtype
from kvpass.policies.base import Policy
from kvpass.policies.types import Clock

KeyOrValue = Literal["keys", "values"]
PROBED = (1, 5, 500)
"""Positions at which the rotations of two graphs are compared.

At position 500, frequencies that differ by 3e-5 change a key by two roundings of bfloat16.  Two roundings of a
frequency in float32 change it by less than 1e-4.
"""


@dataclasses.dataclass(frozen=True)
class _RowSelection:
    """Rows selected by the handle of K or V, kept until the other handle asks for the same selection."""

    operation: str
    argument: Any
    length: int
    kv: KeyOrValue
    result: weakref.ref[LayerCache]

    def serves(self, operation: str, argument: Any, length: int, kv: KeyOrValue) -> bool:
        """Return whether the other of keys and values makes the same selection."""
        same = (self.operation, self.length) == (operation, length) and self.kv != kv
        return same and _equal_arguments(self.argument, argument)


def _equal_arguments(one: Any, other: Any) -> bool:
    """Return whether two arguments select the same rows; tensors and lists are compared by content."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        types = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (one, other)]
        return types[0] == types[1] and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal_arguments(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)  # True == 1, and they select differently


@dataclasses.dataclass(frozen=True)
class _Crop:
    """The cache that continues after a crop; `left` names those of keys and values that are not yet cropped."""

    tokens: int
    left: KeyOrValue | None
    result: LayerCache


class DeferredChecks:
    """Conditions on a GPU that the host reads only once they are computed.

    After a false condition the cache stays refused, and so do copies of it.

    Attributes:
        pending: for each condition that was not read, the event after it, its answer, and the error if it is false.
        failure: the error of the first condition that was false.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[torch.cuda.Event, Tensor, KVPassError]] = []
        self.failure: KVPassError | None = None

    def copy(self) -> DeferredChecks:
        """Return a copy; conditions that are added to one later are not added to the other."""
        result = DeferredChecks()
        result.pending, result.failure = [*self.pending], self.failure
        return result

    def add(self, condition: Tensor, error: KVPassError) -> None:
        """Add a bool on a GPU that must be true, and the error to raise if it is false."""
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(condition, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.pending.append((event, answer, error))

    def raise_if_failed(self) -> None:
        """Read the conditions that are computed, and raise the error of one that is or was false."""
        computed = list(itertools.takewhile(lambda check: check[0].query(), self.pending))  # type: ignore[no-untyped-call]
        self.pending = self.pending[len(computed) :]
        failures = (error for _, answer, error in computed if not bool(answer))
        self.failure = self.failure or next(failures, None)
        if self.failure is not None:
            raise copy.copy(self.failure)  # raising one instance again would add to its traceback


class CacheOwner(Protocol):
    """The backend that made a cache, as far as the cache reads it.

    Attributes:
        policy, budget, crop, kv_dtype: see `kvpass.backend`.
        cache_settings: settings that another backend must share to continue the cache.
        cache_numbers: yields the number of each new cache.
    """

    @property
    def policy(self) -> Policy: ...
    @property
    def budget(self) -> int | float | None: ...
    @property
    def cache_settings(self) -> tuple[Any, ...]: ...
    @property
    def crop(self) -> int: ...
    @property
    def kv_dtype(self) -> KVDtype | None: ...
    @property
    def cache_numbers(self) -> Iterator[int]: ...


@dataclasses.dataclass
class LayerCache:
    """The slots of one layer and one conversation, shared by the handles of K and V.

    Attributes:
        backend: the backend that made the cache; a backend of other settings refuses it.
        number: increases from layer to layer of a conversation in the order of the prompt's layers, also in copies.
        layout, slots: the buffers.
        length: tokens seen, padding included; the host's copy of `slots.length`.
        model_heads: the KV heads of the model's cache; if keys are computed from it, the layout joins them to one.
        window: the number of last tokens that the model's cache stores, None for all.
        row_budgets: the layer's budget of each row.
        clocks: the host's counts for each row, see `Policy.clock`; empty for most policies.
        interrupted: set while a step or a crop runs, so that an interrupted one is noticed.
        notes: facts to report, such as an adopted prompt.
        deferred_checks: conditions on the device that the host has not read.
        absent: int64 [B, P], the indices in the padded sequence of padding that is not cached, -1 after the last.
        first_ids: int64 [B], the position ids of the rows' first real tokens, if known and keys are rotated by rank.
        rotated_key: one key rotated to the positions `PROBED` by the prompt, if keys are rotated by rank; see
            `RotarySubgraph.probe`.
        equal_rotated_key: the last call's rotated key, if it was equal to `rotated_key` up to rounding.
        key_projections: the weights that computed the layer's keys.
        output_projection: the output projection's weight [E, Hq Dv], for policies that read it.
        model_tensors: weak references to the model's tensors that were inputs of the prompt's graph; they identify it.
        undo_records: records of the last calls, as far as they can be cropped.
        cropped: the cache that replaced this one when tokens were cropped; this one can no longer be continued.
    """

    backend: CacheOwner
    number: int
    layout: Layout
    slots: AnySlots
    length: int
    model_heads: int
    window: int | None = None
    row_budgets: tuple[int, ...] = ()
    clocks: tuple[Any, ...] = ()
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    absent: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    first_ids: Tensor | None = None
    rotated_key: Tensor | None = None
    equal_rotated_key: Tensor | None = None
    deferred_checks: DeferredChecks = dataclasses.field(default_factory=DeferredChecks)
    key_projections: tuple[weakref.ref[Any], ...] = ()
    output_projection: weakref.ref[Any] | None = None
    model_tensors: tuple[weakref.ref[Any], ...] = ()
    undo_records: UndoRecords = ()
    cropped: _Crop | None = None
    _selections: list[_RowSelection] = dataclasses.field(default_factory=list)

    @property
    def stored_tokens(self) -> int:
        """The number of tokens that the model's cache stores."""
        return self.length if self.window is None else min(self.length, self.window)

    def select(self, operation: str, argument: Any, kv: KeyOrValue, apply: Callable[[Tensor], Tensor]) -> LayerCache:
        """Return the cache with other rows.

        The same selection for K and then for V returns one cache.  The same selection for K again returns another.

        Args:
            apply: the selection as a function of batch-first tensors.
        """
        self._selections = [selection for selection in self._selections if selection.result() is not None]
        for i, selection in enumerate(self._selections):
            result = selection.result()
            if result is not None and selection.serves(operation, argument, self.length, kv):
                del self._selections[i]  # the next equal selection of these makes another copy
                return result
        result = self.map_rows(apply)
        kept = copy.deepcopy(argument) if isinstance(argument, list) else argument  # callers may change their lists
        self._selections.append(_RowSelection(operation, kept, self.length, kv, weakref.ref(result)))
        return result

    def crop(self, tokens: int, kv: KeyOrValue) -> LayerCache:
        """Return the cache without its last tokens; the same crop of K and then of V returns one cache."""
        last = self.cropped
        if last is not None and (last.tokens, last.left, last.result.length) == (tokens, kv, self.length - tokens):
            self.cropped = dataclasses.replace(last, left=None)
            return last.result
        check_usable(self)
        check_croppable(self.undo_records, tokens, self.backend.crop)
        self.interrupted = True  # until the cropped cache exists: undoing writes to these slots in place
        shorter = dataclasses.replace(self, interrupted=False)._undo_calls(tokens)
        self.cropped, self.undo_records = _Crop(tokens, "values" if kv == "keys" else "keys", shorter), ()
        self.interrupted = False
        return shorter

    def _undo_calls(self, tokens: int) -> LayerCache:
        """Return the cache without its last tokens, by undoing calls."""
        cache: LayerCache = self
        records = self.undo_records
        while tokens:
            *earlier, last = records
            cache, records = last.undo(cache), tuple(earlier)
            if last.token_count > tokens and last.repeat is not None:
                shorter: LayerCache = last.repeat(cache, last.token_count - tokens)
                return dataclasses.replace(shorter, undo_records=(*records, *shorter.undo_records), _selections=[])
            tokens -= last.token_count
        return dataclasses.replace(cache, undo_records=records, _selections=[])

    def map_rows(self, apply: Callable[[Tensor], Tensor]) -> LayerCache:
        """Return the cache with a function applied to each of its batch-first tensors."""
        slots = self.slots.map_tensors(apply)
        batch = slots.length.shape[0]
        row_budgets, clocks = self._select_counts(batch, apply)
        return dataclasses.replace(
            self,
            layout=dataclasses.replace(self.layout, batch=batch, device=slots.length.device),
            slots=slots,
            row_budgets=row_budgets,
            clocks=clocks,
            absent=apply(self.absent),
            deferred_checks=self.deferred_checks.copy(),
            first_ids=None if self.first_ids is None else apply(self.first_ids),
            undo_records=(),
            _selections=[],
        )

    def _select_counts(
        self, batch: int, apply: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[int, ...], tuple[Clock, ...]]:
        """Return the `row_budgets` and `clocks` of selected rows; the host waits only if they differ by row."""
        if len(set(self.row_budgets)) <= 1 and len(set(self.clocks)) <= 1:
            return self.row_budgets[:1] * batch, self.clocks[:1] * batch
        rows: list[int] = apply(torch.arange(self.layout.batch, device=self.layout.device)).tolist()
        clocks = tuple(self.clocks[row] for row in rows) if self.clocks else ()
        return tuple(self.row_budgets[row] for row in rows), clocks


def check_usable(cache: LayerCache) -> None:
    """Raise CacheHandleError for a cache that a call has left in the middle of a step, or that was cropped."""
    if cache.interrupted:
        raise CacheHandleError(
            "an earlier step or crop of this cache was interrupted by an error, or runs in another thread; start again "
            "from the prompt, and give each thread a cache of its own"
        )
    if cache.cropped is not None:
        raise CacheHandleError(
            f"{cache.cropped.tokens} tokens of this cache have since been cropped, so its earlier state is lost: copy "
            "a cache (copy.deepcopy) before cropping it"
        )
