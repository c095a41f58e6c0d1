"""SAGE: the selection, the three ways to share it, the ring, refreshing, and its errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.errors import PolicyError
from kvpass.policies.sage import Sage, budget_split
from kvpass.simulate import simulate
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


def test_every_query_head_takes_its_top_k():
    q, k, v = layer(60, heads=2, groups=2)
    kept = simulate("sage", q, k, v, prompt=60, budget=16, compiled=True).positions[0, 0]
    sinks, top, recent = budget_split(16, 2)
    for head in range(2):
        logits = q[0, 2 * head : 2 * head + 2, -1] @ k[0, head].T  # [G, T]
        candidates = logits[:, sinks : 59 - recent]
        took = {int(j) + sinks for row in candidates for j in row.topk(top).indices}
        saved = 2 * top - len(took)  # the slots that duplicates leave go to recent tokens
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
    q[:, 1] = q[:, 0]  # both heads take the same tokens
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
    k[:, :, 70] = 5 * q[:, :, -1]  # what comes after the prompt is looked at ever after
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


@pytest.mark.parametrize(("options", "named"), [({"share": "all"}, "share"), ({"refresh_interval": 0}, "refresh")])
def test_bad_options_are_named(options, named):
    with pytest.raises(PolicyError, match=named):
        Sage(**options)
