"""Test DefensiveKV: scores and safe tokens by hand, and the operator for the highest attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.errors import UnsupportedGraph
from kvpass.lowering import attention_blocks
from kvpass.lowering.attention_blocks import AttentionInputs
from kvpass.lowering.attention_sums import highest_probs
from kvpass.policies.defensive_kv import DefensiveKV
from kvpass.policies.snapkv import SnapKV
from kvpass.policies.types import Attention, Tokens
from tests.models import build

ROWS = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.05, 0.05, 0, 0], [0.1, 0.6, 0.1, 0.1, 0.05, 0.05, 0, 0]])
"""Attention of two queries to the six tokens before them, for one query head: [2, 8]."""


def tokens(policy: SnapKV, heads: int = 1, count: int = 8, budget: int = 5) -> Tokens:
    position = torch.arange(count).expand(1, heads, count)
    state = {name: torch.zeros(1, heads, count, dtype=dtype) for name, dtype in policy.state().items()}
    return Tokens(position, torch.full((1, 1, 1), count), state, budget)


def observed(policy: SnapKV, rows: Tensor, budget: int = 5) -> Tokens:
    """Return the tokens after a prompt whose last queries have the attention `rows` [h, n, N]."""
    these, probs = tokens(policy, rows.shape[0], rows.shape[2], budget), rows[None, :, None]
    statistics = Attention(window=probs.mean(3), queries=torch.full((1, 1, 1), rows.shape[2]))
    if isinstance(policy, DefensiveKV):
        smoothed = policy.smoothed(probs, torch.ones(1, rows.shape[2], dtype=torch.bool), 0)
        statistics = dataclasses.replace(statistics, scan=smoothed.amax((2, 3)))
    return these.with_state(policy.observe_chunk(these, statistics))


def test_the_score_by_hand() -> None:
    """Check that the highest of both queries, .5 .6 .1 .1 .05 .05, is raised to its mean."""
    state = observed(DefensiveKV(window=2, kernel=1), ROWS[None]).state
    wanted = torch.tensor([0.5, 0.6, *[1.4 / 6] * 4])
    torch.testing.assert_close(state["score"][0, 0, :6], wanted)
    torch.testing.assert_close(state["mean"][0, 0, :6], ROWS[:, :6].mean(0))
    assert state["selected"][0, 0].tolist() == [True] * 6 + [False] * 2


def test_smoothing_by_hand() -> None:
    """Check the means of three neighbours, in proportion 7 8 4 2.5 2 1, with the sum of the row."""
    policy, valid = DefensiveKV(window=2, kernel=3), torch.ones(1, 8, dtype=torch.bool)
    made = policy.smoothed(ROWS[None, None, None, :1], valid, 0)[0, 0, 0, 0]
    torch.testing.assert_close(made, torch.tensor([7, 8, 4, 2.5, 2, 1, 0, 0]) / 24.5)
    padded = torch.cat([ROWS[:1, :2], torch.tensor([[9.0]]), ROWS[:1, 2:]], 1)[None, None, None]
    valid = torch.arange(9)[None] != 2  # padding is no neighbour and gets zero
    made = policy.smoothed(padded, valid, 0)[0, 0, 0, 0]
    torch.testing.assert_close(made[valid[0]], torch.tensor([7, 8, 4, 2.5, 2, 1, 0, 0]) / 24.5)
    assert made[2] == 0
    held = policy.smoothed(
        torch.cat([torch.full((1, 1, 1, 1, 3), 0.3), ROWS[None, None, None, :1]], -1), valid[:, 1:], 3
    )
    assert held[0, 0, 0, 0, :3].tolist() == [pytest.approx(0.3)] * 3


@pytest.mark.parametrize(
    ("mass", "most", "safe"), [(0.9, 9, [0, 1]), (0.9, 1, [0]), (0.96, 9, [0, 1, 2]), (0.4, 9, [])]
)
def test_safe_tokens_have_less_than_the_mass(mass: float, most: int, safe: list[int]) -> None:
    policy = DefensiveKV(window=1, kernel=1, mass=mass)
    these = observed(policy, torch.tensor([[[0.5, 0.3, 0.15, 0.05, 0.0]]]))
    assert torch.nonzero(policy._safe_tokens(these, most)[0, 0]).flatten().tolist() == safe


def test_values_count_as_shares_of_the_heads() -> None:
    policy = DefensiveKV(window=2, kernel=1)
    these = observed(policy, ROWS.expand(2, 2, 8))
    value = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1).expand(1, 2, 8, 1)
    impact = policy.project(these, value, None)["impact"]
    torch.testing.assert_close(impact[0, :, :6], these.state["score"][0, :, :6] * torch.tensor([[0.25], [0.75]]))
    chunk = dataclasses.replace(these, cached_columns=4)
    impact = policy.project(chunk, value, None)["impact"]
    torch.testing.assert_close(impact[0, :, :6], these.state["score"][0, :, :6] * torch.tensor([[1.0], [3.0]]))


def test_a_token_that_one_query_needs_stays() -> None:
    """Test eight queries of which one attends mostly to token 5, and the others do not."""
    rows = torch.tensor([0.14, 0.14, 0.14, 0.14, 0.14, 0.0, 0.1, 0.1, 0.1, 0.0]).repeat(8, 1)
    rows[3] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.6, 0.1, 0.1, 0.1, 0.1])
    kept = {}
    for policy in (DefensiveKV(window=1, kernel=1, mass=0.3), SnapKV(window=1, kernel=1)):
        these = observed(policy, rows[None], budget=5)
        if isinstance(policy, DefensiveKV):
            these = these.with_state(policy.project(these, torch.ones(1, 1, 10, 1), None))
        kept[policy.name] = torch.nonzero(policy.compact(these)[0][0, 0]).flatten().tolist()
    assert kept == {"defensive_kv": [0, 1, 2, 5, 9], "snapkv": [0, 1, 2, 3, 9]}


@pytest.mark.parametrize("causal", [True, False])
def test_the_operator_takes_the_highest_of_the_last_queries(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """Test blocks of few queries, padding, and keys before the queries."""
    monkeypatch.setattr(attention_blocks, "BLOCK", 50)
    drawn = torch.Generator().manual_seed(0)
    query, key = torch.randn(3, 4, 9, 8, generator=drawn), torch.randn(3, 2, 12, 8, generator=drawn)
    valid = torch.ones(3, 9, dtype=torch.bool)
    valid[0, :4], valid[1, 6], valid[2] = False, False, False
    attention = AttentionInputs(query, key, None, causal, 0.5, None, None)
    made = highest_probs(attention, valid, 4, lambda probs, valid: probs * (1 + valid.sum(-1).view(-1, 1, 1, 1, 1)))
    logits = query @ key.repeat_interleave(2, 1).mT * 0.5
    if causal:
        logits = logits.masked_fill(torch.arange(12) > torch.arange(9)[:, None] + 3, -torch.inf)
    wanted = torch.zeros(3, 4, 12)
    for row in range(3):
        for index in torch.nonzero(valid[row]).flatten().tolist()[-4:]:
            wanted[row] = torch.maximum(wanted[row], logits[row, :, index].softmax(-1) * (1 + valid[row].sum()))
    torch.testing.assert_close(made, wanted.view(3, 2, 2, 12))


@torch.no_grad()
def test_another_projection_is_refused() -> None:
    run = torch.compile(build("GPT2"), backend=kvpass.backend("defensive_kv", budget=12, window=3, inner="eager"))
    with pytest.raises(UnsupportedGraph, match="one linear layer, head after head: use policy='ada_kv'"):
        run(torch.ones(1, 30, dtype=torch.int64), use_cache=True)
