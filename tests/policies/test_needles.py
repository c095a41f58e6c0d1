"""Test planted needles: tokens that queries attend to must be kept more often than by chance."""

from __future__ import annotations

import pytest
import torch

from kvpass.diagnostics.simulate import simulate
from tests.strategies import TABLE

BUDGET, PROMPT, SEEDS = 20, 64, 12
OPTIONS = {
    "snapkv": {"window": 4, "kernel": 1},
    "buzz": {"sinks": 4},
    "pyramid_kv": {"window": 4, "kernel": 1},
    "ada_kv": {"window": 4, "kernel": 1},
    "critical_kv": {"window": 4, "kernel": 1},
    "defensive_kv": {"window": 4, "kernel": 1},
    "r_kv": {"window": 4, "kernel": 1, "weight": 0.9, "interval": 2},
    "vase": {"recent": 4, "kernel": 1, "large": 0.0, "interval": 2},
}


def planted(seed: int, tokens: int):
    """Return queries that share one direction, four keys in it, and larger keys in other directions."""
    drawn = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, tokens, 16, generator=drawn) for heads in (4, 2, 2))
    q[..., 0], k[..., 0] = 6.0, 0.0
    needles = 20 + torch.randperm(30, generator=drawn)[:4]
    k[:, :, needles] *= 0.3
    k[:, :, needles, 0] = 2.0
    return q, k, v, needles


def recall(name: str, steps: int) -> float:
    """Return the share of needles that are held at the end."""
    found = 0.0
    for seed in range(SEEDS):
        q, k, v, needles = planted(seed, PROMPT + steps)
        options = {"seed": seed} if name == "random" else OPTIONS.get(name, {})
        held = simulate(name, q, k, v, prompt=PROMPT, budget=BUDGET, compiled=True, **options).positions[-1, 0]
        found += float((held[..., None] == needles).any(1).float().mean())
    return found / SEEDS


@pytest.mark.parametrize("name", [row.name for row in TABLE if row.scored])
def test_scores_beat_chance(name):
    steps = 0 if name == "buzz" else 12  # BUZZ thins out all old tokens, needles or not
    assert recall(name, steps) > recall("random", steps) + 0.25


def test_recency_alone_finds_nothing():
    assert recall("streaming", 12) == 0
