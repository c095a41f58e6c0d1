"""Test the storage of tokens in slots: pins, the records by which calls are undone, and the buffers of chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.backend import Backend
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.slots import SlotSnapshot
from kvpass.cache.undo_records import UndoRecord
from kvpass.errors import BudgetError
from kvpass.policies.pinned_tokens import PINNED, Pins
from kvpass.runtime.call_context import pinning
from kvpass.runtime.cropping import store_undo_records, undo_records_before
from kvpass.runtime.kv_store import KVStore
from tests import on_reference
from tests.runtime.prompts import DIM, HEADS, admitted, content, positions, rows_of

BUDGET, CROP = 8, 6


def backend(policy: str = "streaming", crop: int = 0, **options: Any) -> Backend:
    return kvpass.backend(policy, budget=BUDGET, inner="eager", crop=crop, **options)


def one_layer(chosen: Backend, length: int, rows: int = 1, **options: Any) -> LayerCache:
    (cache,) = admitted(chosen, length, (0,) * rows, windows=[None], **options)
    return cache


def chunk_of(start: int, stop: int, rows: int) -> list[torch.Tensor]:
    """Return what the graph of a chunk returns for a policy without statistics: keys, values, and real tokens."""
    _, key, value = rows_of(0, stop, (0,) * rows)
    return [key[:, :, start:], value[:, :, start:], torch.ones(rows, stop - start, dtype=torch.bool)]


def run_chunk(cache: LayerCache, count: int) -> None:
    """Admit a chunk, and record it as the runtime does."""
    store, start = KVStore(), cache.length
    records = undo_records_before([cache], count)
    site: Any = None  # read for statistics alone
    taken = store.admit_step(cache, site, chunk_of(start, start + count, cache.layout.batch))
    cache.length += count
    store_undo_records([cache], records, [taken])


def tensors_of(cache: LayerCache) -> list[Any]:
    return [tensor.tolist() for tensor in cache.slots.tensors()]


def write_to_all(cache: LayerCache) -> None:
    """Do what a step may do at most: write to the free slot of each head, and to all metadata."""
    slots = cache.slots
    for vectors in (slots.key, slots.value):
        index = slots.free[:, :, None, None].expand(-1, HEADS, 1, DIM)
        vectors.codes.scatter_(2, index, torch.full(index.shape, 7.0))
    for tensor in slots.metadata:
        tensor.fill_(1)


def pins_of(rows: list[list[int]], length: int, on_top: bool, later: int = 0) -> Pins:
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, marked in enumerate(rows):
        mask[row, marked] = True
    return Pins(mask, on_top, torch.full((len(rows),), later))


def test_equal_backends_continue_caches_and_the_reference_does_not() -> None:
    assert backend().cache_settings == backend().cache_settings
    reference = on_reference.backend("streaming", budget=BUDGET, inner="reference")
    assert reference.cache_settings != backend().cache_settings


# -- undoing calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["streaming", "knorm", "d2o", "random"])
@given(length=st.integers(2, 20), rows=st.integers(1, 2))
def test_a_step_is_undone_whatever_it_has_written(policy: str, length: int, rows: int) -> None:
    """Test `d2o` too, which merges into any slot: then all slots are saved, and any may be overwritten."""
    cache = one_layer(backend(policy, CROP), length, rows)
    expected = tensors_of(cache)
    snapshot = cache.slots.snapshot(cache.layout, chunk=False)
    write_to_all(cache)
    if cache.layout.policy.merges:
        cache.slots.key.codes.fill_(7)
    assert tensors_of(cache) != expected
    assert snapshot.restore() is cache.slots
    assert tensors_of(cache) == expected


def test_a_chunk_leaves_the_slots_before_it_as_they_are() -> None:
    cache = one_layer(backend(crop=CROP), 12)
    before, expected = cache.slots, tensors_of(cache)
    snapshot = cache.slots.snapshot(cache.layout, chunk=True)
    assert (snapshot.slots, snapshot.saved) == (before, ())
    run_chunk(cache, 3)
    assert cache.slots is not before
    cache.slots = snapshot.restore()
    assert tensors_of(cache) == expected


@given(lengths=st.lists(st.integers(2, 5), min_size=1, max_size=5), rows=st.integers(1, 2), data=st.data())
def test_chunks_alternate_between_buffers_and_can_be_cropped(
    lengths: list[int], rows: int, data: st.DataObject
) -> None:
    """Two buffers serve all chunks: one is written, and the other has the tokens from before the chunk."""
    cache = one_layer(backend(crop=CROP), 9, rows)
    buffers = {id(cache.slots): cache.slots}
    for count in lengths:
        before = cache.slots
        run_chunk(cache, count)
        assert cache.slots is not before
        buffers[id(cache.slots)] = cache.slots
    assert len(buffers) == 2
    cropped = data.draw(st.integers(1, lengths[-1]))
    plain = one_layer(backend(), 9, rows)
    for count in [*lengths[:-1], lengths[-1] - cropped]:
        if count:
            run_chunk(plain, count)
    shorter = cache.crop(cropped, "keys")
    assert (shorter.length, content(shorter)) == (plain.length, content(plain))


def test_without_cropping_a_chunk_is_admitted_in_place() -> None:
    cache = one_layer(backend(), 12)
    before = cache.slots
    run_chunk(cache, 3)
    assert (cache.slots is before, cache.undo_records) == (True, ())


def test_slots_of_another_capacity_are_not_used_again() -> None:
    cache = one_layer(backend(crop=CROP), 12)
    run_chunk(cache, 3)
    (record,) = cache.undo_records
    earlier = record.snapshot.slots  # type: ignore[union-attr]
    KVStore().make_room_for_pins(cache, pins_of([[0, 1, 2]], 3, on_top=True))
    assert cache.slots.capacity > earlier.capacity
    run_chunk(cache, 3)
    assert cache.slots is not earlier
    assert cache.slots.capacity > earlier.capacity


def test_slots_with_the_tokens_before_a_chunk_are_not_used_for_it() -> None:
    cache = one_layer(backend(crop=CROP), 12)
    before, expected = cache.slots, tensors_of(cache)
    cache.undo_records = (UndoRecord.on(cache, 2, SlotSnapshot(before)),)
    run_chunk(cache, 3)
    assert cache.slots is not before
    assert [tensor.tolist() for tensor in before.tensors()] == expected


def test_a_step_has_nothing_to_admit() -> None:
    cache, site = one_layer(backend(), 12), None
    expected = tensors_of(cache)
    assert KVStore().admit_step(cache, site, []) is None  # type: ignore[arg-type]
    assert tensors_of(cache) == expected


# -- pins --------------------------------------------------------------------------------------------------------------


@given(
    before=st.lists(st.integers(0, 11), max_size=3, unique=True),
    new=st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True),
    on_top=st.booleans(),
)
def test_pinned_tokens_stay_and_the_budget_is_kept(before: list[int], new: list[int], on_top: bool) -> None:
    """Pin tokens of a prompt of twelve, then tokens of a chunk of five, then feed as many as all slots hold."""
    prompt_pins = pins_of([before], 12, on_top)
    cache = one_layer(backend(sinks=0), 12, pins=prompt_pins.mask, on_top=on_top)
    chunk_pins = pins_of([new], 5, on_top)
    KVStore().make_room_for_pins(cache, chunk_pins)
    with pinning(chunk_pins):
        run_chunk(cache, 5)
    run_chunk(cache, 15)
    pinned = sorted({*before, *(12 + index for index in new)})
    budget = BUDGET + on_top * len(pinned)
    assert cache.row_budgets == (budget,)
    last = [index for index in range(32) if index not in pinned][len(pinned) - budget :]
    assert positions(cache) == [sorted([*pinned, *last])] * HEADS


@given(pinned=st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_slots_for_pins_on_top_grow_in_powers_of_two(pinned: list[int]) -> None:
    """Pin the first tokens of each row; equal powers of two let calls share graphs."""
    rows, most = len(pinned), max(pinned)
    cache = one_layer(backend(), 12, rows)
    capacity, expected = cache.slots.capacity, content(cache)
    KVStore().make_room_for_pins(cache, pins_of([list(range(count)) for count in pinned], 20, on_top=True))
    spare = cache.slots.capacity - capacity
    assert spare & (spare - 1) == 0
    assert most <= spare < 2 * most
    assert cache.layout.capacity == cache.slots.capacity
    assert content(cache) == expected
    assert cache.row_budgets == (BUDGET,) * rows  # raised when the tokens are admitted


@given(
    before=st.integers(0, 4),
    new=st.integers(0, 8),
    later=st.integers(0, 8),
)
def test_pins_within_the_budget_leave_the_policy_what_it_needs(before: int, new: int, later: int) -> None:
    """Count the pins of the prompt, of the call, and of later calls of the same prompt."""
    prompt_pins = pins_of([list(range(before))], 12, on_top=False) if before else None
    chosen = backend(sinks=2)
    cache = one_layer(chosen, 12, pins=prompt_pins.mask if prompt_pins else None)
    pins = pins_of([list(range(new))], 8, on_top=False, later=later)
    rest = BUDGET - before - new - later
    if rest < chosen.policy.minimum_budget():
        with pytest.raises(BudgetError, match=f"{before + new + later} tokens are to stay"):
            KVStore().make_room_for_pins(cache, pins)
    else:
        KVStore().make_room_for_pins(cache, pins)
        assert cache.slots.capacity == BUDGET + 1


@given(rows=st.lists(st.booleans(), min_size=1, max_size=3), on_top=st.booleans())
def test_the_token_of_a_step_is_pinned_in_the_rows_that_ask_for_it(rows: list[bool], on_top: bool) -> None:
    cache = one_layer(backend(), 12, len(rows))
    pins = pins_of([[0] if pinned else [] for pinned in rows], 1, on_top)
    KVStore().make_room_for_pins(cache, pins)
    before = copy.deepcopy(cache.slots)
    KVStore().pin(cache, pins)
    assert cache.slots.state[PINNED].nonzero().tolist() == [
        [row, 0, int(before.free[row, 0])] for row, pinned in enumerate(rows) if pinned
    ]
    assert cache.row_budgets == tuple(BUDGET + (on_top and pinned) for pinned in rows)
    assert torch.equal(cache.slots.position, before.position)
