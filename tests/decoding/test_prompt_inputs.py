"""Test padding masks and pins of prompts against their values token by token, and the errors of wrong ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvpass.decoding.prompt_inputs import PaddingMask, TokenIds, are_token_ids, padding_mask, pin_mask
from kvpass.errors import PolicyError

Spans = list[tuple[int, int]]

LEFT_PADDED = st.integers(1, 6).flatmap(
    lambda tokens: st.lists(st.integers(0, tokens - 1), min_size=1, max_size=3).map(
        lambda padding: (torch.arange(tokens) >= torch.tensor(padding)[:, None]).long()
    )
)
"""Padding masks [B, T] in which each row has a token at least."""


def allowed(annotation: object, value: Tensor) -> bool:
    """Return whether an annotation's condition holds for a tensor."""
    (condition,) = annotation.__metadata__  # type: ignore[attr-defined]
    return bool(condition.holds(value))


@pytest.mark.parametrize(
    ("ids", "integers"),
    [
        (torch.zeros(1, 3, dtype=torch.int64), True),
        (torch.zeros(1, 3, dtype=torch.int32), True),
        (torch.zeros(1, 3, dtype=torch.uint8), True),
        (torch.zeros(1, 3), False),
        (torch.zeros(1, 3, dtype=torch.complex64), False),
        (torch.zeros(1, 3, dtype=torch.bool), False),
        (torch.zeros(1, 3, dtype=torch.int64, device="meta"), False),
        (torch.zeros(1, 3, dtype=torch.int64).to_sparse(), False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else f"{value.dtype} {value.layout} {value.device}",
)
def test_token_ids_are_readable_integers(ids: Tensor, integers: bool) -> None:
    assert are_token_ids(ids) == integers
    assert allowed(TokenIds, ids) == integers


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (3,), (), (1, 1, 3)])
def test_token_ids_are_rows_of_tokens_with_one_at_least(shape: tuple[int, ...]) -> None:
    assert not allowed(TokenIds, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("mask", "fits"),
    [
        (torch.tensor([[0, 1, 1]]), True),
        (torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), True),
        (torch.tensor([[False, True]]), True),
        (torch.tensor([[0, 2]]), False),
        (torch.tensor([[0.5, 1.0]]), False),
        (torch.tensor([[torch.nan, 1.0]]), False),
        (torch.tensor([[0.0, -1e9]]), False),
        (torch.tensor([0, 1]), False),
        (torch.ones(1, 2, device="meta"), False),
    ],
)
def test_a_padding_mask_has_zeros_and_ones(mask: Tensor, fits: bool) -> None:
    assert allowed(PaddingMask, mask) == fits


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16])
@given(valid=LEFT_PADDED, length=st.integers(0, 4))
def test_a_padding_mask_is_copied_to_whole_numbers(valid: Tensor, length: int, dtype: torch.dtype) -> None:
    given_mask = torch.nn.functional.pad(valid, (length, 0), value=1).to(dtype)
    before = given_mask.clone()
    mask = padding_mask(torch.zeros_like(valid), given_mask, length)
    assert mask.dtype == torch.int64
    assert mask.tolist() == before.long().tolist()
    mask.zero_()
    assert torch.equal(given_mask, before)


@pytest.mark.parametrize("length", [0, 5])
def test_no_padding_mask_means_no_padding(length: int) -> None:
    mask = padding_mask(torch.zeros(2, 4, dtype=torch.int32), None, length)
    assert mask.dtype == torch.int64
    assert mask.tolist() == [[1] * (length + 4)] * 2


@given(valid=LEFT_PADDED, length=st.integers(0, 3), data=st.data())
def test_padding_behind_a_token_is_refused_by_its_row(valid: Tensor, length: int, data: st.DataObject) -> None:
    valid = torch.nn.functional.pad(valid, (0, 1), value=1)  # a row has a token before its last
    row = data.draw(st.integers(0, len(valid) - 1))
    valid[row, -1] = 0
    mask = torch.nn.functional.pad(valid, (length, 0), value=1)
    with pytest.raises(
        PolicyError, match=f"attention_mask: row {row} has padding behind a token; pad prompts on the l"
    ):
        padding_mask(torch.zeros_like(valid), mask, length)


def test_a_turn_may_be_padded_behind_the_tokens_before() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1]])
    assert torch.equal(padding_mask(torch.zeros(2, 3, dtype=torch.int64), mask, 3), mask)


