"""Test Cascade: the closed form, facts from the paper, and its errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.cascade import NO_VICTIM, Cascade, CascadeRule, intervals, moving_averages
from kvpass.user_budget import slots_for
from tests.diagnostics.test_simulate import check
from tests.strategies import ROWS, cases


def literal(caches, width, accepts, number, score, eager, select=True):
    """Run the paper's scan over sub-caches of token numbers, newest last."""
    item = number
    for cache, interval in zip(caches, accepts, strict=True):
        taken = number % interval == 0 or eager
        if (taken and len(cache) < width) or not cache:
            cache.append(item)
            return
        if not taken:
            if select and score[item] >= score[cache[-1]]:
                cache[-1] = item
            return
        cache.append(item)
        item = cache.pop(0)


@pytest.mark.parametrize("growth", ["pow2", "pow3", "pow4", "linear"])
@pytest.mark.parametrize("cascades", range(1, 9))
@pytest.mark.parametrize(("eager", "select"), [(False, True), (True, True), (False, False)])
def test_the_closed_form_is_the_scan_over_sub_caches(growth, cascades, eager, select):
    width = 3
    size, accepts = cascades * width, intervals(cascades, growth)
    rule, caches = CascadeRule(size, accepts, eager, select), [[] for _ in range(cascades)]
    held: list[int] = []
    drawn = torch.Generator().manual_seed(cascades)
    for number in range(120):
        score = torch.rand(120, generator=drawn)  # the scores of all tokens change at every step
        literal(caches, width, accepts, number, score.tolist(), eager and number <= size, select)
        before, by_age = list(held), score[torch.tensor(held or [0])]

        def score_at(rank, by_age=by_age):
            return by_age[rank.clamp(0, len(by_age) - 1)]

        rank = rule.victim_rank(torch.tensor(number), torch.tensor(len(held)), score_at)
        rule.insert(held, number, torch.tensor([number]), [score.tolist()])
        evicted = set(before) - set(held)
        assert evicted == (set() if rank == NO_VICTIM else {before[rank]})
        assert held == sorted((token for cache in caches for token in cache), reverse=True)
        for i, cache in enumerate(caches):  # sub-cache i has the ranks [iW, (i + 1)W) from the newest
            assert held[i * width : (i + 1) * width] == cache[::-1]


@given(data=st.data(), order=st.sampled_from(["write_first", "attend_first"]))
def test_one_sub_cache_is_streaming(data, order):
    options = {"cascades": 1, "sinks": 3, "order": order}
    case = data.draw(cases(ROWS["cascade"], options=options, positions="cache"))
    got = check(case)
    q, k, v = case.layer()
    settings = {**case.settings, "sinks": 3}
    del settings["cascades"], settings["order"]
    streaming = simulate("streaming", q, k, v, compiled=True, **settings)
    assert torch.equal(got.positions, streaming.positions)
    if order == "attend_first":
        torch.testing.assert_close(got.output, streaming.output)


@given(data=st.data(), split=st.integers(1, 20))
def test_a_prompt_that_fits_is_the_same_as_its_tokens_one_by_one(data, split):
    case = data.draw(cases(ROWS["cascade"], budget=19, prompt=10, steps=20, positions="cache"))
    if not case.options["eager_fill"]:
        case.options.update(cascades=1, sinks=3)  # other numbers drop tokens before the sub-caches are full
    case.options["cascades"], case.options["sinks"] = {1: (1, 3), 2: (2, 3)}.get(case.options["cascades"], (4, 3))
    q, k, v = case.layer()
    one = simulate("cascade", q, k, v, compiled=True, **{**case.settings, "prompt": 1})
    some = simulate("cascade", q, k, v, compiled=True, **case.settings)
    assert torch.equal(one.positions[-20:], some.positions[-20:])


def test_no_slot_moves():
    q, k, v = (torch.randn(1, 1, 60, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    trace = simulate("cascade", q, k, v, prompt=20, budget=12, compiled=True, cascades=2)
    for before, after in zip(trace.positions[:-1, 0, 0], trace.positions[1:, 0, 0], strict=True):
        assert len(set(after.tolist()) - set(before.tolist())) == 1


def held_after(tokens, **options):
    """Return the positions held after single tokens: |C| = 4 in two sub-caches of W = 2, no sinks."""
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, 4, generator=drawn) for _ in range(3))
    settings = {"prompt": 1, "budget": 4, "sinks": 0, "cascades": 2, "compiled": True}
    trace = simulate("cascade", q, k, v, **settings, **options)
    return [[p for p in row.tolist() if p >= 0] for row in trace.positions[:, 0, 0]]


@given(seed=st.integers(0, 99), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), early=st.booleans())
def test_blocks_of_rows_give_the_scores_of_whole_rows(seed, sizes, early):
    """Compare blocks of rows that end with their last query with all rows, token by token."""
    drawn, count = torch.Generator().manual_seed(seed), sum(sizes)
    rows = torch.rand(1, 1, count, count, generator=drawn).tril()
    valid = torch.rand(1, count, generator=drawn) < 0.8
    score, expected = torch.zeros(count), []
    for row, real in zip(rows[0, 0], valid[0], strict=True):
        score = 0.9 * score + 0.1 * row if real else score
        expected.append(score)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    blocks = [rows[:, :, end - size : end, :end] for end, size in zip(ends, sizes, strict=True)]
    found = [*moving_averages(blocks, valid, 0.9)]
    for after, end, size in zip(found, ends, sizes, strict=True):
        torch.testing.assert_close(after[0, 0], torch.stack(expected[end - size : end])[:, :end])
    rule, number = CascadeRule(4, intervals(2, "pow2"), eager=False), valid.long().cumsum(-1).where(valid, 0) - 1
    whole = rule.insert_prompt([torch.stack(expected)[None, None]], number, early)
    torch.testing.assert_close(rule.insert_prompt(found, number, early), whole)


def test_without_selection_every_second_token_passes_on():
    """Check by hand: sub-cache 1 takes evictions of sub-cache 0 at even token numbers; others are dropped."""
    expected = [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 2, 3, 4], [0, 2, 4, 5], [2, 4, 5, 6], [2, 4, 6, 7]]
    assert held_after(8, select=False) == expected
    assert held_after(8, select=False, gamma=1.0) == expected


def test_scores_that_never_change_let_the_arriving_token_stay():
    """Check by hand: with gamma = 1 all scores tie, and the arriving token replaces the newest."""
    expected = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 3, 4, 5], [3, 4, 5, 6], [3, 5, 6, 7]]
    assert held_after(8, gamma=1.0) == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cascades": 0}, "cascades"),
        ({"sinks": -1}, "sinks"),
        ({"growth": "pow5"}, "growth"),
        ({"reduce": "sum"}, "reduce"),
        ({"gamma": 1.1}, "gamma"),
        ({"select": "no"}, "select"),
        ({"order": "first"}, "order"),
        ({"heads": "all"}, "heads"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(PolicyError, match=named):
        Cascade(**options)


@pytest.mark.parametrize(("budget", "nearest"), [(69, 68), (71, 72), (9, 8)])
def test_a_budget_that_does_not_divide_names_the_nearest_that_does(budget, nearest):
    with pytest.raises(BudgetError, match=f"nearest divisible budget is {nearest}$"):
        Cascade().check_budget(budget)
    Cascade().check_budget(nearest)


def test_a_share_of_the_prompt_is_rounded_down_to_what_divides():
    assert slots_for(Cascade(), 0.5, 143) == 68
