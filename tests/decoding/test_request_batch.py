"""Test rows of a batch: each has the tokens of its own request, as alone, and their indices in one padded sequence."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvpass
from kvpass.backend import Backend
from kvpass.cache.handle import handles_of
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.model_cache import caches_in
from kvpass.decoding import request_batch
from kvpass.decoding.request_batch import RequestBatch
from kvpass.decoding.requests import GenerationOutput, Request, RequestStatus
from kvpass.decoding.sampling import GREEDY, Sampling
from kvpass.errors import BudgetError, CacheHandleError
from tests.runtime.prompts import admitted, content

ROWS, BUDGET, VOCABULARY, PAD = 3, 8, 6, 0


def backend(policy: str = "window", **options: Any) -> Backend:
    return kvpass.backend(policy, budget=BUDGET, inner="eager", **options)


def prompt_cache(chosen: Backend, length: int) -> tuple[Any, ...]:
    """Return the cache of a prompt of one row in two layers, as nested tuples of handles."""
    return tuple(handles_of(layer, (2, 2)) for layer in admitted(chosen, length))


def request(stop: tuple[int, ...] = (), most: int = 4, sampling: Sampling = GREEDY) -> Request:
    return Request(GenerationOutput("r", [1], [], [], RequestStatus.PENDING), most, frozenset(stop), sampling)


def loop(**changes: Any) -> Any:
    """Return a stub of a loop."""
    own = dict(device=torch.device("cpu"), read_interval=4, pad=PAD, takes_positions=True)
    return types.SimpleNamespace(**own | changes)


def batch(chosen: Backend, **changes: Any) -> RequestBatch:
    return RequestBatch.of(loop(**changes), prompt_cache(chosen, 5), ROWS)


def likely(*tokens: int) -> Tensor:
    """Return logits [R, vocabulary] whose highest are these tokens'."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


def insert(rows: RequestBatch, row: int, chosen: Backend, length: int, token: int = 3, **given: Any) -> int:
    caches = caches_in(prompt_cache(chosen, length))
    rows.fit_slots(caches)
    return rows.insert(row, caches, request(**given), likely(token))


def held(layer: LayerCache, row: int) -> list[Any]:
    """Return what the heads of a row hold, by position."""
    heads = len(content(layer)) // layer.layout.batch
    return content(layer)[row * heads : (row + 1) * heads]


@pytest.mark.parametrize("policy", ["window", "streaming"])
@given(
    inserted=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 20)), min_size=1, max_size=6),
    more=st.integers(0, 5),
)
@settings(max_examples=5)
def test_each_row_holds_its_own_prompt_whatever_others_do(
    policy: str, inserted: list[tuple[int, int]], more: int
) -> None:
    """Insert prompts into rows, some again, and pad all rows on the left."""
    chosen = backend(policy)
    rows, lengths = batch(chosen), {}
    for row, length in inserted:
        insert(rows, row, chosen, length)
        lengths[row] = length
    longest = max(length for _, length in inserted)
    assert rows.length == max(longest, 5)  # that of the rows when they were made is not undone
    rows.set_length(rows.length + more)
    for row, length in lengths.items():
        assert rows.mask()[row].tolist() == [0] * (rows.length - length) + [1] * length
        for ours, alone in zip(rows.caches, admitted(chosen, length), strict=True):
            assert held(ours, row) == held(alone, 0)
            slots, live = ours.slots, ours.slots.position[row] >= 0
            shift = rows.length - length
            assert torch.equal(slots.index[row][live], slots.position[row][live] + shift)
            assert slots.seen[row] == length
            assert slots.length[row] == rows.length == ours.length
        assert rows.cached_tokens(row) == min(length, BUDGET)
        assert (rows.ids[row].item(), rows.position[row].item()) == (3, length)
    assert rows.stopped.tolist() == [row not in lengths for row in range(ROWS)]


@given(lengths=st.lists(st.integers(2, 20), min_size=2, max_size=2), row=st.integers(0, 1))
def test_a_row_that_is_taken_out_continues_as_it_was(lengths: list[int], row: int) -> None:
    chosen = backend()
    rows = batch(chosen)
    for number, length in enumerate(lengths):
        insert(rows, number, chosen, length)
    before = [copy.deepcopy(layer.slots.tensors()) for layer in rows.caches]
    taken = caches_in(rows.extract(row, lengths[row]))
    for ours, alone in zip(taken, admitted(chosen, lengths[row]), strict=True):
        assert held(ours, 0) == held(alone, 0)
        assert (ours.length, ours.layout.batch) == (alone.length, 1)
        assert torch.equal(ours.slots.index, alone.slots.index)
        assert ours.slots.length.tolist() == ours.slots.seen.tolist() == [lengths[row]]
        ours.slots.key.codes.zero_()  # a copy
    for layer, tensors in zip(rows.caches, before, strict=True):
        assert all(map(torch.equal, layer.slots.tensors(), tensors))