@pytest.mark.parametrize(
    ("seen", "said"), [(0, "for the new tokens alone"), (5, "for the 5 tokens before and the new")]
)
@pytest.mark.parametrize("shape", [(2, 12), (1, 9), (1, 4), (3, 4), (2, 5)])
def test_a_padding_mask_of_another_shape_names_the_tokens_that_it_is_for(
    seen: int, said: str, shape: tuple[int, int]
) -> None:
    got = rf"attention_mask=\({shape[0]}, {shape[1]}\)"
    with pytest.raises(PolicyError, match=rf"{got}: must be \(2, {seen + 4}\), {said}"):
        padding_mask(torch.zeros(2, 4, dtype=torch.int64), torch.ones(shape), seen)


@given(valid=LEFT_PADDED, data=st.data())
@example(valid=torch.ones(2, 2), data=None)  # as many spans as rows
def test_spans_pin_tokens_by_their_numbers_among_real_ones(valid: Tensor, data: st.DataObject | None) -> None:
    counts = valid.sum(-1).long().tolist()

    def spans_up_to(count: int) -> Spans:
        if data is None:
            return [(0, 1), (1, 2)]
        pairs = st.tuples(st.integers(0, count), st.integers(0, count)).filter(lambda pair: pair[0] != pair[1])
        return [(min(pair), max(pair)) for pair in data.draw(st.lists(pairs, max_size=3))]

    by_row = [spans_up_to(count) for count in counts]
    expected = [pinned_by(spans, row) for spans, row in zip(by_row, valid.tolist(), strict=True)]
    assert same(pin_mask(by_row, False, valid), expected)
    assert same(pin_mask([[list(span) for span in spans] for spans in by_row], True, valid), expected)
    shared = spans_up_to(min(counts))
    assert same(pin_mask(shared, False, valid), [pinned_by(shared, row) for row in valid.tolist()])


def pinned_by(spans: Spans, real: list[int]) -> list[bool]:
    """Return which entries of a row the spans pin, entry by entry."""
    position, pinned = 0, []
    for entry in real:
        pinned.append(bool(entry) and any(start <= position < stop for start, stop in spans))
        position += int(entry)
    return pinned


def same(mask: Tensor | None, expected: list[list[bool]]) -> bool:
    """Return whether pins are the expected ones; None stands for none."""
    return any(map(any, expected)) == (mask is not None) and (mask is None or mask.tolist() == expected)


@given(valid=LEFT_PADDED, data=st.data())
def test_a_mask_pins_its_tokens(valid: Tensor, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.booleans(), min_size=valid.numel(), max_size=valid.numel()))
    mask = torch.tensor(wanted).view(valid.shape) & valid.bool()
    assert same(pin_mask(mask, data.draw(st.booleans()), valid), mask.tolist())


def test_spans_count_real_tokens_and_masks_are_checked() -> None:
    valid = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert pin_mask([(0, 2)], False, valid).int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 0, 0, 0]]  # type: ignore[union-attr]
    rows = pin_mask([[(1, 3)], []], False, valid)
    assert rows is not None
    assert rows.int().tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert pin_mask(None, False, valid) is None
    assert pin_mask([], True, valid) is None
    for pin, message in [
        (torch.ones(2, 5, dtype=torch.bool), "row 0 pins padding"),
        (torch.ones(2, 4, dtype=torch.bool), r"must be bool \[2, 5\]"),
        (torch.ones(2, 5), r"must be bool \[2, 5\]"),
        ([(2, 4)], r"span \(2, 4\) of row 0 is not within its 3 tokens"),
        ([(2, 2)], r"span \(2, 2\) of row 0"),
        ([(-1, 2)], r"span \(-1, 2\)"),
        ([[(0, 1)]], "one such list for each of 2 rows"),
        ([(0, 1, 2)], "one such list for each of 2 rows"),
        ([(0, True)], "one such list for each of 2 rows"),
        ([0, 1], "one such list for each of 2 rows"),
        (["ab", "cd"], "one such list for each of 2 rows"),
        ([[(0, 1)], None], "one such list for each of 2 rows"),
        ([[], [(4, 6)]], r"span \(4, 6\) of row 1 is not within its 5 tokens"),
    ]:
        with pytest.raises(PolicyError, match=message):
            pin_mask(pin, False, valid)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="on_top=True: counts pinned tokens in addition to the budget"):
        pin_mask(None, True, valid)
