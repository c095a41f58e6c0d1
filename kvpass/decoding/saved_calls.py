"""Save the calls that a cache can be cropped by, and restore them: `entries_of`, `calls_of`.

A step is saved with what it overwrote, a call of several tokens with its rows and with the slots from before it.  The
record of a prompt is not saved, as its graph is needed to admit fewer tokens.  Neither are calls on slots in classes of
heads: their cache can be cropped by what comes after it was loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cache import serial
from kvpass.cache.admission import Chunk
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.cache.past_calls import Calls, PastCall, SavedContent, SlotSnapshot
from kvpass.cache.slots import Slots, row_indices
from kvpass.errors import CacheFileError
from kvpass.lowering.attention_statistics import StatisticsSpec
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Attention
from kvpass.runtime.caches import mark_addresses_static
from kvpass.runtime.kv_store import AdmittedChunk, RepeatableChunk

_SPEC = ("query", "key", "mask", "sink_logit")


def entries_of(cache: LayerCache, prefix: str, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the entries of the last calls on a layer in a file's header; a prompt has none.

    Their tensors are added to `tensors`, by names with `prefix`.
    """
    if cache.layout.classes:
        return []
    writer = _CallWriter(cache.slots, prefix, tensors)
    return [writer.entry(index, call) for index, call in enumerate(cache.calls) if call.snapshot is not None]


def calls_of(entries: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], cache: LayerCache) -> Calls:
    """Return the last calls on a layer's cache, from the entries of `entries_of` and their tensors.

    Args:
        tensors: of the layer, by name.
        cache: of the layer after these calls.

    Raises:
        CacheFileError: the calls do not lead to the cache.
    """
    reader = _CallReader(cache, tensors)
    calls = tuple(reader.call(entry) for entry in entries)
    if calls and sum(call.token_count for call in calls) != cache.seen - calls[0].seen:
        raise CacheFileError(f"its last calls do not lead to {cache.seen} tokens")
    return calls


class _CallWriter:
    """Writer of one layer's calls.

    Attributes:
        known: the slots that were written so far; the first are those of the cache itself.
    """

    def __init__(self, slots: Slots, prefix: str, tensors: dict[str, Tensor]) -> None:
        self.known, self.prefix, self.tensors = [slots], prefix, tensors

    def entry(self, index: int, call: PastCall) -> dict[str, Any]:
        name, snapshot = f"call.{index}.", call.snapshot
        self._put(name, absent=call.absent)
        common = {
            "name": name,
            "new": call.token_count,
            "seen": call.seen,
            "limits": list(call.row_budgets),
            "clocks": [list(clock) for clock in call.clocks],
            "layout": {field: getattr(call.layout, field) for field in serial.LAYOUT_FIELDS},
        }
        assert snapshot is not None
        if not snapshot.saved:
            return {**common, "before": self._slots(snapshot.slots), "chunk": self._chunk(name, call.repeat)}
        (saved,), slots = snapshot.saved, snapshot.slots
        self._put(name, **dict(zip(slots.names[2:], saved.others, strict=False)))  # without the scales of rows
        for part, rows, parts in (("key", slots.key, saved.key), ("value", slots.value, saved.value)):
            whole = parts if saved.slot_index is None else tuple(each[:, :, None] for each in parts)
            stored = rows.format.to_number_order(whole)
            self._put(name, **{f"{part}.{i}": each for i, each in enumerate(stored)})
        return {**common, "of": self._slots(slots), "rows": "all" if saved.slot_index is None else "free"}

    def _chunk(self, name: str, repeat: Any) -> dict[str, Any] | None:
        """Return the entry of a call's own rows; None for a single token."""
        if repeat is None:
            return None
        assert isinstance(repeat, RepeatableChunk)
        taken = repeat.admitted
        assert isinstance(taken, AdmittedChunk)
        chunk, spec = taken.chunk, next(iter(taken.specs), None)
        self._put(name, chunk_key=chunk.key, chunk_value=chunk.value, chunk_valid=chunk.valid)
        assert isinstance(taken.into, Slots)
        entry: dict[str, Any] = {"into": self._slots(taken.into), "pins": None, "spec": None}
        if chunk.pins is not None:
            self._put(name, pins_mask=chunk.pins.mask, pins_later=chunk.pins.later)
            entry["pins"] = chunk.pins.on_top
        if spec is not None:
            given = {field: value for field in _SPEC if (value := getattr(spec, field)) is not None}
            self._put(name, **{f"spec_{field}": value for field, value in given.items()})
            plain = {field: getattr(spec, field) for field in ("causal", "scale", "cap", "heads")}
            entry["spec"] = {"given": list(given), **plain}
        return entry

    def _slots(self, slots: Slots) -> int:
        """Return the number of these slots, which are written at their first use."""
        for number, known in enumerate(self.known):
            if known is slots:
                return number
        self.known.append(slots)
        number = len(self.known) - 1
        self._put(f"slots.{number}.", **serial.slot_tensors(slots))
        return number

    def _put(self, name: str, **given: Tensor) -> None:
        self.tensors.update({f"{self.prefix}{name}{field}": tensor for field, tensor in given.items()})


