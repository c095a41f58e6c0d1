"""Test models that check their inputs, their states or their cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from tests.adversary.models import Checking, seen
from tests.adversary.oracle import Case, judge

IDS = torch.randint(0, 15, (2, 20), generator=torch.Generator().manual_seed(0))
MARKS = torch.ones(2, 20, dtype=torch.int64)


def of_ids(ids: Tensor, *_: Any) -> Tensor:
    return (ids < 16).all()


def of_marks(ids: Tensor, marks: Tensor, *_: Any) -> Tensor:
    return (marks[:, 0] == 1).all()


def of_output(ids: Tensor, marks: Tensor, x: Tensor, _: Any) -> Tensor:
    return (x < 1e4).all()


def of_cache(ids: Tensor, marks: Tensor, x: Tensor, present: Any) -> Tensor:
    return present[0][0].isfinite().all()


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", [of_ids, of_marks, of_output])
def test_a_model_that_checks_something_equals_its_uncompiled_form(check: Any, inner: str) -> None:
    assert judge(Case(Checking(check), {"marks": seen(MARKS)}, (5, 1, 1, 1, 1)), inner=inner).kind == "held"


def test_a_check_of_all_cached_tokens_is_refused() -> None:
    found = judge(Case(Checking(of_cache), {"marks": seen(MARKS)}, (5, 1, 1)))
    assert found.kind == "refused"
    assert "reads all tokens in the cache" in found.detail


@torch.no_grad()
def results_of_calls(check: Any, fails: Callable[[Tensor, Tensor, Checking], None]) -> list[str]:
    """Return "ran", or the message of the error, for each of four calls, the last of which should fail."""
    model = Checking(check)
    compiled = torch.compile(model, backend=kvpass.backend("full", inner="eager"))
    results, past = [], None
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
        ids, marks = IDS[:, start:end].clone(), MARKS[:, :end].clone()
        if start == 6:
            fails(ids, marks, model)
        try:
            _, past = compiled(ids, past, marks=marks)
            results.append("ran")
        except (RuntimeError, AssertionError) as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize(
    ("check", "fails"),
    [
        (lambda ids, *_: (ids != 15).all(), lambda ids, marks, model: ids.fill_(15)),
        (of_marks, lambda ids, marks, model: marks.zero_()),
        (of_output, lambda ids, marks, model: model.project[0].bias.data.fill_(1e9)),
    ],
    ids=["ids", "marks", "output"],
)
def test_a_failed_check_in_a_step_is_an_error(check: Any, fails: Any) -> None:
    *before, last = results_of_calls(check, fails)
    assert before == ["ran"] * 3
    assert last.startswith("checked")
