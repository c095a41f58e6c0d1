"""Test R-KV: the example by hand, with and without the bug of the public code, and edge cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.lowering.attention_statistics import StatisticsOperands
from kvpass.policies import resolve
from kvpass.policies.r_kv import RKV
from kvpass.policies.types import Tokens
from kvpass.policies.vase import Vase
from kvpass.reference import voters
from kvpass.reference.base import HeadStream, Token
from kvpass.reference.r_kv import RKVReference

ANGLES = torch.tensor([0.0, 10, 90, 100, 180, 5, 270, 95, 45, 0]).deg2rad()
KEYS = torch.stack([ANGLES.cos(), ANGLES.sin()], -1)[None, None]
QUERIES = torch.zeros(1, 1, 10, 2)
QUERIES[..., 8:, :] = 2 * torch.eye(2)
IMPORTANCE = [0.1570, 0.1626, 0.1528, 0.1435, 0.0371, 0.1602, 0.0382, 0.1486]
REDUNDANCY = [0.1187, 0.1243, 0.1132, 0.1061, 0.0598, 0.1216, 0.0627, 0.1097, 0.1017, 0.0821]
SCORES = [-0.0906, -0.0956, -0.0856, -0.0803, -0.0378, -0.0935, -0.0404, -0.0839]
OFFICIAL = [0.1296, 0.1228, 0.1118, 0.1048, 0.0591, 0.1201, 0.0620, 0.1084, 0.1004, 0.0811]
OFFICIAL_SCORES = [-0.1004, -0.0942, -0.0843, -0.0791, -0.0371, -0.0921, -0.0397, -0.0827]


def policy(**options: Any) -> RKV:
    return RKV(**{"window": 2, "kernel": 3, "interval": 1, **options})


def scored(chosen: RKV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return importance before pooling, redundancy and scores of the ten tokens."""
    valid = torch.ones(1, 10, dtype=torch.bool)
    spec = StatisticsOperands(QUERIES, KEYS, None, True, 2**-0.5, heads=1, sharding=None)
    tokens = Tokens(torch.arange(10)[None, None], torch.full((1, 1, 1), 10), {"vote": torch.zeros(1, 1, 10)}, 6)
    tokens = tokens.with_state(chosen.observe_chunk(tokens, spec.attention(chosen, valid, 6)))
    tokens = tokens.with_state(chosen.rescore(tokens, KEYS, KEYS, ()))
    return tokens.state["vote"][0, 0], tokens.state["redundancy"][0, 0], chosen.score(tokens)[0, 0]


@pytest.mark.parametrize(
    ("official", "redundancy", "scores"), [(False, REDUNDANCY, SCORES), (True, OFFICIAL, OFFICIAL_SCORES)]
)
def test_scores_by_hand(official: bool, redundancy: list[float], scores: list[float]) -> None:
    chosen = policy(official=official)
    votes, repeated, score = scored(chosen)
    near = dict(atol=6e-5, rtol=0)
    torch.testing.assert_close(votes[:8], torch.tensor(IMPORTANCE), **near)
    torch.testing.assert_close(repeated, torch.tensor(redundancy), **near)
    torch.testing.assert_close(score[:8], torch.tensor(scores), **near)
    assert score[8:].isinf().all()
    tokens = [Token(n, n, key[None], key[None]) for n, key in enumerate(KEYS[0, 0])]
    torch.testing.assert_close(torch.tensor(RKVReference(chosen).redundancy(tokens)), torch.tensor(redundancy), **near)


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("compiled", [True, False])
def test_kept_tokens_by_hand(official: bool, compiled: bool) -> None:
    trace = simulate(policy(official=official), QUERIES, KEYS, KEYS, prompt=10, budget=6, compiled=compiled)
    assert trace.positions[0, 0, 0].tolist() == [3, 4, 6, 7, 8, 9]