@pytest.mark.parametrize(
    ("policy", "takes_positions", "shrinks"), [("window", True, False), ("window", False, True), ("full", True, True)]
)
def test_rows_shrink_where_a_longer_sequence_would_matter(policy: str, takes_positions: bool, shrinks: bool) -> None:
    chosen = backend(policy) if policy != "full" else kvpass.backend("full", budget=32, inner="eager")
    rows = batch(chosen, takes_positions=takes_positions)
    insert(rows, 0, chosen, 4)
    rows.set_length(12)
    rows.set_length(6)
    assert rows.length == (6 if shrinks else 12)
    slots = rows.caches[0].slots
    assert slots.index[0].max() == rows.length - 1
    assert slots.seen.max() <= rows.length


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_are_recorded_until_a_row_ends() -> None:
    chosen = backend()
    rows = batch(chosen)
    insert(rows, 0, chosen, 3, most=3)
    insert(rows, 1, chosen, 5, stop=(4,), most=9)
    assert rows.stopped.tolist() == [False, False, True]
    for tokens in ((1, 2, 5), (2, 4, 5), (3, 3, 5)):
        rows.sample_and_record(likely(*tokens)[:, None])
        rows.unread_count += 1
    assert rows.unread_tokens().tolist() == [[1, 2, PAD], [2, 4, PAD], [PAD, PAD, PAD]]
    assert rows.stopped.tolist() == [True, True, True]
    assert rows.generated.tolist()[:2] == [3, 3]
    assert rows.ids[:2, 0].tolist() == [2, 4]
    assert rows.position[:2, 0].tolist() == [4, 6]  # of the last token that the model has seen


@pytest.mark.parametrize(("given", "ends"), [(dict(stop=(3,)), True), (dict(most=1), True), (dict(stop=(2,)), False)])
def test_a_request_may_end_with_its_first_token(given: dict[str, Any], ends: bool) -> None:
    chosen = backend()
    rows = batch(chosen)
    assert insert(rows, 1, chosen, 4, token=3, **given) == 3
    assert rows.stopped[1] == ends
    assert rows.position[1] == 4 - ends


def test_a_new_request_replaces_all_settings_of_a_row() -> None:
    chosen = backend()
    rows = batch(chosen)
    insert(rows, 0, chosen, 4, stop=(1, 2), most=9, sampling=Sampling(1.0, top_k=2, seed=3))
    assert rows.variant == (True, True)
    insert(rows, 0, chosen, 3, stop=(5,), most=2)
    assert rows.variant == (False, False)
    assert rows.stops[0].tolist() == [5] + [-1] * 7
    assert (rows.generated[0].item(), rows.max_new_tokens[0].item()) == (1, 2)


def test_new_tokens_are_real_in_rows_that_run() -> None:
    chosen = backend()
    rows = batch(chosen)
    insert(rows, 1, chosen, 4)
    mask = torch.full((ROWS, 7), 9)
    rows.mark_new_tokens(mask)
    assert mask.tolist() == [[0] * 7, [1] * 7, [0] * 7]


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_slots_of_other_sizes_do_not_fit() -> None:
    rows = batch(backend())
    other = caches_in(prompt_cache(kvpass.backend("window", budget=BUDGET + 1, inner="eager"), 4))
    with pytest.raises(CacheHandleError, match="needs 10 slots for this prompt and the rows have 9"):
        rows.fit_slots(other)


def test_rows_without_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_batch, "_free_bytes", lambda device: 2**20)
    with pytest.raises(BudgetError, match=r"rows=100000: their slots take [\d,]+ MiB, and 1 MiB are free"):
        RequestBatch.of(loop(), prompt_cache(backend(), 5), 100_000)


def test_free_memory_is_known_for_devices_that_report_it() -> None:
    assert request_batch._free_bytes(torch.device("meta")) is None
    free = request_batch._free_bytes(torch.device("cpu"))
    assert free is None or free > 2**20
