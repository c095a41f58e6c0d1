"""Test functions on sections: they give what they give for the joined tensor, and rotary embeddings join nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.lowering.formats import Sections
from kvpass.rewrite.sections import PaddedSections, SectionInterpreter

WIDTH = 8
Function = Callable[[Tensor, Tensor], Tensor]


def half(x: Tensor, cos: Tensor) -> Tensor:
    a, b = x[..., :4], x[..., 4:]
    return x * cos + torch.cat([-b, a], -1)


def partial(x: Tensor, cos: Tensor) -> Tensor:
    rotated, rest = x.split([6, 2], -1)
    a, b = rotated.chunk(2, -1)
    return torch.cat([rotated * cos[..., :6] + torch.cat([-b, a], -1), rest], -1)


def interleaved(x: Tensor, cos: Tensor) -> Tensor:
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def in_place(x: Tensor, cos: Tensor) -> Tensor:
    y = x.clone()
    y += cos
    return y * 2.0


JOINING: dict[str, Function] = {
    "interleaved": interleaved,
    "a sum": lambda x, cos: x - x.sum(-1, keepdim=True),
    "a norm": lambda x, cos: torch.nn.functional.layer_norm(x, (WIDTH,)) * cos,
    "a reshape": lambda x, cos: (x.unflatten(-1, (2, 4)) * 2).flatten(-2) * cos,
    "flipped": lambda x, cos: x.flip(-1) + x,
    "an index": lambda x, cos: x[..., 3] + cos[..., 0],
    "a step": lambda x, cos: torch.cat([x[..., ::2], x[..., 1::2]], -1),
    "rows": lambda x, cos: torch.cat([x, x], -2),
    "rows of the first": lambda x, cos: x[:1, ..., :3],
    "chunks of rows": lambda x, cos: x.chunk(2, 0)[0] * cos,
    "a transposition of the last": lambda x, cos: x.transpose(-1, -2) + 1,
    "one column": lambda x, cos: x * x[..., :1],
}
APART: dict[str, Function] = {
    "half": half,
    "partial": partial,
    "in place": in_place,
    "a number": lambda x, cos: (x * 2 - 1).float().contiguous(),
    "chunks that do not fit": lambda x, cos: torch.cat(x.chunk(3, -1)[::-1], -1) * cos,
    "parts of three": lambda x, cos: torch.cat(torch.split(x, 3, dim=-1)[::-1], dim=-1) * cos,
    "from the end": lambda x, cos: torch.cat([x[..., -3:], x[..., :-3]], -1) * cos,
    "heads second": lambda x, cos: x.transpose(1, 2) * cos.transpose(1, 2),
    "the other operand": lambda x, cos: cos - x,
    "a column": lambda x, cos: x * cos[..., :1],
    "concatenated with another": lambda x, cos: torch.cat([x[..., :2], cos[..., 2:].expand(2, 3, 5, 6)], -1),
}


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 5, WIDTH), torch.randn(1, 3, 5, WIDTH)


def cut(x: Tensor, ends: list[int]) -> Sections:
    bounds = [0, *sorted({end for end in ends if 0 < end < WIDTH}), WIDTH]
    return Sections(tuple(x[..., a:b] for a, b in itertools.pairwise(bounds)))


@pytest.mark.parametrize("name", [*JOINING, *APART])
@settings(max_examples=3)
@given(ends=st.lists(st.integers(1, WIDTH - 1), max_size=3), whole=st.booleans())
@example(ends=[], whole=False)
@example(ends=[4], whole=True)
@example(ends=[3], whole=False)
def test_sections_give_the_result_of_the_joined_tensor(name: str, ends: list[int], whole: bool) -> None:
    function, (x, cos) = {**JOINING, **APART}[name], operands()
    first = cut(x, ends)
    first = Sections(first.tensors, x) if whole else first
    result = SectionInterpreter(fx.symbolic_trace(function)).run_on(first, cos)
    torch.testing.assert_close(torch.cat(result, -1) if result[0].ndim else result[0], function(x, cos))


@pytest.mark.parametrize("name", APART)
def test_what_rotates_keys_joins_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(sections: Sections) -> Any:
        raise AssertionError(f"{sections.ends} were joined")

    monkeypatch.setattr(Sections, "join", join)
    x, cos = operands()
    SectionInterpreter(fx.symbolic_trace(APART[name])).run_on(cut(x, [4]), cos)


def test_halves_are_never_joined() -> None:
    x, cos = operands()
    sections = SectionInterpreter(fx.symbolic_trace(half)).run_on(Sections((x,)), cos)
    assert [section.shape[-1] for section in sections] == [4, 4]


def test_a_result_that_is_no_tensor_in_sections_is_returned_alone() -> None:
    x, cos = operands()
    (result,) = SectionInterpreter(fx.symbolic_trace(lambda x, cos: cos + 1)).run_on(Sections((x,)), cos)
    assert torch.equal(result, cos + 1)


@pytest.mark.parametrize("name", ["keyword", "position", "last", "negative", "concat", "default"])
def test_concatenations_are_sums_of_padded_tensors(name: str) -> None:
    function: Function = {
        "keyword": lambda x, y: torch.cat([x, y, x], dim=1),
        "position": lambda x, y: torch.cat((x, y), 2),
        "last": lambda x, y: torch.cat([x, y, y], 3),
        "negative": lambda x, y: torch.cat([x, y], dim=-2) * 2,
        "concat": lambda x, y: torch.concat([x, y], -1),
        "default": lambda x, y: torch.cat([x, y]),
    }[name]
    x, y = torch.randn(2, 3, 5, WIDTH), torch.randn(2, 3, 5, WIDTH)
    gm = fx.symbolic_trace(function)
    torch.testing.assert_close(PaddedSections(gm).run(x, y), function(x, y))


@given(widths=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_sections_are_cut_sliced_and_joined(widths: list[int], data: st.DataObject) -> None:
    x = torch.randn(2, sum(widths))
    sections = Sections(torch.split(x, widths, -1))
    assert sections.width == sum(widths)
    assert sections.ends == list(itertools.accumulate(widths))
    assert torch.equal(sections.join(), x)
    ends = data.draw(st.sets(st.integers(0, sum(widths))))
    finer = sections.cut_at(ends)
    assert set(finer.ends) == set(sections.ends) | (ends - {0})
    assert torch.equal(torch.cat(finer.tensors, -1), x)
    start = data.draw(st.integers(0, sum(widths) - 1))
    stop = data.draw(st.integers(start + 1, sum(widths)))
    assert torch.equal(torch.cat(sections.slice(start, stop).tensors, -1), x[:, start:stop])


def test_sections_cut_and_join() -> None:
    x = torch.arange(6.0)
    sections = Sections((x[:2], x[2:]))
    assert [p.tolist() for p in sections.slice(1, 5).tensors] == [[1.0], [2.0, 3.0, 4.0]]
    assert torch.equal(sections.join(), x)


def test_a_tensor_that_exists_is_not_joined_anew() -> None:
    x = torch.arange(6.0)
    assert Sections((x[:2], x[2:]), x).join() is x
