"""Test which inputs are proven to mark padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor

import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.capture.padding_analysis import hiding_inputs
from kvpass.fx import op_table
from tests.capture.traced import query_graph, result

ROWS, TOKENS = 2, 6
LOWEST = torch.finfo(torch.float32).min
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]


def marks_padding(mask: Mask) -> bool:
    """True if `column` marks padding in mask(column [B, S], i [S, 1], j [S])."""

    def function(column: Tensor) -> Tensor:
        j = torch.arange(TOKENS)
        return mask(column, j[:, None], j)

    def question(gm: fx.GraphModule) -> bool:
        op_table.normalize_calls(gm.graph)
        return [node.op for node in hiding_inputs(gm, result(gm), step=False)] == ["placeholder"]

    return query_graph(function, (torch.ones(ROWS, TOKENS, dtype=torch.int64),), question)


def causal(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i)[None, None]


def before(j: Tensor) -> Tensor:
    """Return the index before each key's own."""
    return torch.arange(-1, end=j.shape[0] - 1)


def turns(j: Tensor) -> Tensor:
    """Return complex numbers of length 1, as rotary embeddings multiply by."""
    return torch.polar(torch.ones(j.shape), j.float())


MARKS_PADDING: dict[str, Mask] = {
    "and": lambda p, i, j: causal(i, j) & p.bool()[:, None, None],
    "compared": lambda p, i, j: causal(i, j) & (p == 1)[:, None, None],
    "looked up": lambda p, i, j: causal(i, j) & p.bool()[torch.arange(2)[:, None, None, None], j[None, None, None]],
    "where": lambda p, i, j: torch.where(p[:, None, None] != 0, causal(i, j).float(), LOWEST),
    "filled": lambda p, i, j: torch.zeros(2, 1, 6, 6).masked_fill(p[:, None, None] == 0, LOWEST),
    "product": lambda p, i, j: (1.0 - p[:, None, None]) * LOWEST + causal(i, j).float(),
    "product of integers": lambda p, i, j: (1 - p[:, None, None]) * LOWEST + causal(i, j).float(),
    "product of 1e9": lambda p, i, j: (1.0 - p[:, None, None].float()) * -1e9 + torch.zeros(2, 1, 6, 6),
    "expanded": lambda p, i, j: (causal(i, j) & p.bool()[:, None, None]).expand(2, 4, 6, 6),
}
MARKS_NO_PADDING: dict[str, Mask] = {
    "of queries": lambda p, i, j: causal(i, j) & p.bool()[:, None, :, None],
    "or": lambda p, i, j: causal(i, j) | p.bool()[:, None, None],
    "itself": lambda p, i, j: (causal(i, j) & p.bool()[:, None, None]) | (i == j),
    "segments": lambda p, i, j: causal(i, j) & (p[:, None, :, None] == p[:, None, None]),
    "weights": lambda p, i, j: causal(i, j).float() + p[:, None, None],
    "hidden a little": lambda p, i, j: (1.0 - p[:, None, None]) * -10.0 + causal(i, j).float(),
    "the other way round": lambda p, i, j: causal(i, j) & (p == 0)[:, None, None],
    "for one head": lambda p, i, j: (
        causal(i, j) & (p.bool()[:, None, None] | torch.tensor([True, False])[:, None, None])
    ),
    "flipped": lambda p, i, j: causal(i, j) & p.bool().flip(1)[:, None, None],
    "of the other row": lambda p, i, j: causal(i, j) & p.bool().flip(0)[:, None, None],
    "of the next token": lambda p, i, j: (
        causal(i, j) & p.bool()[torch.arange(2)[:, None, None, None], j[None, None, None] - 1]
    ),
    "summed": lambda p, i, j: causal(i, j) & (p.cumsum(-1) > 0)[:, None, None],
    "of the token before, by name": lambda p, i, j: (
        causal(i, j) & p.bool()[torch.arange(2)[:, None, None, None], before(j)[None, None, None]]
    ),
    "turned by a complex number": lambda p, i, j: causal(i, j) & (p[:, None, None] * turns(j) * 2).real.bool(),
    "a complex constant": lambda p, i, j: (
        causal(i, j) & (p[:, None, None] + torch.ones_like(turns(j)) * 2j).imag.bool()
    ),
    "written over": lambda p, i, j: (causal(i, j) & p.bool()[:, None, None]).fill_(True),
}


@pytest.mark.parametrize("name", MARKS_PADDING)
def test_an_input_whose_zero_hides_its_token_marks_padding(name: str) -> None:
    assert marks_padding(MARKS_PADDING[name])


