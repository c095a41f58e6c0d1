"""Compare the padding that the runtime tracks with a list of the real tokens of each row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvpass
import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.cache.slots import empty_slots
from kvpass.capture.canonical import AttentionSite
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.policies import Policy
from kvpass.runtime.padding_tracker import PaddingTracker, compare_with_cache, padding_from_columns, true_indices

MASK, OTHER = 2, 0
"""Argument indices: of the padding mask, and of an argument that marks no padding."""


def layer_cache(rows: int, policy: Policy) -> LayerCache:
    sizes = dict(budget=8, capacity=policy.capacity(8), batch=rows, heads=1, key_dim=2, value_dim=2)
    layout = Layout(policy, **sizes, dtype=torch.float32, device=torch.device("cpu"), stores_unrotated_keys=False)
    owner = kvpass.backend("window", budget=8)
    absent = torch.empty(rows, 0, dtype=torch.int64)
    clocks = ((0,),) * rows if policy.keeps_clock else ()
    return LayerCache(
        owner, 0, layout, empty_slots(layout), 0, 1, row_budgets=(8,) * rows, clocks=clocks, absent=absent
    )


@dataclasses.dataclass
class Conversation:
    """Two layers, of which the mask concerns the first one, and the real tokens of each row so far.

    Attributes:
        real: for each row, one bool per token.
        clocks: whether the policy counts the tokens of each row.
    """

    real: list[list[bool]]
    clocks: bool = False

    def __post_init__(self) -> None:
        policy = kvpass.backend("streaming", budget=8, interval=2 if self.clocks else 1).policy
        self.caches = [layer_cache(len(self.real), policy) for _ in range(2)]
        self.tracker = PaddingTracker([(MASK,), ()])

    @property
    def length(self) -> int:
        return len(self.real[0])

    def mask(self) -> Tensor:
        return torch.tensor(self.real).long()

    def feed(self, new: list[list[bool]]) -> tuple[Any, ...]:
        """Append new tokens to the rows; return the arguments of the call."""
        self.real = [row + more for row, more in zip(self.real, new, strict=True)]
        return (torch.zeros(1), torch.zeros(1), self.mask())

    def record(self, arguments: tuple[Any, ...], query_len: int) -> None:
        """Count the tokens of a call as the runtime does after it."""
        before = self.length - query_len
        self.tracker.record_padding(self.caches, arguments, before, query_len)
        for cache in self.caches:
            cache.length += query_len
        new = self.mask()[:, before:]
        self.caches[0].slots.seen += new.sum(-1)
        self.caches[1].slots.seen += query_len

    def absent(self) -> list[list[int]]:
        return [[index for index, is_real in enumerate(row) if not is_real] for row in self.real]


@st.composite
def calls(draw: st.DrawFn) -> list[list[list[bool]]]:
    """Draw the new tokens of each call: for each row, one bool per token."""
    rows = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    return [[draw(st.lists(st.booleans(), min_size=n, max_size=n)) for _ in range(rows)] for n in lengths]


def cached_indices(absent: Tensor) -> list[list[int]]:
    return [[index for index in row if index >= 0] for row in absent.tolist()]


def talk(pieces: list[list[list[bool]]], clocks: bool = False) -> Conversation:
    conversation = Conversation([[] for _ in pieces[0]], clocks)
    for new in pieces:
        conversation.record(conversation.feed(new), len(new[0]))
    return conversation


@given(pieces=calls())
def test_padding_is_what_the_masks_of_all_calls_have_hidden(pieces: list[list[list[bool]]]) -> None:
    conversation = Conversation([[] for _ in pieces[0]])
    tracker, caches = conversation.tracker, conversation.caches
    for new in pieces:
        queries, arguments = len(new[0]), conversation.feed(new)
        assert tracker.ones_for_cached(caches, arguments, queries) == {MASK}
        assert tracker.valid_tokens(0, caches[0], arguments, queries).tolist() == new
        assert tracker.valid_tokens(1, caches[1], arguments, queries).all()
        conversation.record(arguments, queries)
        assert cached_indices(caches[0].absent) == conversation.absent()
        assert caches[1].absent.shape == (len(new), 0)


@given(pieces=calls(), data=st.data())
def test_rows_of_a_single_token_count_for_policies_with_a_clock_alone(
    pieces: list[list[list[bool]]], data: st.DataObject
) -> None:
    new = [
        [is_real] for is_real in data.draw(st.lists(st.booleans(), min_size=len(pieces[0]), max_size=len(pieces[0])))
    ]
    for clocks in (True, False):
        conversation = talk(pieces, clocks)
        assert bool(conversation.caches[0].clocks) == clocks
        valid_rows = conversation.tracker.valid_rows(conversation.caches, conversation.feed(new))
        padded = clocks and not all(is_real for (is_real,) in new)
        assert valid_rows == [[is_real for (is_real,) in new] if padded else None, None]


@given(pieces=calls(), data=st.data())
def test_a_mask_that_changes_for_earlier_tokens_is_noticed(pieces: list[list[list[bool]]], data: st.DataObject) -> None:
    """Change one entry: a real token may be hidden later, but padding that is not cached cannot be shown."""
    conversation = talk(pieces)
    row, index = (data.draw(st.integers(0, size - 1)) for size in (len(pieces[0]), conversation.length))
    arguments = conversation.feed([[True]] * len(pieces[0]))
    was_real, mask = conversation.real[row][index], arguments[MASK]
    mask[row, index] = data.draw(st.sampled_from([0, 2])) if was_real else data.draw(st.sampled_from([1, 2]))
    if was_real:
        assert conversation.tracker.ones_for_cached(conversation.caches, arguments, 1) == set()
        assert conversation.tracker.valid_tokens(0, conversation.caches[0], arguments, 1).all()
    else:
        with pytest.raises(CacheHandleError, match="shows a token that it hid before"):
            conversation.tracker.ones_for_cached(conversation.caches, arguments, 1)


@given(pieces=calls())
def test_a_mask_without_rows_is_that_of_every_row(pieces: list[list[list[bool]]]) -> None:
    """Test a mask of one row, and a mask without a dimension of rows."""
    alike = [[new[0]] * len(new) for new in pieces]
    conversation = talk(alike)
    for shape in ((1, -1), (-1,)):
        column = conversation.mask()[0].view(shape)
        assert [bool(answer) for answer in compare_with_cache(conversation.caches[0], column)] == [True, True]
        _, hides_absent = compare_with_cache(conversation.caches[0], 1 - column)
        assert bool(hides_absent) != any(conversation.absent())


@given(rows=st.integers(1, 3), length=st.integers(1, 8), data=st.data())
def test_a_token_is_shown_only_if_all_inputs_show_it(rows: int, length: int, data: st.DataObject) -> None:
    """Hide tokens by two inputs that differ: one for both layers, and one for the first layer alone."""
    size = st.lists(st.booleans(), min_size=length, max_size=length)
    one, two = (torch.tensor([data.draw(size) for _ in range(rows)]).long() for _ in range(2))
    policy = kvpass.backend("streaming", budget=8).policy
    caches = [layer_cache(rows, policy) for _ in range(2)]
    tracker = PaddingTracker([(OTHER, MASK), (OTHER,)])
    arguments = (one, torch.zeros(1), two)
    assert tracker.ones_for_cached(caches, arguments, length) == {OTHER, MASK}
    tracker.record_padding(caches, arguments, 0, length)
    for cache, real in zip(caches, (one * two, one), strict=True):
        cache.length = length
        cache.slots.seen += real.sum(-1)
        assert cached_indices(cache.absent) == [[i for i, x in enumerate(row) if not x] for row in real.tolist()]
    new = torch.ones(rows, 1, dtype=torch.int64)
    arguments = (torch.cat([one, new], 1), torch.zeros(1), torch.cat([two, new], 1))
    assert tracker.ones_for_cached(caches, arguments, 1) == {OTHER, MASK}
    if hidden := (one * two == 0).nonzero().tolist():
        row, index = data.draw(st.sampled_from(hidden))
        arguments[OTHER][row, index] = arguments[MASK][row, index] = 1
        with pytest.raises(CacheHandleError, match="shows a token that it hid before"):
            tracker.ones_for_cached(caches, arguments, 1)


@given(rows=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3), start=st.integers(0, 9))
def test_true_indices_are_sorted_and_filled_up(rows: list[list[bool]], start: int) -> None:
    expected = [[start + index for index, marked in enumerate(row) if marked] for row in rows]
    most = max(map(len, expected))
    assert true_indices(torch.tensor(rows), start).tolist() == [row + [-1] * (most - len(row)) for row in expected]


def test_a_token_is_padding_if_any_input_hides_it() -> None:
    columns = [torch.tensor([[1, 0, 1], [1, 1, 1]]), torch.tensor([1, 1, 0])]
    padding = padding_from_columns(columns, 2, 3, torch.device("cpu"))
    assert padding.tolist() == [[False, True, True], [False, False, True]]
    assert not padding_from_columns([], 2, 3, torch.device("cpu")).any()


def test_padding_that_no_input_of_a_step_marks_is_refused() -> None:
    conversation = talk([[[False, True]]])
    node = fx.Graph().placeholder("attention")
    names = ("call", "query", "key", "value", "past_key", "past_value", "grown_key", "grown_value")
    site = AttentionSite(0, 0, False, attended=(node, node), mask=None, **dict.fromkeys(names, node))
    known = PaddingTracker([(MASK,), ()])
    known.check_hidden(conversation.caches, [site, site])
    unknown = PaddingTracker([(), ()])
    with pytest.raises(UnsupportedGraph, match="earlier masks hid padding"):
        unknown.check_hidden(conversation.caches, [site, site])


def test_a_rewrite_knows_the_inputs_that_are_unchanged() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("ids", "one", "other")]
    tracker = PaddingTracker([(1, 2), (1,)])
    padding_inputs = tracker.as_padding_inputs(frozenset({2}), nodes)
    _, one, other = nodes
    assert (padding_inputs.by_layer, padding_inputs.ones_for_cached) == (((one, other), (one,)), frozenset({other}))


@given(pieces=calls(), width=st.integers(0, 24))
def test_a_mask_that_is_too_short_is_not_the_mask_of_the_cached_tokens(
    pieces: list[list[list[bool]]], width: int
) -> None:
    conversation = talk(pieces)
    cache, mask = conversation.caches[0], conversation.mask()[:, :width]
    same, hides_absent = compare_with_cache(cache, mask)
    assert bool(same) == (width >= conversation.length)
    assert bool(hides_absent)
    hidden = [index for row in conversation.absent() for index in row if index < width]
    assert bool(compare_with_cache(cache, torch.ones_like(mask))[1]) == (not hidden)
