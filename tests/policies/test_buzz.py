"""Test BUZZ: the recursion of its sizes, the theorem on its parameters, and its errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.buzz import Buzz, threshold_for, window_and_threshold
from tests.strategies import ROWS, cases


@given(data=st.data())
def test_sizes_follow_the_recursion(data):
    case = data.draw(cases(ROWS["buzz"], steps=40, prompt=3))
    trace = simulate("buzz", *case.layer(), compiled=True, **case.settings)
    policy, sizes = case.policy, (trace.positions >= 0).sum(-1)
    window, threshold = policy.sizes(case.budget)
    fixed, interval, old = policy.sinks + window, policy.old_stride or (policy.stride + 1) // 2, 0
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


@given(st.integers(3, 9), st.integers(2, 60), st.none() | st.integers(2, 9))
def test_a_full_middle_always_shrinks(stride, threshold, old_stride):
    policy = Buzz(stride=stride, sinks=0, window=1, threshold=threshold, old_stride=old_stride)
    clock = (1, 0)
    for _ in range(500):
        _, clock = policy.tick(clock, 1 + threshold)
        assert clock[0] <= 1 + threshold


def test_the_best_of_each_hive_stays():
    q, k, v = (torch.randn(1, 1, 28, 8, generator=torch.Generator().manual_seed(n)) * 2 for n in range(3))
    rows = (q[0, 0] @ k[0, 0].T / 8**0.5).masked_fill(torch.ones(28, 28).triu(1).bool(), -torch.inf).softmax(-1)
    sums = rows.sum(0)
    trace = simulate("buzz", q, k, v, prompt=28, budget=14, sinks=3, window=5, threshold=6, compiled=True)
    hives = [range(n, min(n + 5, 23)) for n in range(3, 23, 5)]
    best = [max(hive, key=lambda j: sums[j]) for hive in hives]
    assert trace.positions[0, 0, 0].tolist() == [0, 1, 2, *best, *range(23, 28), -1, -1]


@pytest.mark.parametrize(("old_stride", "old"), [(None, [0]), (3, [0]), (2, [0, 10])])
def test_old_tokens_are_sampled_at_their_own_stride(old_stride, old):
    """Check by hand: the first thinning keeps 0, 5, 10, old in the second; 12 to 20 are new."""
    q, k, v = (torch.randn(1, 1, 22, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    sizes = {"budget": 12, "sinks": 0, "window": 1, "threshold": 11, "old_stride": old_stride}
    held = simulate("buzz", q, k, v, prompt=1, variant="nomax", compiled=True, **sizes).positions[:, 0, 0].tolist()
    assert [p for p in held[12] if p >= 0] == [0, 5, 10, 12]
    assert [p for p in held[21] if p >= 0] == [*old, 12, 17, 21]


@pytest.mark.parametrize(("stride", "old_stride"), [(5, None), (4, None), (3, None), (5, 5), (6, 2)])
def test_the_theorem_makes_what_is_left_as_long_as_the_window(stride, old_stride):
    window, interval = 600, old_stride or (stride + 1) // 2
    threshold = threshold_for(window, stride, old_stride)
    assert window / interval + (threshold - window) / stride == pytest.approx(window, rel=1e-2)


def test_the_parameter_theorem():
    assert threshold_for(12) == 52
    assert threshold_for(12, 4) == 36
    assert threshold_for(4, 3) == 10


@given(st.integers(4, 5000), st.integers(3, 9), st.none() | st.integers(2, 9))
def test_a_budget_is_split_to_the_last_slot(middle, stride, old_stride):
    window, threshold = window_and_threshold(middle, stride, old_stride)
    assert window + threshold == middle
    assert abs(threshold - threshold_for(window, stride, old_stride)) <= stride


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stride": 2}, "stride"),
        ({"sinks": -1}, "sinks"),
        ({"window": 0}, "window"),
        ({"threshold": 1}, "threshold"),
        ({"variant": "slow"}, "variant"),
        ({"old_stride": 1}, "old_stride"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(PolicyError, match=named):
        Buzz(**options)


@pytest.mark.parametrize("options", [{"window": 10, "threshold": 20}, {"window": 29}, {"threshold": 26}])
def test_a_split_that_does_not_fit_is_refused(options):
    with pytest.raises(BudgetError, match="budget=30"):
        Buzz(**options).check_budget(30)
