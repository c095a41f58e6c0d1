"""Test masks of fixed size, whose columns are gathered for the slots."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.rewrite.masks import ColumnMask

ROWS, HEADS, GROUPS, TOKENS = 2, 2, 3, 9


@pytest.mark.parametrize("mask_rows", [1, ROWS])
@pytest.mark.parametrize("mask_heads", [1, HEADS * GROUPS])
@pytest.mark.parametrize("mask_queries", [1, 2])
@given(
    orders=st.lists(st.permutations(range(TOKENS)), min_size=ROWS * HEADS, max_size=ROWS * HEADS),
    own=st.booleans(),
    boolean=st.booleans(),
)
def test_a_slot_has_the_column_of_its_token(
    mask_rows: int, mask_heads: int, mask_queries: int, orders: list[list[int]], own: bool, boolean: bool
) -> None:
    """Check tokens in any slot, which each head may hold in another one."""
    sets = HEADS if own else 1
    index = torch.tensor(orders).view(ROWS, HEADS, TOKENS)[:, :sets, :5]
    mask = torch.randn(mask_rows, mask_heads, mask_queries, TOKENS)
    mask = mask > 0 if boolean else mask
    found = ColumnMask([], 2).on_slots(index, index, HEADS, [mask], [])
    assert found.dtype == mask.dtype
    assert found.shape[3:] == (2, 5)
    for row, head, group, query in itertools.product(range(ROWS), range(HEADS), range(GROUPS), range(2)):
        ours = found[row, head % found.shape[1], group % found.shape[2], query]
        theirs = mask[row % mask_rows, (head * GROUPS + group) % mask_heads, query % mask_queries]
        assert torch.equal(ours, theirs[index[row, head % sets]])


def test_a_free_slot_has_some_column() -> None:
    """Check that an index out of range is none: the step leaves out free slots itself."""
    index = torch.tensor([[[-1, 12, 3]]])
    mask = torch.arange(9.0).view(1, 1, 1, 9)
    found = ColumnMask([], 1).on_slots(index, index, 1, [mask], [])
    assert found.flatten().tolist() == [0.0, 8.0, 3.0]


def test_masks_of_fixed_size_have_one_key() -> None:
    """Check that steps of layers with such masks are traced once."""
    assert ColumnMask([], 1).key == ColumnMask([], 2).key
    assert ColumnMask([], 1).entries == ColumnMask([], 1).key_features == ()
