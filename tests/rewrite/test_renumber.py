"""Test which inputs can be position ids, how ids are shifted, and masks of windows, against lists of numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpass.policies.budgets import window_starts
from kvpass.rewrite.renumber import fits_prompt, fits_step, subtract_by_row, window_mask


def padded(lengths: list[int]) -> Tensor:
    """Return bool [B, n] of rows that are padded on the left."""
    return torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=3)


# -- which inputs can be position ids ----------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(2, 6), min_size=1, max_size=3), filler=st.integers(0, 9))
def test_counted_tokens_fit_a_prompt_whatever_padding_has(lengths: list[int], filler: int) -> None:
    valid = padded(lengths)
    ids = torch.where(valid, valid.long().cumsum(-1) - 1, filler)
    assert fits_prompt(ids)
    assert fits_prompt(ids.to(torch.int32))
    assert fits_prompt(ids[None])


@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=2))
def test_ids_that_end_otherwise_do_not_fit_a_prompt(rows: list[list[int]]) -> None:
    counted = all(row[-1] > 0 and row[len(row) - row[-1] - 1 :] == list(range(row[-1] + 1)) for row in rows)
    assert fits_prompt(torch.tensor(rows)) == counted


@pytest.mark.parametrize("ids", [torch.tensor(3), torch.tensor([0]), torch.tensor([[1], [2]])])
def test_ids_of_less_than_two_tokens_tell_nothing(ids: Tensor) -> None:
    assert not fits_prompt(ids)


@given(
    seen=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    query_len=st.integers(1, 4),
)
def test_counted_tokens_fit_a_step(seen: list[int], padding: int, query_len: int) -> None:
    real, length = torch.tensor(seen), torch.tensor(seen) + padding
    fits = fits_step(real, length)
    ahead = torch.arange(query_len)
    for start in (real, length, real - 1):  # among real tokens, with padding, or a padding token
        assert fits(start[:, None] + ahead)
        assert fits((start[:, None] + ahead).int())
    assert not fits(length[:, None] + 1 + ahead)
    assert not fits(real[:, None] - 2 + ahead)
    if query_len > 1:
        assert not fits(real[:, None] + 2 * ahead)
        assert not fits(real[:, None] - ahead)
        assert fits(real[:, None] + (ahead - 1).clamp(min=0))  # padding, which has the first token's position


@pytest.mark.parametrize("ids", [torch.tensor(5), torch.full((3, 1), 5), torch.full((2, 2, 1), 5)])
def test_ids_of_other_rows_do_not_fit_a_step(ids: Tensor) -> None:
    assert not fits_step(torch.tensor([5, 5]), torch.tensor([5, 5]))(ids)


def test_one_row_of_ids_serves_all_rows() -> None:
    fits = fits_step(torch.tensor([5, 6]), torch.tensor([9, 9]))
    assert fits(torch.tensor([[6]]))
    assert fits(torch.tensor([6]))
    assert not fits(torch.tensor([[4]]))


def test_which_inputs_can_be_position_ids() -> None:
    assert fits_prompt(torch.tensor([[0, 1, 2, 3], [1, 1, 0, 1]]))
    assert not fits_prompt(torch.tensor([[0, 1, 2, 3], [7, 1, 9, 2]]))
    assert not fits_prompt(torch.zeros(2, 4, dtype=torch.int64))
    fits = fits_step(torch.tensor([5, 7]), torch.tensor([9, 9]))
    assert fits(torch.tensor([[5], [7]]))
    assert fits(torch.tensor([[9]]))
    assert fits(torch.tensor([[5, 6, 7], [6, 6, 7]]))
    assert not fits(torch.tensor([[5, 7, 8], [7, 8, 9]]))
    assert not fits(torch.tensor([[5], [70]]))


# -- shifted ids and masks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("shape", "along"), [((2, 3), 1), ((1, 3), 1), ((2, 1, 3), 2), ((2, 3, 1), 1), ((2, 4, 3), 2), ((1, 3, 4), 1)]
)
def test_each_row_of_ids_is_shifted_by_its_own_number(shape: tuple[int, ...], along: int, dtype: torch.dtype) -> None:
    ids, shift = torch.randint(9, shape, dtype=dtype), torch.tensor([[1, 2, 3], [10, 20, 30]])
    shifted = subtract_by_row(ids, along, shift)
    assert shifted.dtype == dtype
    for row in range(2):
        for token in range(3):
            before = ids[row % shape[0]].select(along - 1, token)
            assert torch.equal(shifted[row].select(along - 1, token), before - shift[row, token].to(dtype))


def test_ids_without_rows_are_shifted_as_the_first_row() -> None:
    shifted = subtract_by_row(torch.tensor([5, 6]), 0, torch.tensor([[1, 2], [7, 7]]))
    assert shifted.tolist() == [4, 4]


def visible(lengths: list[int], size: int, causal: bool) -> list[Any]:
    """Return which keys each query of each row sees, by the first number of its window."""
    starts = window_starts(padded(lengths), size).tolist()
    return [
        [[a == b and (key <= query or not causal) for key, b in enumerate(row)] for query, a in enumerate(row)]
        for row in starts
    ]


@given(lengths=LENGTHS, size=st.integers(1, 10), causal=st.booleans())
def test_a_query_sees_the_tokens_of_its_own_window(lengths: list[int], size: int, causal: bool) -> None:
    expected = torch.tensor(visible(lengths, size, causal))[:, None]
    count, valid = max(lengths), padded(lengths)
    assert torch.equal(window_mask(None, causal, valid, size), expected)
    boolean = torch.rand(len(lengths), 2, count, count) < 0.5
    assert torch.equal(window_mask(boolean, causal, valid, size), boolean & expected)
    rows = torch.full((len(lengths), 1), size)
    assert torch.equal(window_mask(None, causal, valid, rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_keeps_its_dtype_and_hides_other_windows_by_a_number(dtype: torch.dtype) -> None:
    """Check that a row whose tokens are all hidden gives numbers, as the softmax of only -inf gives NaN."""
    valid, bias = padded([6, 3]), torch.randn(1, 1, 6, 6).to(dtype)
    masked = window_mask(bias, False, valid, 2)
    expected = torch.tensor(visible([6, 3], 2, False))[:, None]
    assert masked.dtype == dtype
    assert torch.equal(masked, torch.where(expected, bias, torch.finfo(dtype).min))
    assert masked.isfinite().all()


def test_a_prompt_within_the_budget_is_one_window() -> None:
    mask = window_mask(None, True, padded([4, 2]), 4)
    assert torch.equal(mask, torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, -1, -1))