class _CallReader:
    """Reader of one layer's calls."""

    def __init__(self, cache: LayerCache, tensors: Mapping[str, Tensor]) -> None:
        self.cache, self.tensors = cache, tensors
        self.known: dict[int, Slots] = {0: cache.slots}

    def call(self, entry: Mapping[str, Any]) -> PastCall:
        layout = dataclasses.replace(self.cache.layout, **serial.layout_fields(entry["layout"]))
        row_budgets, clocks = serial.host_counts(entry, layout)
        seen, new, name = serial.read_count(entry, "seen"), serial.read_count(entry, "new"), str(entry["name"])
        absent = self._tensor(f"{name}absent")
        repeat = None
        if "before" in entry:
            before = self._slots(entry["before"], layout, seen, row_budgets)
            serial.check_numbers(before, layout, seen, before.capacity, row_budgets)
            snapshot = SlotSnapshot(before)
            if entry["chunk"] is not None:
                repeat = RepeatableChunk(self._chunk(name, entry["chunk"], new))
        else:
            snapshot = self._snapshot(name, entry, layout, seen, row_budgets)
        return PastCall(new, snapshot, repeat, layout, seen, clocks, absent, row_budgets)

    def _snapshot(
        self, name: str, entry: Mapping[str, Any], layout: Layout, seen: int, row_budgets: tuple[int, ...]
    ) -> SlotSnapshot:
        slots = self._slots(entry["of"], layout, seen, row_budgets)
        named = zip(slots.names[2:], slots.metadata, strict=False)  # without the scales of rows
        others = tuple(self._tensor_like(f"{name}{field}", tensor) for field, tensor in named)
        before = slots.with_tensors([*slots.tensors()[:2], *others, *slots.tensors()[2 + len(others) :]])
        serial.check_numbers(before, layout, seen, slots.capacity, row_budgets)
        slot_index = row_indices(before.free, layout.heads) if entry["rows"] == "free" else None
        parts = []
        for part, rows in (("key", slots.key), ("value", slots.value)):
            shapes = [x if slot_index is None else x[:, :, :1] for x in rows.parts]
            stored = tuple(self._tensor_like(f"{name}{part}.{i}", shape) for i, shape in enumerate(shapes))
            whole = rows.format.to_device_layout(stored)
            parts.append(whole if slot_index is None else tuple(x[:, :, 0] for x in whole))
        return SlotSnapshot(slots, (SavedContent(slot_index, parts[0], parts[1], others),))

    def _chunk(self, name: str, entry: Mapping[str, Any], new: int) -> AdmittedChunk:
        cache, layout, pins, spec = self.cache, self.cache.layout, None, None
        shape = (layout.batch, layout.heads, new)
        key, value, valid = (self._tensor(f"{name}chunk_{part}") for part in ("key", "value", "valid"))
        shapes = ((*shape, layout.key_dim), (*shape, layout.value_dim), (layout.batch, new))
        if tuple(tuple(x.shape) for x in (key, value, valid)) != shapes or valid.dtype != torch.bool:
            raise CacheFileError(f"its last call has other rows than those of {new} tokens")
        if entry["pins"] is not None:
            pins = Pins(self._tensor(f"{name}pins_mask"), bool(entry["pins"]), self._tensor(f"{name}pins_later"))
        if entry["spec"] is not None:
            fields = dict(entry["spec"])
            given = {field: self._tensor(f"{name}spec_{field}") for field in fields.pop("given")}
            spec = StatisticsSpec(**(dict.fromkeys(_SPEC) | given), **fields, sharding=None)  # type: ignore[arg-type]
            _check_spec(spec, layout, new)
        into = self._slots(entry["into"], layout, cache.seen, cache.row_budgets)
        return AdmittedChunk(Chunk(key, value, valid, Attention(), pins), () if spec is None else (spec,), into)

    def _slots(self, number: int, layout: Layout, seen: int, row_budgets: tuple[int, ...]) -> Slots:
        if number not in self.known:
            prefix = f"slots.{number}."
            mine = {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}
            capacity = mine["position"].shape[-1]
            slots = serial.slots_of(mine, layout, capacity, seen, row_budgets)
            mark_addresses_static(slots)
            self.known[number] = slots
        return self.known[number]

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[name].to(self.cache.layout.device, copy=True)

    def _tensor_like(self, name: str, like: Tensor) -> Tensor:
        found = self.tensors[name]
        if found.shape != like.shape or found.dtype != like.dtype:
            raise CacheFileError(f"it has {found.dtype} {list(found.shape)} for {name!r}")
        return self._tensor(name)


def _check_spec(spec: StatisticsSpec, layout: Layout, new: int) -> None:
    """Raise CacheFileError unless the tensors fit each other: statistics are computed by code that does not check."""
    (batch, q_heads, queries, dim), (key_batch, heads, keys, key_dim) = spec.query.shape, spec.key.shape
    right = batch == key_batch == layout.batch and queries == new and dim == key_dim and keys >= new
    right = right and spec.heads == layout.heads and heads % layout.heads == q_heads % heads == 0
    for part, last in ((spec.mask, keys), (spec.sink_logit, 1)):
        right = right and (part is None or (part.ndim >= 4 and part.shape[-1] == last and part.shape[-2] in (1, new)))
        right = right and (part is None or all(n in (1, batch, q_heads, heads) for n in part.shape[:-2]))
    if not right:
        raise CacheFileError(f"the attention of its last call is not that of {new} tokens")
