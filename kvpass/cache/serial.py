"""Convert the cache of one layer to plain values and tensors for a file, and back: `to_header`, `from_header`.

Nothing in a file is trusted: sizes must match the layout, and indices must lie within the slots, because compiled
code does not check the indices that it writes to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.layer_cache import CacheOwner, LayerCache
from kvpass.cache.layout import ROW_BUDGET, Layout
from kvpass.cache.slots import AnySlots, ClassedSlots, Slots, empty_slots
from kvpass.errors import CacheFileError, CacheHandleError
from kvpass.lowering.formats import EncodedVectors, Format
from kvpass.lowering.formats.base import StoredTensors
from kvpass.policies.base import Policy

_LAYOUT_FIELDS = {
    "budget": int, "capacity": int, "batch": int, "heads": int, "key_dim": int, "value_dim": int,
    "stores_unrotated_keys": bool, "layer": int, "exact_capacity": bool, "row_budgets": bool, "pins": bool,
}  # fmt: skip
"""The fields of a layout that a file holds unchanged."""
_OPTIONAL = ("first_ids", "rotated_key")
"""The fields of a layer's cache that a file holds if they are known."""


def to_header(cache: LayerCache, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a cache's part of a file's header, and add its tensors to `tensors` under names with `prefix`.

    Raises:
        CacheHandleError: its heads are sharded over processes.
    """
    layout, slots = cache.layout, cache.slots
    if layout.sharding is not None:
        raise CacheHandleError("a cache whose heads are sharded over processes cannot be saved")
    # Codes are in the order of the numbers, which no device changes.
    parts = _convert_vectors(slots, Format.to_number_order).tensors()
    stored = {**dict(zip(slots.names, parts, strict=True)), "absent": cache.absent}
    optional = {name: value for name in _OPTIONAL if (value := getattr(cache, name)) is not None}
    tensors.update({f"{prefix}{name}": tensor for name, tensor in (stored | optional).items()})
    fields = {name: getattr(layout, name) for name in _LAYOUT_FIELDS}
    return dict(
        layout={**fields, "dtype": str(layout.dtype).removeprefix("torch.")},
        capacity=slots.capacity,
        length=cache.length,
        heads=cache.model_heads,
        window=cache.window,
        row_budgets=list(cache.row_budgets),
        clocks=[list(clock) for clock in cache.clocks],
        notes=list(cache.notes),
        optional=list(optional),
    )


def from_header(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], backend: CacheOwner, policy: Policy, device: torch.device
) -> LayerCache:
    """Return a layer's cache from a header of `to_header` and its tensors.

    Args:
        tensors: the tensors of the layer by name, on the CPU.
        backend: the backend that will continue the cache.
        policy: the policy of the layer.

    Raises:
        CacheFileError: the sizes of tensors contradict the header, or numbers are invalid.
    """
    layout = _layout_of(header["layout"], backend, policy, device).with_head_classes()
    capacity, length, heads = (_read_count(header, name) for name in ("capacity", "length", "heads"))
    window = None if header["window"] is None else _read_count(header, "window")
    row_budgets, clocks = _host_counts(header, layout)
    slots = _slots_of(tensors, layout, capacity, length, row_budgets)
    absent = tensors["absent"]
    if absent.dtype != torch.int64 or absent.ndim != 2 or len(absent) != layout.batch or bool((absent >= length).any()):
        raise CacheFileError("its record of padding does not fit its rows")
    fields: dict[str, Any] = {name: tensors[name].to(device) for name in _OPTIONAL if name in header["optional"]}
    fields |= dict(notes=tuple(map(str, header["notes"])), absent=absent.to(device))
    counts = (length, heads, window, row_budgets, clocks)
    return LayerCache(backend, next(backend.cache_numbers), layout, slots, *counts, **fields)


def _convert_vectors(slots: AnySlots, change: Callable[[Format, StoredTensors], StoredTensors]) -> Any:
    """Return slots with a function of a format and its tensors applied to their keys and values."""
    if isinstance(slots, ClassedSlots):
        return dataclasses.replace(slots, by_class=tuple(_convert_vectors(each, change) for each in slots.by_class))
    key, value = (EncodedVectors(x.format, change(x.format, x.parts)) for x in (slots.key, slots.value))
    return dataclasses.replace(slots, key=key, value=value)


def _slots_of(
    tensors: Mapping[str, Tensor], layout: Layout, capacity: int, length: int, row_budgets: tuple[int, ...]
) -> Any:
    """Return the slots of a layout with another capacity, from checked tensors on the CPU."""
    like = empty_slots(dataclasses.replace(layout, capacity=capacity, device=torch.device("meta")))
    checked = [_check_tensor(tensors, name, tensor) for name, tensor in zip(like.names, like.tensors(), strict=True)]
    slots = like.with_tensors(checked)
    if isinstance(slots, ClassedSlots):
        _check_classes(slots, layout, length)
    else:
        _check_numbers(slots, layout, length, capacity, row_budgets)
    slots = slots.map_tensors(lambda tensor: tensor.to(layout.device, copy=True))
    return _convert_vectors(slots, Format.to_device_layout)


def _check_classes(slots: ClassedSlots, layout: Layout, length: int) -> None:
    """Raise CacheFileError for classes of heads with invalid numbers, or that do not have every head once."""
    for class_slots, class_layout in zip(slots.by_class, layout.by_class, strict=True):
        _check_numbers(class_slots, class_layout, length, class_layout.capacity, (class_layout.budget,))
    heads = torch.arange(layout.heads).expand_as(slots.order)
    if not torch.equal(slots.order.sort(-1).values, heads) or not torch.equal(slots.order.argsort(-1), slots.inverse):
        raise CacheFileError(f"its order of heads is not an order of {layout.heads} heads")


def _layout_of(header: Mapping[str, Any], backend: CacheOwner, policy: Policy, device: torch.device) -> Layout:
    fields = {name: header[name] for name in _LAYOUT_FIELDS}
    for name, kind in _LAYOUT_FIELDS.items():
        # isinstance() would take `true` in a file for 1.
        if type(fields[name]) is not kind or not 0 <= fields[name] < 2**31:
            raise CacheFileError(f"its {name} is {fields[name]!r}")
    dtype = getattr(torch, str(header["dtype"]), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CacheFileError(f"its dtype is {header['dtype']!r}")
    return Layout(
        policy=policy, dtype=dtype, device=device, kv_dtype=backend.kv_dtype, crops=backend.crop > 0, **fields
    )


def _read_count(header: Mapping[str, Any], name: str) -> int:
    """Return a count of a header, which must be at least 0."""
    value = header[name]
    if type(value) is not int or not 0 <= value < 2**62:
        raise CacheFileError(f"its {name} is {value!r}")
    return value


def _check_tensor(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
        has = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise CacheFileError(f"it has {has} for {name!r}, where its header describes {like.dtype} {list(like.shape)}")
    return tensor


def _host_counts(header: Mapping[str, Any], layout: Layout) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the `row_budgets` and `clocks` of the rows."""
    row_budgets, clocks = tuple(header["row_budgets"]), tuple(tuple(clock) for clock in header["clocks"])
    whole = all(type(number) is int and number >= 0 for numbers in (row_budgets, *clocks) for number in numbers)
    policy, classes = layout.policy, max(1, len(layout.classes))
    sizes = [classes * len(policy.clock((), 1, limit)) for limit in row_budgets if whole and policy.keeps_clock]
    if not whole or len(row_budgets) != layout.batch or list(map(len, clocks)) != sizes:
        raise CacheFileError(f"its budgets {row_budgets} and clocks {clocks} do not fit {layout.batch} rows")
    return row_budgets, clocks


def _check_numbers(slots: Slots, layout: Layout, length: int, capacity: int, row_budgets: tuple[int, ...]) -> None:
    """Raise CacheFileError for indices outside of the slots, or counts that contradict each other."""
    rows_seen, rows_length = slots.seen[:, None, None], slots.length[:, None, None]
    most = max(row_budgets)
    most_slots = min(most, layout.policy.capacity(most))  # `buzz` may have fewer slots than its budget
    right = {
        "position": (slots.position >= -1) & (slots.position < rows_seen),
        "index": (slots.index >= -1) & (slots.index < rows_length),
        "free": (slots.free >= 0) & (slots.free < capacity),
        "rank": (slots.rank >= 0) & (slots.rank < capacity),
        "seen": (slots.seen >= 0) & (slots.seen <= slots.length),
        "length": slots.length == length,
        "capacity": torch.tensor(capacity >= layout.capacity and most_slots <= capacity),
    }
    if layout.row_budgets:
        right[ROW_BUDGET] = slots.state[ROW_BUDGET][:, :, 0] == torch.tensor(row_budgets)[:, None]
    wrong = [name for name, holds in right.items() if not bool(holds.all())]
    if wrong:
        raise CacheFileError(f"its {' and '.join(wrong)} cannot belong to {length} tokens in {capacity} slots")
