"""Test `random`: redrawn numbers, the law by which tokens disappear, and the last tokens that stay."""

from __future__ import annotations

import pytest
import torch

from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies import hashing, resolve
from kvpass.reference import random as literal

HEADS, PROMPT = 200, 20


def survivors(rounds: int, **options: object) -> torch.Tensor:
    """Return how many of a prompt's 20 tokens many heads hold, after compactions from 20 to 10 tokens."""
    tokens = PROMPT + 10 * (rounds - 1)
    x = torch.zeros(1, HEADS, tokens, 2)
    positions = simulate("random", x, x, x, prompt=PROMPT, budget=19, interval=10, compiled=True, **options).positions
    held = positions[-1, 0]
    return ((held >= 0) & (held < PROMPT)).sum(-1).float()


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_tokens_fade_by_half_in_every_round(rounds: int) -> None:
    """Check K / (K + n) = 1/2; the mean of 200 heads is within four standard deviations."""
    assert abs(float(survivors(rounds, redraw=True).mean()) - PROMPT / 2**rounds) < 0.5


def test_drawn_once_the_sample_is_one_of_all_tokens() -> None:
    """Check that 10 of 40 tokens stay, so 5 of the first 20; redrawing would leave 2.5."""
    assert abs(float(survivors(3).mean()) - 5) < 0.5


def test_rounds_and_heads_draw_apart() -> None:
    position, head = torch.arange(500), torch.arange(3)[:, None]
    first, second = (hashing.draw(position, head, hashing.seed_of_round(5, torch.tensor(n))) for n in (64, 128))
    both = torch.cat([first, second]).double()
    assert (torch.corrcoef(both) - torch.eye(6)).abs().max() < 0.2


def test_numbers_are_those_of_the_reference() -> None:
    for seen, position, head in ((1, 0, 0), (64, 63, 2), (10**6, 999_999, 7)):
        seed = hashing.seed_of_round(3, torch.tensor(seen))
        assert int(seed) == literal.seed_of_round(3, seen)
        assert int(hashing.draw(torch.tensor(position), torch.tensor(head), seed)) == literal.draw(
            literal.seed_of_round(3, seen), position, head
        )


def test_uniform_numbers_lie_inside_and_normal_ones_are_normal() -> None:
    ends = hashing.to_uniform(torch.tensor([0, hashing.PRIME - 1]))
    assert 0 < ends[0] < ends[1] < 1
    made = hashing.normal(300, 200, torch.tensor([7, 8]))
    assert made.shape == (2, 300, 200)
    assert abs(float(made.mean())) < 0.02
    assert abs(float(made.var()) - 1) < 0.02
    assert abs(float((made > 1.6449).float().mean()) - 0.05) < 0.003
    assert abs(float(torch.corrcoef(torch.stack([made[0].flatten(), made[1].flatten()]))[0, 1])) < 0.02


@pytest.mark.parametrize("redraw", [False, True])
def test_the_last_tokens_stay(redraw: bool) -> None:
    x = torch.zeros(1, 4, 60, 2)
    trace = simulate("random", x, x, x, prompt=5, budget=12, recent=4, redraw=redraw, interval=3, compiled=True)
    for seen, heads in enumerate(trace.positions[:, 0], start=5):
        assert all(set(range(seen - 4, seen)) <= set(head) for head in heads.tolist())


def test_bad_input() -> None:
    with pytest.raises(BudgetError, match=r"budget=8 is too small for 'random' .* at least 9"):
        resolve("random", {"recent": 8}).check_budget(8)
    with pytest.raises(PolicyError, match="recent=-1"):
        resolve("random", {"recent": -1})
    with pytest.raises(PolicyError, match="redraw='often'"):
        resolve("random", {"redraw": "often"})
