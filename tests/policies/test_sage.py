"""Test SAGE: the selection, three ways to share it, the ring, refreshing, and its errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.sage import Sage, budget_split
from tests.strategies import ROWS, cases


def layer(tokens, heads=1, groups=1, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads * groups, tokens, 8, generator=drawn)
    k, v = (torch.randn(1, heads, tokens, 8, generator=drawn) for _ in range(2))
    return q, k, v


@given(data=st.data())
def test_the_three_modes_agree_for_single_heads(data):
    case = data.draw(cases(ROWS["sage"], groups=1))
    layer = case.layer()
    settings = {**case.settings, "share": None}
    traces = [
        simulate("sage", *layer, compiled=True, **{**settings, "share": share})
        for share in ("union", "concat", "private")
    ]
    for other in traces[1:]:
        assert torch.equal(other.positions, traces[0].positions)
        torch.testing.assert_close(other.output, traces[0].output)


@given(st.integers(1, 10_000), st.integers(1, 71))
def test_the_split_adds_up(budget, groups):
    sinks, top, recent = budget_split(budget, groups)
    assert sinks + groups * top + recent == budget
    assert recent >= 1


def test_the_split_of_the_paper():
    assert budget_split(8192, 4) == (2048, 1024, 2048)
    assert budget_split(8192, 7, top=512) == (2048, 512, 2560)  # Qwen2.5, where B / (2G) would be 585


def test_sinks_and_tokens_for_each_head_can_be_given():
    """Check by hand: a budget of 12 with one sink and three selected tokens keeps the last eight."""
    q, k, v = layer(20)
    held = simulate("sage", q, k, v, prompt=20, budget=12, sinks=1, top=3, compiled=True).positions[0, 0, 0].tolist()
    took = [1 + int(j) for j in (q[0, 0, -1] @ k[0, 0].T)[1:11].topk(3).indices]
    assert held == [0, *sorted(took), *range(12, 20)]


def test_a_budget_without_recent_tokens_is_refused():
    with pytest.raises(BudgetError, match="at least 9"):
        simulate("sage", *layer(20, groups=3), prompt=12, budget=8, sinks=2, top=2, compiled=True)
    with pytest.raises(BudgetError, match=r"budget=8.* at least 9$"):
        Sage(sinks=4).check_budget(8)
    Sage(sinks=4).check_budget(9)


def overflowing(select_at):
    """Return the tokens held from the eighth on; heads of token 8 attend to 2, 3 and to 3, 4."""
    q, k, v = torch.zeros(1, 2, 11, 2), torch.zeros(1, 1, 11, 2), torch.ones(1, 1, 11, 2)
    q[0, 0, 8], q[0, 1, 8] = torch.eye(2)
    k[0, 0, 2:5] = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    return (
        simulate("sage", q, k, v, prompt=5, budget=8, select_at=select_at, compiled=True).positions[3:, 0, 0].tolist()
    )


def test_the_token_that_finds_no_room_selects():
    """Check the selection by hand when token 8 exceeds the budget.

    B = 8 and G = 2 give S = k = R = 2, and E = [2, 6).
    """
    selected, block = overflowing("overflow"), overflowing("prompt_end")
    assert selected[0] == block[0] == list(range(8))
    assert selected[1:] == [[0, 1, 2, 3, 4, 6, 7, 8], [0, 1, 2, 3, 4, 7, 8, 9], [0, 1, 2, 3, 4, 8, 9, 10]]
    assert block[1:] == [[*range(6), 7, 8], [*range(6), 8, 9], [*range(6), 9, 10]]


def test_a_prompt_beyond_the_budget_selects_at_its_end_by_either_option():
    q, k, v = layer(60, heads=2, groups=2)
    early, late = (
        simulate("sage", q, k, v, prompt=40, budget=16, select_at=when, compiled=True)
        for when in ("prompt_end", "overflow")
    )
    assert torch.equal(early.output, late.output)


def test_every_query_head_takes_its_top_k():
    q, k, v = layer(60, heads=2, groups=2)
    kept = simulate("sage", q, k, v, prompt=60, budget=16, compiled=True).positions[0, 0]
    sinks, top, recent = budget_split(16, 2)
    for head in range(2):
        logits = q[0, 2 * head : 2 * head + 2, -1] @ k[0, head].T  # [G, T]
        candidates = logits[:, sinks : 59 - recent]
        took = {int(j) + sinks for row in candidates for j in row.topk(top).indices}
        saved = 2 * top - len(took)  # slots that duplicates leave go to recent tokens
        expected = {*range(sinks), *took, *range(60 - recent, 60)}
        rest = [j for j in range(59, -1, -1) if j not in expected][:saved]
        assert kept[head].tolist() == sorted(expected | set(rest))


def test_the_selection_stays_and_the_recent_roll():
    q, k, v = layer(80)
    held = simulate("sage", q, k, v, prompt=60, budget=16, compiled=True).positions[:, 0, 0].tolist()
    selected = held[0][:12]
    for step, positions in enumerate(held):
        assert positions == [*selected, *range(56 + step, 60 + step)]


def test_concat_counts_twice_and_private_only_once():
    q, k, v = layer(40, groups=2)
    q[:, 1] = q[:, 0]  # both heads select the same tokens
    union, concat, private = (
        simulate("sage", q, k, v, prompt=30, budget=16, share=share, compiled=True)
        for share in ("union", "concat", "private")
    )
    torch.testing.assert_close(private.output, union.output)
    assert (concat.output - union.output)[:, :, 30:].abs().max() > 1e-3


def test_a_refresh_that_never_comes_changes_nothing():
    q, k, v = layer(60, heads=2, groups=2)
    never, late = (
        simulate("sage", q, k, v, prompt=40, budget=16, refresh_interval=every, compiled=True) for every in (None, 100)
    )
    assert torch.equal(never.output, late.output)


def test_a_refresh_lets_new_tokens_stay():
    q, k, v = layer(200)
    k[:, :, 70] = 5 * q[:, :, -1]  # all later tokens attend to this one
    q[:, :, 60:] = q[:, :, -1:]
    never, often = (
        simulate("sage", q, k, v, prompt=60, budget=16, refresh_interval=every, compiled=True).positions[-1]
        for every in (None, 3)
    )
    assert 70 not in never
    assert 70 in often


def test_a_prompt_that_fits_loses_nothing_until_the_ring_is_full():
    q, k, v = layer(30)
    held = simulate("sage", q, k, v, prompt=10, budget=16, compiled=True).positions[:, 0, 0]
    assert held[6].tolist() == list(range(16))
    assert held[-1].tolist() == [*range(12), 26, 27, 28, 29]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"share": "all"}, "share"),
        ({"refresh_interval": 0}, "refresh"),
        ({"sinks": -1}, "sinks"),
        ({"top": 0}, "top"),
        ({"select_at": "once"}, "select_at"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(PolicyError, match=named):
        Sage(**options)