def test_of_a_repeated_key_the_last_stays() -> None:
    """Check that without importance every earlier copy is redundant, and the last one is exempt."""
    key = torch.eye(8)[[0, 1, 1, 2, 1, 3, 4, 5]][None, None]
    chosen = policy(weight=0.0, window=1)
    trace = simulate(chosen, torch.zeros_like(key), key, key, prompt=8, budget=6, compiled=True)
    assert 4 in trace.positions[0, 0, 0].tolist()
    assert {1, 2}.isdisjoint(trace.positions[0, 0, 0].tolist())


def test_the_highest_of_the_heads_counts_before_the_softmax() -> None:
    """Test one head that attends to token 0 and another to token 1; `plain` averages their probabilities."""
    key = 4 * torch.eye(4)[[0, 1, 2, 3, 3, 3]][None, None]
    query = torch.zeros(1, 2, 6, 4)
    query[:, 0, -1, 0], query[:, 1, -1, 1] = 5.0, 3.0
    tokens = [Token(n, n, row[None], row[None]) for n, row in enumerate(key[0, 0])]
    logits = (query[0] @ key[0, 0].T).transpose(0, 1)[-1:]  # [1, 2, 6]
    for plain in (False, True):
        reference = RKVReference(policy(window=1, plain=plain))
        stream = HeadStream(0, 4, tokens, seen=6)
        rows = logits.softmax(-1) if plain else logits.amax(1, keepdim=True)
        voters.remember(stream, tokens, tokens[-1:], rows)
        got = torch.tensor(reference.importance(tokens, stream))[:5]
        each = logits[0, :, :5]
        torch.testing.assert_close(got, each.softmax(-1).mean(0) if plain else each.amax(0).softmax(-1))


def test_more_rows_than_a_block_of_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, key = policy(), torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    tokens = Tokens(torch.arange(50).expand(1, 2, -1), torch.full((1, 1, 1), 50), {}, 20)
    whole = chosen.rescore(tokens, key, key, ())["redundancy"]
    monkeypatch.setattr("kvpass.policies.r_kv.LARGEST", 7)
    torch.testing.assert_close(chosen.rescore(tokens, key, key, ())["redundancy"], whole)


@pytest.mark.parametrize("name", ["r_kv", "vase"])
def test_queries_that_attend_to_none_of_the_older_tokens_vote_for_none(name: str) -> None:
    """Check that the reference follows where the probabilities of all older tokens are zero."""
    chosen = policy(plain=True) if name == "r_kv" else Vase(large=0.0, recent=2, kernel=3, interval=1, sinks=0)
    keys, queries = KEYS.clone(), torch.ones_like(KEYS)
    keys[..., :8, :], keys[..., 8:, :] = -200.0, 200.0
    traces = [simulate(chosen, queries, keys, keys, prompt=9, budget=6, compiled=each) for each in (False, True)]
    assert traces[0].positions.tolist() == traces[1].positions.tolist()


def test_slots_in_any_order_and_free_ones() -> None:
    drawn = torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, 12, 4, generator=drawn)
    order = torch.randperm(12, generator=drawn)
    tokens = Tokens(torch.arange(12)[None, None], torch.full((1, 1, 1), 12), {}, 5)
    moved = Tokens(torch.cat([order, torch.tensor([-1])])[None, None], tokens.seen, {}, 5)
    rows = torch.cat([key[:, :, order], torch.full((1, 1, 1, 4), torch.nan)], 2)
    got = policy().rescore(moved, rows, rows, ())["redundancy"][0, 0]
    torch.testing.assert_close(got[:-1], policy().rescore(tokens, key, key, ())["redundancy"][0, 0, order])
    assert got[-1] == 0


def test_bad_input() -> None:
    with pytest.raises(BudgetError, match=r"budget=135 .* at least 136 slots: 9 .* interval - 1 = 127"):
        resolve("r_kv", {}).check_budget(135)
    with pytest.raises(PolicyError, match=r"kernel=2: must be .* odd"):
        resolve("r_kv", {"kernel": 2})
    with pytest.raises(PolicyError, match=r"weight=1\.5"):
        resolve("r_kv", {"weight": 1.5})