@pytest.mark.parametrize("name", MARKS_NO_PADDING)
def test_a_mask_that_may_show_a_token_marks_no_padding(name: str) -> None:
    assert not marks_padding(MARKS_NO_PADDING[name])


def column_marks_padding(mask: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """True if a zero in a column [B, S] hides its token in mask(column [B, 1, 1, S])."""
    column = torch.ones(ROWS, TOKENS, dtype=dtype)
    found = lambda gm: [node.op for node in hiding_inputs(gm, result(gm), step=False)] == ["placeholder"]  # noqa: E731
    return query_graph(lambda p: mask(p[:, None, None]) & causal(*_indices()), (column,), found)


def _indices() -> tuple[Tensor, Tensor]:
    j = torch.arange(TOKENS)
    return j[:, None], j


WRAPS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor], bool]] = {
    "uint8 below zero": (torch.uint8, lambda p: (p - 1) >= 0, False),
    "int8 below zero": (torch.int8, lambda p: (p - 1) >= 0, True),
    "int8 above its range": (torch.int8, lambda p: (1 - p) * -10000 > -100, False),
    "int32 in its range": (torch.int32, lambda p: (1 - p) * -10000 > -100, True),
    "uint8 from a negative number": (torch.int64, lambda p: (p - 1).to(torch.uint8) >= 1, False),
    "a fill that becomes zero": (torch.int64, lambda p: p >= torch.full((1,), 0.5, dtype=torch.int64), False),
    "a fill that stays": (torch.int64, lambda p: p >= torch.full((1,), 1.5, dtype=torch.int64), True),
    "a number that float16 rounds down to zero": (torch.float16, lambda p: p >= 1e-9, False),
    "a number that float16 has": (torch.float16, lambda p: p >= 0.5, True),
    "a number that bfloat16 rounds down": (torch.bfloat16, lambda p: p + 256.0 >= 257.0, False),
    "a difference that bfloat16 rounds away": (torch.bfloat16, lambda p: p + 0.001 + 256.0 > 256.0, False),
    "an integer that float32 rounds": (torch.int64, lambda p: (p + 16777217) - 16777216.0 < 0.5, False),
    "an integer that float32 has": (torch.int64, lambda p: (p + 16777218) - 16777216.0 < 0.5, True),
    "a tensor without dimensions that uint8 wraps": (torch.uint8, lambda p: p >= torch.full((), 256), False),
    "a tensor without dimensions that uint8 has": (torch.uint8, lambda p: p >= torch.full((), 255), True),
    "zero times infinity": (torch.float32, lambda p: ~(p * -torch.inf < 1.0), False),
    "a number that float8 rounds": (
        torch.float32,
        lambda p: (p + 0.32).to(torch.float8_e4m3fn).to(torch.float32) < 0.32,
        False,
    ),
    "a difference that float64 keeps": (torch.float64, lambda p: p + 0.001 + 256.0 > 256.5, True),
}


@pytest.mark.parametrize("name", WRAPS)
def test_a_proof_holds_in_the_dtype_of_each_result(name: str) -> None:
    """Check integers that wrap around and floating-point numbers that are rounded, including constants in the code."""
    dtype, mask, expected = WRAPS[name]
    if not expected:  # what the analysis must not prove is false, or true only by rounding
        hidden = ~mask(torch.zeros(1, 1, 1, 1, dtype=dtype))
        assert name.startswith("a difference") or not bool(hidden.all())
    assert column_marks_padding(mask, dtype) is expected


@given(data=st.data())
def test_a_mask_proven_to_hide_hides_in_torch(data: st.DataObject) -> None:
    """Evaluate random arithmetic on a column with torch, in a random dtype, where the column is zero."""
    draw = data.draw
    dtype = draw(st.sampled_from([torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32]))
    number = st.sampled_from([-10000, -200, -1, 0, 1, 2, 100, 200, 255, 256, 40000, 0.1, 0.5, 1e-9])
    steps = draw(st.lists(st.tuples(st.sampled_from("+-*r"), number), min_size=1, max_size=3))
    below, limit = draw(st.booleans()), draw(number)

    def mask(p: Tensor) -> Tensor:
        for operation, by in steps:
            p = p + by if operation == "+" else p - by if operation == "-" else p * by if operation == "*" else by - p
        return p < limit if below else p >= limit

    try:
        visible = bool(mask(torch.zeros(1, 1, 1, 1, dtype=dtype)))
    except RuntimeError:  # torch cannot convert the number to the dtype
        reject()
    if visible:
        assert not column_marks_padding(mask, dtype)
