"""Test which records of calls are kept, how many tokens they can crop, and what undoing restores."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpass.cache.undo_records import UndoRecord, append_record, check_croppable
from kvpass.errors import CacheHandleError


@dataclasses.dataclass(frozen=True)
class SnapshotOf:
    """Stands for the slots before a call."""

    slots: str

    def restore(self) -> str:
        return self.slots


@dataclasses.dataclass
class OneLayer:
    """Stands for the cache of a layer, with the fields that calls change."""

    slots: str = "now"
    layout: str = "layout"
    length: int = 7
    clocks: tuple[int, ...] = (3,)
    absent: str = "absent"
    row_budgets: tuple[int, ...] = (4,)
    undo_records: tuple[Any, ...] = ("a record",)
    first_ids: str = "kept"


def record(count: int, prompt: bool = False) -> UndoRecord:
    snapshot: Any = None if prompt else SnapshotOf("before")
    return UndoRecord.on(OneLayer(), count, snapshot)


PROMPT = st.booleans()
CALLS = st.lists(st.sampled_from([1, 1, 1, 1, 2, 5]), max_size=12)
"""Numbers of tokens of calls after a prompt; most are steps."""


def kept(prompt: bool, calls: list[int], most: int) -> list[UndoRecord]:
    """Return the records that are kept after a prompt of nine tokens, if there is one, and further calls."""
    records: Any = append_record((), record(9, prompt=True), most) if prompt else ()
    for count in calls:
        records = append_record(records, record(count), most)
    return list(records)


@given(prompt=PROMPT, calls=CALLS, most=st.integers(1, 6))
@example(prompt=True, calls=[], most=3)
@example(prompt=True, calls=[1], most=3)
@example(prompt=False, calls=[5, 1, 1, 1], most=3)
def test_records_reach_as_far_back_as_is_to_be_cropped_or_to_the_last_chunk(
    prompt: bool, calls: list[int], most: int
) -> None:
    records = kept(prompt, calls, most)
    counts = [9, *calls] if prompt else calls
    last_chunk = max((index for index, count in enumerate(counts) if count > 1), default=0)
    possible = counts[last_chunk:]
    assert [each.token_count for each in records] == possible[len(possible) - len(records) :]
    total = sum(each.token_count for each in records)
    assert total >= min(most, sum(possible))
    assert total - (records[0].token_count if records else 0) < most or len(records) <= 1  # and no further


@given(prompt=PROMPT, calls=CALLS, most=st.integers(1, 6))
def test_what_is_recorded_can_be_cropped_and_no_more(prompt: bool, calls: list[int], most: int) -> None:
    """Check that one token of a prompt stays."""
    records = kept(prompt, calls, most)
    possible = min(most, sum(each.token_count - (each.snapshot is None) for each in records))
    for count in range(possible + 1):
        check_croppable(records, count, most)
    with pytest.raises(CacheHandleError, match=f"{possible + 1} tokens of a cache were to be cropped, and {possible} "):
        check_croppable(records, possible + 1, most)


@pytest.mark.parametrize(
    ("calls", "count", "most", "reason"),
    [
        ([], 3, 0, "pass crop=3 to kvpass, which then records the slots that the last tokens overwrite"),
        ([1, 1], 5, 4, "crop=4 records no more: pass crop=5"),
        ([5, 1], 7, 9, "earlier tokens have no record: records begin at the last call of several tokens"),
    ],
)
def test_the_reason_names_what_to_do(calls: list[int], count: int, most: int, reason: str) -> None:
    with pytest.raises(CacheHandleError, match=reason):
        check_croppable(kept(False, calls, most), count, most)


def test_nothing_is_always_cropped() -> None:
    check_croppable([], 0, 0)


def test_a_layer_is_restored_to_before_the_call() -> None:
    before = OneLayer()
    undo = UndoRecord.on(before, 1, SnapshotOf("before"))  # type: ignore[arg-type]
    later = OneLayer("now", "another", 8, (4,), "more", (5,), ("a", "b"), "kept too")
    assert undo.undo(later) == dataclasses.replace(before, slots="before", undo_records=(), first_ids="kept too")


def test_before_a_prompt_there_are_no_other_slots() -> None:
    layer = OneLayer()
    assert UndoRecord.on(layer, 9, None).undo(layer).slots == "now"
