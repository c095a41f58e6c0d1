"""Test KeyDiff: the example by hand, the scale of keys, and edge cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies import resolve
from kvpass.policies.keydiff import KeyDiff
from kvpass.policies.types import Tokens

ANGLES = torch.tensor([0.0, 10, 20, 30, 40, 180, 50, 60, 190, 70]).deg2rad()
KEYS = torch.stack([ANGLES.cos(), ANGLES.sin()], -1)[None, None]
COSINES = [0.7071, 0.8192, 0.9063, 0.9659, 0.9962, -0.7071, 0.9962, 0.9659, -0.8192, 0.9063]
both = pytest.mark.parametrize("compiled", [True, False])


def kept(key: Tensor, compiled: bool, budget: int = 5, **options: Any) -> list[int]:
    settings = {"sinks": 0, "interval": 1, **options}
    trace = simulate("keydiff", key, key, key, prompt=key.shape[2], budget=budget, compiled=compiled, **settings)
    return [position for position in trace.positions[0, 0, 0].tolist() if position >= 0]


def test_cosines_by_hand() -> None:
    count = KEYS.shape[2]
    tokens = Tokens(torch.arange(count)[None, None], torch.full((1, 1, 1), count), {}, 5)
    torch.testing.assert_close(
        -KeyDiff().rescore(tokens, KEYS, KEYS, ())["score"][0, 0], torch.tensor(COSINES), atol=6e-5, rtol=0
    )


@both
def test_kept_tokens_by_hand(compiled: bool) -> None:
    """Check by hand; token 2 ties with token 9, up to a rounding that differs between processors."""
    assert kept(KEYS, compiled) in ([0, 1, 2, 5, 8], [0, 1, 5, 8, 9])
    assert kept(KEYS, compiled, budget=4) == [0, 1, 5, 8]
    assert kept(KEYS, compiled, budget=6) == [0, 1, 2, 5, 8, 9]
    assert kept(KEYS, compiled, recent=2) == [0, 1, 5, 8, 9]
    assert kept(KEYS, compiled, sinks=4) == [0, 1, 2, 3, 8]


@both
def test_the_size_of_a_key_changes_nothing(compiled: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, 30, 8, generator=drawn)
    scaled = key * (0.01 + 100 * torch.rand(1, 1, 30, 1, generator=drawn))
    assert kept(scaled, compiled, budget=12) == kept(key, compiled, budget=12)


@both
def test_keys_that_are_equal_or_zero(compiled: bool) -> None:
    """Check that of equal keys the earlier ones stay, and that a zero key has the cosine 0."""
    assert kept(torch.ones(1, 1, 9, 4), compiled) == [0, 1, 2, 3, 4]
    assert kept(torch.zeros(1, 1, 9, 4), compiled) == [0, 1, 2, 3, 4]
    key = KEYS.clone()
    key[:, :, 4] = 0
    assert 4 in kept(key, compiled)


def test_rows_of_free_slots_are_not_read() -> None:
    position = torch.tensor([[[0, 1, -1, 2]]])
    key = torch.tensor([[1.0, 0], [0, 1], [torch.nan, torch.inf], [1, 1]])[None, None]
    tokens = Tokens(position, torch.full((1, 1, 1), 3), {}, 2)
    score = KeyDiff().rescore(tokens, key, key, ())["score"]
    assert score[..., [0, 1, 3]].isfinite().all()
    exact = KeyDiff().rescore(Tokens(position[..., [0, 1, 3]], tokens.seen, {}, 2), key[:, :, [0, 1, 3]], key, ())[
        "score"
    ]
    torch.testing.assert_close(score[..., [0, 1, 3]], exact)


def test_bad_input() -> None:
    with pytest.raises(BudgetError, match=r"budget=131 .* at least 132 slots: 5 .* interval - 1 = 127"):
        resolve("keydiff", {}).check_budget(131)
    with pytest.raises(PolicyError, match="recent=-1"):
        resolve("keydiff", {"recent": -1})
