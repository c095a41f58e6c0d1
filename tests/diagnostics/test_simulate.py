"""Compare the lowered operations with the eager references, for every policy and option."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass.policies
from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, KVPassError, PolicyError
from tests.aligners import random_aligner
from tests.calibrations import made_for_model
from tests.strategies import MODEL_SPECIFIC, ROWS, TABLE, cases

NEEDED = {
    "kv_align": {"aligner": random_aligner("direct")},
    **{name: made_for_model(name, 1) for name in MODEL_SPECIFIC if name != "kv_align"},
}


def check(case):
    """Compare positions at every step exactly, and outputs and final rows within a tolerance."""
    q, k, v = case.layer()
    expected = simulate(case.name, q, k, v, **case.settings)
    got = simulate(case.name, q, k, v, compiled=True, **case.settings)
    assert torch.equal(got.positions, expected.positions)
    torch.testing.assert_close(got.output, expected.output, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.keys, expected.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.values, expected.values, atol=1e-4, rtol=1e-4)
    return got


def test_every_policy_is_in_the_table():
    assert sorted(ROWS) == kvpass.policies.names()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@given(data=st.data())
def test_compiled_equals_reference(row, data):
    check(data.draw(cases(row)))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@given(data=st.data())
def test_nothing_is_lost_before_the_budget_is_full(row, data):
    case = data.draw(cases(row, steps=3))
    if case.budget is not None:
        steps = min(case.steps, case.budget - 1)
        case = dataclasses.replace(case, steps=steps, prompt=data.draw(st.integers(1, case.budget - steps)))
    q, k, v = case.layer()
    full = simulate("full", q, k, v, prompt=case.prompt, rope_theta=case.theta)
    lossless = row.lossless_at(case.budget or 0, case.policy.interval)
    got = simulate(case.name, q, k, v, compiled=True, **{**case.settings, **lossless})
    if not case.options.get("log_n") and row.name != "cascade":
        torch.testing.assert_close(got.output, full.output, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@given(data=st.data())
def test_kept_tokens_are_sorted_distinct_and_within_the_budget(row, data):
    case = data.draw(cases(row))
    got = simulate(case.name, *case.layer(), compiled=True, **case.settings)
    live = got.positions >= 0
    assert (got.positions[..., 1:] > got.positions[..., :-1])[live[..., 1:]].all()
    assert (live[..., 1:] <= live[..., :-1]).all()
    seen = torch.arange(case.prompt, case.prompt + case.steps + 1)[:, None, None, None]
    assert (got.positions < seen).all()


@pytest.mark.parametrize("name", ["window", "h2o"])
def test_shapes_that_do_not_fit_are_refused(name):
    x = torch.randn(1, 2, 6, 4)
    with pytest.raises(KVPassError, match="prompt=7"):
        simulate(name, x, x, x, prompt=7, budget=4)
    with pytest.raises(KVPassError, match="KV heads"):
        simulate(name, torch.randn(1, 3, 6, 4), x, x, prompt=2, budget=4)
    with pytest.raises(KVPassError, match="one attention layer"):
        simulate(name, x, x[:, :, :5], x, prompt=2, budget=4)


def test_a_full_cache_that_overflows_its_budget_is_refused():
    x = torch.randn(1, 1, 6, 4)
    with pytest.raises(BudgetError, match="budget=5"):
        simulate("full", x, x, x, prompt=2, budget=5)


@pytest.mark.parametrize("budget", [0, -1, 1.5, 0.0, True, "12", None])
def test_bad_budgets_are_refused(budget):
    x = torch.randn(1, 1, 6, 4)
    with pytest.raises(BudgetError, match=r"budget=|needs a budget"):
        simulate("h2o", x, x, x, prompt=2, budget=budget)


def test_unknown_policies_and_options_are_refused():
    with pytest.raises(PolicyError, match="'h3o'"):
        kvpass.policies.get("h3o")
    with pytest.raises(PolicyError, match="'heavyness'"):
        kvpass.policies.resolve("h2o", {"heavyness": 1})


@given(data=st.data())
def test_a_policy_survives_being_written_down(data):
    row = data.draw(st.sampled_from([row for row in TABLE if row.name not in MODEL_SPECIFIC]))  # weights are no text
    policy = kvpass.policies.resolve(row.name, data.draw(row.options))
    assert kvpass.policies.from_json(kvpass.policies.to_json(policy)) == policy


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_taken(row, dtype):
    layer = [torch.randn(2, heads, 40, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)]
    budget = None if row.name == "full" else 20
    options = row.fixed | NEEDED.get(row.name, {})
    got = simulate(row.name, *(x.to(dtype) for x in layer), prompt=28, budget=budget, compiled=True, **options)
    exact = simulate(row.name, *layer, prompt=28, budget=budget, compiled=True, **options)
    assert got.output.dtype == got.keys.dtype == dtype
    torch.testing.assert_close(got.output[:, :, :28].float(), exact.output[:, :, :28], atol=0.05, rtol=0.05)
    assert torch.isfinite(got.output).all()
