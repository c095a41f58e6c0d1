"""BUZZ: the recursion of its sizes, the parameter theorem, and its errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.buzz import Buzz, threshold_for, window_and_threshold
from kvpass.simulate import simulate
from tests.strategies import ROWS, cases


@given(data=st.data())
def test_sizes_follow_the_recursion(data):
    case = data.draw(cases(ROWS["buzz"], steps=40, prompt=3))
    trace = simulate("buzz", *case.layer(), compiled=True, **case.settings)
    policy, sizes = case.policy, (trace.positions >= 0).sum(-1)
    window, threshold = policy.sizes(case.budget)
    fixed, interval, old = policy.sinks + window, (policy.stride + 1) // 2, 0
    for before, after in itertools.pairwise(sizes):
        stored = int(before.flatten()[0]) + 1
        if stored == fixed + threshold + 1:
            old = math.ceil(old / interval) + math.ceil((threshold + 1 - old) / policy.stride)
            stored = fixed + old
        assert (after == stored).all()
    assert sizes.max() <= fixed + threshold


@given(data=st.data(), prompt=st.integers(1, 200))
def test_prompts_of_any_length_fit_and_the_host_knows_the_size(data, prompt):
    case = data.draw(cases(ROWS["buzz"], prompt=prompt, steps=3))
    trace = simulate("buzz", *case.layer(), compiled=True, **case.settings)
    policy = case.policy
    stored, _ = policy.clock((), prompt, case.budget)
    assert int((trace.positions[0] >= 0).sum(-1).max()) == stored < policy.capacity(case.budget, prompt)
    if policy.iterate_prompt:
        assert stored <= case.budget


@given(st.integers(3, 9), st.integers(2, 60))
def test_a_full_middle_always_shrinks(stride, threshold):
    policy = Buzz(stride=stride, sinks=0, window=1, threshold=threshold)
    clock = (1, 0)
    for _ in range(500):
        _, clock = policy.tick(clock, 1 + threshold)
        assert clock[0] <= 1 + threshold


def test_the_best_of_each_hive_stays():
    q, k, v = (torch.randn(1, 1, 28, 8, generator=torch.Generator().manual_seed(n)) * 2 for n in range(3))
    rows = (q[0, 0] @ k[0, 0].T / 8**0.5).masked_fill(torch.ones(28, 28).triu(1).bool(), -torch.inf).softmax(-1)
    paid = rows.sum(0)
    trace = simulate("buzz", q, k, v, prompt=28, budget=14, sinks=3, window=5, threshold=6, compiled=True)
    hives = [range(n, min(n + 5, 23)) for n in range(3, 23, 5)]
    best = [max(hive, key=lambda j: paid[j]) for hive in hives]
    assert trace.positions[0, 0, 0].tolist() == [0, 1, 2, *best, *range(23, 28), -1, -1]


def test_the_parameter_theorem():
    assert threshold_for(12) == 52
    assert threshold_for(12, 4) == 36
    assert threshold_for(4, 3) == 10


@given(st.integers(8, 5000), st.integers(3, 9), st.integers(0, 4))
def test_a_budget_is_split_to_the_last_slot(budget, stride, sinks):
    window, threshold = window_and_threshold(budget, stride, sinks)
    assert sinks + window + threshold == budget
    assert abs(threshold - threshold_for(window, stride)) <= stride


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stride": 2}, "stride"),
        ({"sinks": -1}, "sinks"),
        ({"window": 0}, "window"),
        ({"threshold": 1}, "threshold"),
        ({"variant": "slow"}, "variant"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(PolicyError, match=named):
        Buzz(**options)


@pytest.mark.parametrize("options", [{"window": 10, "threshold": 20}, {"window": 29}, {"threshold": 26}])
def test_a_split_that_does_not_fit_is_refused(options):
    with pytest.raises(BudgetError, match="budget=30"):
        Buzz(**options).check_budget(30)
