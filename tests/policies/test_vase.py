"""Test VaSE: examples by hand, the law of the sample, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies import hashing, resolve
from kvpass.policies.types import Tokens
from kvpass.policies.vase import Vase
from kvpass.reference import vase as literal
from kvpass.reference.base import HeadStream, Token

VALUES = torch.tensor([(0, 0), (1, 2), (0, 5), (3, 3), (2, -2), (1, 0), (0, 1), (4, 0), (0, 0), (0, 0)]).float()
ANGLES = torch.tensor([0.0, 10, 90, 100, 180, 5, 270, 95, 0, 0]).deg2rad()
KEYS = torch.stack([ANGLES.cos(), ANGLES.sin()], -1)
ATTENTION = [0.30, 0.05, 0.10, 0.20, 0.05, 0.10, 0.15, 0.05, 0.0, 0.0]
DRAWS = [1, 0.2, 1, 2, 0.5, 0.5, 1, 1, 1, 1]


def example(**options: Any) -> tuple[Vase, Tokens]:
    """Return ten tokens of which six stay: the last two, and four others."""
    policy = Vase(sinks=1, recent=2, interval=1, **options)
    state = {"vote": torch.tensor(ATTENTION)[None, None]} | policy.init_token_state(
        KEYS[None, None], VALUES[None, None]
    )
    return policy, Tokens(torch.arange(10)[None, None], torch.full((1, 1, 1), 10), state, 6)


def kept(policy: Vase, tokens: Tokens) -> list[int]:
    keep: Tensor = policy.compact(tokens)[0][0, 0]
    return keep.nonzero().flatten().tolist()


def kept_by_reference(policy: Vase) -> list[int]:
    rows = zip(KEYS, VALUES, ATTENTION, strict=True)
    tokens = [Token(n, n, key[None], value[None], score=vote) for n, (key, value, vote) in enumerate(rows)]
    reference = literal.VaseReference(policy)
    if policy.variant == "dkv":
        reference.rescore(tokens, HeadStream(0, 6, tokens, seen=10))
    return [token.position for token in reference.evict(tokens, 0, 10, 6)]


def test_ranges_and_a_sample_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that 0, 2 and 4 (tied with 7) are reserved, and that 1 has the highest quotient."""
    policy, tokens = example(large=0.5, kernel=1)
    assert tokens.state["range"][0, 0, :8].tolist() == [0, 1, 5, 0, 4, 1, 1, 4]
    monkeypatch.setattr(hashing, "to_uniform", lambda number: torch.tensor(DRAWS).neg().exp())
    assert kept(policy, tokens) == [0, 1, 2, 4, 8, 9]
    monkeypatch.setattr(literal, "draw", lambda seed, position, head: position)
    monkeypatch.setattr(literal, "uniform", lambda position: math.exp(-DRAWS[position]))
    assert kept_by_reference(policy) == [0, 1, 2, 4, 8, 9]


def test_a_sketch_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, tokens = example(variant="dkv")
    sketch = torch.tensor([[1.0], [2.0]])
    monkeypatch.setattr(hashing, "normal", lambda rows, columns, seed: sketch.expand(1, 1, 2, 1))
    tokens = tokens.with_state(policy.rescore(tokens, KEYS[None, None], VALUES[None, None], ()))
    score = tokens.state["score"][0, 0, 1:8]
    expected = torch.tensor([0.0565, 0.5095, 0.3328, 0.0051, 0.0017, 0.0204, 0.0740])
    torch.testing.assert_close(score / score.sum(), expected, atol=6e-5, rtol=0)
    assert kept(policy, tokens) == [0, 2, 3, 7, 8, 9]
    monkeypatch.setattr(literal, "sketch_norm", lambda row, seed: float((row.float() @ sketch).square().sum()))
    assert kept_by_reference(policy) == [0, 2, 3, 7, 8, 9]


def test_tokens_without_attention_come_last_and_the_newest_of_them_first(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, tokens = example(large=0.0, kernel=1)
    votes = torch.zeros(1, 1, 10)
    votes[..., 3] = 0.1
    assert kept(policy, tokens.with_state({"vote": votes})) == [0, 3, 6, 7, 8, 9]


def test_the_sample_is_in_proportion_to_attention() -> None:
    """Check the slot that is left after the sink: tokens get it in proportion to attention, over 20,000 heads."""
    heads = 20_000
    policy, tokens = example(large=0.0, kernel=1)
    state = {name: entry.expand(1, heads, -1) for name, entry in tokens.state.items()}
    tokens = Tokens(tokens.position.expand(1, heads, -1), tokens.seen, state, 4)
    counts = policy.compact(tokens)[0][0, :, 1:8].float().sum(0)
    expected = torch.tensor(ATTENTION[1:8])
    torch.testing.assert_close(counts / heads, expected / expected.sum(), atol=0.015, rtol=0)


def test_each_compaction_draws_anew() -> None:
    policy, tokens = example(variant="dkv")
    scores = [
        policy.rescore(
            Tokens(tokens.position, torch.full((1, 1, 1), seen), {}, 6), KEYS[None, None], VALUES[None, None], ()
        )
        for seen in (10, 11)
    ]
    assert not torch.allclose(scores[0]["score"], scores[1]["score"])


def test_large_ranges_stay_whatever_they_are_attended_to() -> None:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=drawn) for _ in range(3))
    v[:, :, 10] *= 100
    k[:, :, 10] = -8 * q.mean((0, 1, 2))  # gets almost no attention
    options = dict(sinks=1, recent=3, interval=4, large=0.25)
    trace = simulate("vase", q, k, v, prompt=20, budget=12, compiled=True, **options)
    assert (trace.positions[-1] == 10).any(-1).all()


def test_a_sketch_reads_no_attention() -> None:
    assert Vase(variant="dkv").statistics == frozenset()
    assert Vase(variant="dkv").state() == {}


def test_bad_input() -> None:
    with pytest.raises(BudgetError, match=r"budget=131 .* at least 132 slots: 69 .* interval - 1 = 63"):
        resolve("vase", {}).check_budget(131)
    resolve("vase", {}).check_budget(132)
    with pytest.raises(PolicyError, match="variant='values'"):
        resolve("vase", {"variant": "values"})
    with pytest.raises(PolicyError, match=r"kernel=4: must be .* odd"):
        resolve("vase", {"kernel": 4})
