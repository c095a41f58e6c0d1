"""Compare every policy on vectors in int8 and int4 with its reference, step by step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.diagnostics.simulate import simulate
from kvpass.lowering.formats import KVDtype, base_of
from tests.calibrations import made_for_model
from tests.strategies import TABLE, Case, Row, cases
from tests.test_chunks_and_padding import EVICTING, compare

EXACT = ("d2o", "kv_align")  # all others copy rows and compute none
HADAMARD = [pytest.param(f"{kind}-hadamard", marks=pytest.mark.slow) for kind in ("int8", "int4")]
every_format = pytest.mark.parametrize("kv_dtype", ["int8", "int4", *HADAMARD])


def without_ties(row: Row) -> st.SearchStrategy[Case]:
    """Draw cases in which no two rows differ only in the last bit.

    Rows of two numbers with few bits have few directions, among which d2o takes the nearest, and few lengths, which
    knorm compares.
    """
    return cases(row, dim=8) if row.name in ("d2o", "knorm") else cases(row)


def check(case: Case, kv_dtype: KVDtype) -> None:
    q, k, v = case.layer()
    expected = simulate(case.name, q, k, v, kv_dtype=kv_dtype, **case.settings)
    got = simulate(case.name, q, k, v, kv_dtype=kv_dtype, compiled=True, **case.settings)
    assert torch.equal(got.positions, expected.positions)
    # A computed row that is rotated and rounded again may round differently, by one step of its scale.
    near = 0.2 if case.name in EXACT and "-" in kv_dtype else 1e-4
    torch.testing.assert_close(got.output, expected.output, atol=near, rtol=near)
    close: dict[str, Any] = dict(atol=near, rtol=near) if case.name in EXACT else dict(atol=0, rtol=0)
    torch.testing.assert_close(got.keys, expected.keys, **close)
    torch.testing.assert_close(got.values, expected.values, **close)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int4-hadamard", HADAMARD[0]])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@given(data=st.data())
@settings(max_examples=2)
def test_compiled_equals_reference(row: Row, kv_dtype: KVDtype, data: st.DataObject) -> None:
    check(data.draw(without_ties(row)), kv_dtype)


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@given(data=st.data())
@settings(max_examples=25)
def test_compiled_equals_reference_in_more_cases(row: Row, kv_dtype: KVDtype, data: st.DataObject) -> None:
    check(dataclasses.replace(data.draw(without_ties(row)), seed=7), kv_dtype)


@every_format
@pytest.mark.parametrize("row", EVICTING, ids=lambda row: row.name)
@given(data=st.data())
@settings(max_examples=2)
def test_padded_prompts_and_chunks(row: Row, kv_dtype: KVDtype, data: st.DataObject) -> None:
    case = data.draw(cases(row, dim=8))
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 2, 5, 12]), min_size=1, max_size=8))
    compare(case, [case.prompt, *lengths], data.draw(st.sampled_from([0.0, 0.2])), kv_dtype=kv_dtype)


@every_format
@pytest.mark.parametrize("row", [row for row in TABLE if row.name not in EXACT], ids=lambda row: row.name)
def test_nothing_else_than_the_rows_is_rounded(row: Row, kv_dtype: KVDtype) -> None:
    """Check that a prompt attends to exact rows, and that later outputs differ from plain rows only by rounding."""
    more = made_for_model(row.name, 1, dim=32)
    case = Case(row.name, row.fixed | more, 3, 1, 2, 2, 32, None if row.name == "full" else 20, 16, 4, "absolute", None)
    exact, got = (
        simulate(case.name, *case.layer(0.5), compiled=True, kv_dtype=kind, **case.settings)
        for kind in (None, kv_dtype)
    )
    assert torch.equal(got.output[:, :, :16], exact.output[:, :, :16])
    apart = (got.output[:, :, 16:] - exact.output[:, :, 16:]).abs().max()
    assert 0 < apart < {"int8": 0.02, "int4": 0.3}[base_of(kv_dtype)]
