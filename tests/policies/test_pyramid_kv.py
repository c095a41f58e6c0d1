"""Test PyramidKV: layer budgets by hand, and their invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import kvpass
from kvpass.errors import BudgetError
from kvpass.policies import resolve
from kvpass.policies.pyramid_kv import PyramidKV, pyramid
from kvpass.policies.types import Attention
from tests.models import build


def test_budgets_by_hand() -> None:
    """Check eight layers with a mean of 72, window 8: budgets from 125 to 3, limited by the prompt."""
    assert pyramid(8, 72, 8, 20, prompt=1000) == [count + 8 for count in (125, 108, 90, 73, 55, 38, 20, 3)]
    assert pyramid(8, 72, 8, 20, prompt=128) == [count + 8 for count in (120, 104, 88, 72, 56, 40, 24, 8)]
    for prompt in (60, 72, 127):
        assert pyramid(8, 72, 8, 20, prompt) == [72] * 8
    assert pyramid(1, 72, 8, 20, prompt=1000) == [72]


@given(layers=st.integers(1, 40), more=st.integers(1, 500), window=st.integers(1, 64), beta=st.integers(1, 40),
       prompt=st.integers(1, 9000))  # fmt: skip
def test_budgets_add_up_and_fall(layers: int, more: int, window: int, beta: int, prompt: int) -> None:
    budget = window + more
    found = pyramid(layers, budget, window, beta, prompt)
    assert sum(found) == layers * budget
    assert min(found) > window
    assert found == sorted(found, reverse=True)
    assert max(found) <= max(prompt, budget)


@given(layers=st.integers(2, 64), window=st.integers(1, 64), beta=st.integers(1, 40), interval=st.integers(1, 128),
       more=st.integers(0, 500), prompt=st.integers(1, 9000))  # fmt: skip
@example(layers=16, window=64, beta=20, interval=16, more=48, prompt=1000)
@example(layers=16, window=8, beta=20, interval=128, more=120, prompt=1000)
def test_every_layer_has_a_budget_that_the_policy_can_work_with(
    layers: int, window: int, beta: int, interval: int, more: int, prompt: int
) -> None:
    """Check that a compaction leaves each layer its window and a selected token, if it does so on average."""
    policy, budget = PyramidKV(window=window, beta=beta, interval=interval), window + interval + more
    policy.check_budget(budget)
    plans = policy.plan([Attention()] * layers, torch.ones(1, prompt, dtype=torch.bool), budget)
    assert sum(plan.budget for plan in plans) == layers * budget
    for plan in plans:
        policy.check_budget(plan.budget)
        assert policy.compacted(plan.budget) > window


@torch.no_grad()
def test_compactions_leave_every_layer_its_window() -> None:
    """Decode with an interval above what the last layer would select by `beta` alone."""
    chosen = kvpass.backend("pyramid_kv", budget=24, window=4, interval=8, inner="eager")
    compiled = torch.compile(build("Llama", layers=4), backend=chosen)
    ids = torch.randint(3, 128, (1, 100), generator=torch.Generator().manual_seed(0))
    cache = compiled(ids[:, :90], use_cache=True).past_key_values
    for token in ids[:, 90:].split(1, 1):
        cache = compiled(token, past_key_values=cache, use_cache=True).past_key_values
        seen = kvpass.inspect(cache).seen
        for layer in kvpass.inspect(cache).layers:
            held = set(layer.positions[0, 0].tolist())
            assert held >= {*range(seen - 4, seen)}


@torch.no_grad()
def test_layers_keep_as_many_tokens_as_planned() -> None:
    """Check row budgets by the rows' own prompts, with static and dynamic sizes."""
    model = build("Llama", layers=4)
    compiled = torch.compile(model, backend=kvpass.backend("pyramid_kv", budget=24, window=4, inner="eager"))
    ids = torch.randint(3, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :60] = 0
    cache = compiled(ids, attention_mask=mask, use_cache=True).past_key_values
    held = [(layer.positions[:, 0] >= 0).sum(-1).tolist() for layer in kvpass.inspect(cache).layers]
    wanted = [pyramid(4, 24, 4, 20, prompt) for prompt in (30, 90)]
    assert held == [list(rows) for rows in zip(*wanted, strict=True)]


def test_bad_input() -> None:
    with pytest.raises(BudgetError, match=r"budget=64 .* at least 65"):
        resolve("pyramid_kv", {}).check_budget(64)
    with pytest.raises(kvpass.PolicyError, match="beta=0"):
        resolve("pyramid_kv", {"beta": 0})
