"""Test the draw of tokens: distributions, limits and their ties, and temperatures of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvpass.decoding import sampling
from kvpass.decoding.sampling import PRIME, RowSampling, Sampling

CPU = torch.device("cpu")
DRAWS = 4000
SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 9),
    top_p=st.none() | st.sampled_from([1e-9, 0.13, 0.47, 0.83, 0.951, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
LOGITS = st.lists(st.integers(-8, 8).map(lambda number: number / 4), min_size=1, max_size=7)


def one_row(settings: Sampling) -> RowSampling:
    rows = RowSampling.of(1, CPU)
    rows.set_row(0, settings)
    return rows


def by_generator(settings: Sampling, logits: Tensor, count: int) -> Tensor:
    """Draw `count` tokens from logits [vocabulary] with a generator."""
    return settings.sample(logits.expand(count, -1), settings.generator(CPU))


def by_hash(settings: Sampling, logits: Tensor, count: int) -> Tensor:
    """Draw the first `count` tokens that a row of a batch gets from logits [vocabulary]."""
    one = one_row(settings)
    tensors = (one.temperature, one.top_k, one.top_p, one.seed)
    rows = RowSampling([settings] * count, *(tensor.expand(count) for tensor in tensors))
    return rows.sample(logits.expand(count, -1), torch.arange(count))


both = pytest.mark.parametrize("draw", [by_generator, by_hash])
Draw = Callable[[Sampling, Tensor, int], Tensor]


def shares_of(settings: Sampling, logits: list[float]) -> Tensor:
    """Return the probability of each token under the settings, token by token, in float64.

    Of equally likely tokens at the end of the share of `top_p`, it is the later ones that have none.
    """
    likely = sorted(range(len(logits)), key=lambda token: -logits[token])
    if settings.top_k is not None:
        last = logits[likely[min(settings.top_k, len(logits)) - 1]]
        likely = [token for token in likely if logits[token] >= last]
    weights = torch.tensor(logits, dtype=torch.float64).div(settings.temperature).exp()
    shares = torch.zeros_like(weights)
    total, before = float(weights[likely].sum()), 0.0
    for token in likely:
        if before < (1.0 if settings.top_p is None else settings.top_p):
            shares[token] = weights[token]
        before += float(weights[token]) / total
    return shares / shares.sum()


def distance(tokens: Tensor, shares: Tensor) -> float:
    """Return the total variation distance between drawn tokens and their probabilities."""
    counts = tokens.bincount(minlength=len(shares)) / len(tokens)
    return float((counts - shares).abs().sum() / 2)


@both
@given(settings=SETTINGS, logits=LOGITS)
@example(settings=Sampling(1.0), logits=[0.0] * 7)
@example(settings=Sampling(1.0, top_p=0.5), logits=[0.0, 1.0, 2.0, 2.5])
@example(settings=Sampling(2.0, top_k=3, top_p=0.8), logits=[0.0, 1.0, 2.0, 2.5])
def test_tokens_are_drawn_as_by_multinomial_of_the_limited_probabilities(
    draw: Draw, settings: Sampling, logits: list[float]
) -> None:
    shares = shares_of(settings, logits)
    tokens = draw(settings, torch.tensor(logits), DRAWS)
    ties = len(set(logits)) < len(logits)
    if ties:  # which of them are left out is open: compare logits instead of tokens
        values, group = torch.tensor(logits).unique(return_inverse=True)
        tokens, shares = group[tokens], torch.zeros(len(values)).double().index_add(0, group, shares)
    expected = torch.multinomial(shares, DRAWS, replacement=True, generator=torch.Generator().manual_seed(0))
    assert distance(tokens, shares) < 0.03
    assert distance(expected, shares) < 0.03  # this many draws suffice for the bound
    assert shares[tokens.unique()].all()


@both
@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (dict(temperature=0.0), [3]),
        (dict(temperature=1.0, top_k=2), [2, 3]),
        (dict(temperature=1.0, top_p=0.6), [3]),
        (dict(temperature=1.0, top_p=0.7), [2, 3]),
        (dict(temperature=1.0, top_p=1e-9), [3]),
        (dict(temperature=1.0, top_k=3, top_p=0.7), [2, 3]),
        (dict(temperature=1.0, top_k=9), [0, 1, 2, 3]),
        (dict(temperature=1.0), [0, 1, 2, 3]),
    ],
)
def test_top_k_and_top_p_limit_the_draw(draw: Draw, settings: dict[str, Any], allowed: list[int]) -> None:
    shares = torch.tensor([0.05, 0.05, 0.25, 0.65])
    counts = draw(Sampling(**settings), shares.log(), DRAWS).bincount(minlength=4) / DRAWS
    expected = torch.zeros(4)
    expected[allowed] = shares[allowed] / shares[allowed].sum()
    torch.testing.assert_close(counts, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("vocabulary", [1_000, 50_257])
def test_all_of_the_probability_is_every_token(vocabulary: int) -> None:
    """Test probabilities whose rounded sum reaches one before its end."""
    logits = 3 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(2))
    ordered = logits.sort(-1, descending=True)
    assert (torch.softmax(ordered.values, -1).cumsum(-1) >= 1).sum() > 1
    assert torch.equal(sampling._keep_top_p(*ordered, 1.0), logits)
    for top_p in (None, 1.0):
        assert torch.equal(one_row(Sampling(1.0, top_k=vocabulary, top_p=top_p))._apply_limits(logits), logits)


@both
@pytest.mark.parametrize(("top_p", "count"), [(0.1, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_of_tokens_that_tie_as_many_stay_as_the_share_needs(draw: Draw, top_p: float, count: int) -> None:
    assert len(draw(Sampling(1.0, top_p=top_p), torch.zeros(4), 500).unique()) == count


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 9, 20])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_tokens_that_tie_with_the_last_of_top_k_are_drawn_too(top_k: int, temperature: float) -> None:
    """Compare with transformers, for settings of the batch and of single rows."""
    logits = torch.randint(4, (6, 9), generator=torch.Generator().manual_seed(top_k)).float()
    expected = transformers.TopKLogitsWarper(top_k)(torch.zeros(6, 1), logits) > -torch.inf
    rows = RowSampling.of(6, CPU)
    for row in range(6):
        rows.set_row(row, Sampling(temperature, top_k))
    assert torch.equal(rows._apply_limits(logits / temperature) > -torch.inf, expected)
    assert torch.equal(sampling._keep_top_k(logits / temperature, min(top_k, 9)) > -torch.inf, expected)


def test_rows_draw_by_their_own_settings() -> None:
    shares = torch.tensor([0.05, 0.05, 0.25, 0.65])
    rows = [(dict(temperature=0.0), [3]), (dict(temperature=1.0, top_k=2), [2, 3])]
    rows += [(dict(temperature=1.0, top_p=0.7), [2, 3]), (dict(temperature=1.0), [0, 1, 2, 3])]
    four = RowSampling.of(len(rows), CPU)
    for row, (options, _) in enumerate(rows):
        four.set_row(row, Sampling(**options, seed=row))
    tensors = (four.temperature, four.top_k, four.top_p, four.seed)
    per_row = RowSampling(four.rows * 1000, *(tensor.repeat(1000) for tensor in tensors))
    counts = torch.zeros(len(rows), 4)
    for start in range(0, 4000, 1000):
        made = torch.arange(start, start + 1000).repeat_interleave(len(rows))
        drawn = per_row.sample(shares.log().expand(len(made), 4), made).view(1000, len(rows))
        for row in range(len(rows)):
            counts[row] += drawn[:, row].bincount(minlength=4)
    for row, (_, allowed) in enumerate(rows):
        expected = torch.zeros(4)
        expected[allowed] = shares[allowed] / shares[allowed].sum()
        torch.testing.assert_close(counts[row] / 4000, expected, atol=0.03, rtol=0)


@given(st.data(), st.lists(SETTINGS, min_size=1, max_size=4))
def test_a_row_draws_in_a_batch_what_it_draws_alone(data: st.DataObject, settings: list[Sampling]) -> None:
    """Draw settings of which some are greedy, and set rows again after others have had them."""
    settings = [dataclasses.replace(each, temperature=each.temperature * data.draw(st.booleans())) for each in settings]
    rows, made = RowSampling.of(len(settings), CPU), torch.randint(50, (len(settings),))
    logits = torch.randn(len(settings), 11)
    for row in data.draw(st.permutations(range(len(settings)))):
        rows.set_row(row, Sampling(0.7, top_k=1, top_p=0.1, seed=5))
        rows.set_row(row, settings[row])
    together = rows.sample(logits, made)
    for row, each in enumerate(settings):
        part = slice(row, row + 1)
        for single in (one_row(each), rows.of_row(row)):
            assert torch.equal(single.sample(logits[part], made[part]), together[part])


@given(settings=SETTINGS, made=st.integers(0, 10_000))
def test_a_seed_draws_the_same_again(settings: Sampling, made: int) -> None:
    logits, count = torch.randn(1, 40), torch.tensor([made])
    assert torch.equal(*(settings.sample(logits, settings.generator(CPU)) for _ in range(2)))
    assert torch.equal(*(one_row(settings).sample(logits, count) for _ in range(2)))


def test_tokens_of_a_row_and_of_seeds_are_independent() -> None:
    """Compare pairs of tokens with the product of their shares: one after the other, and of neighbouring seeds."""
    logits = torch.tensor([0.0, 0.5, 1.0])
    shares = torch.softmax(logits.double(), 0)
    first, second = (by_hash(Sampling(1.0, seed=seed), logits, DRAWS) for seed in (6, 7))
    for other in (second, first.roll(1), second.roll(1)):
        assert distance(3 * first + other, torch.outer(shares, shares).flatten()) < 0.03


@both
@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-20, 1e-6])
def test_a_temperature_near_zero_draws_the_most_likely_token(draw: Draw, temperature: float) -> None:
    logits = torch.tensor([1.0, 90.0, 89.0, -90.0])
    assert draw(Sampling(temperature), logits, 20).tolist() == [1] * 20


@both
def test_the_highest_temperature_draws_all_tokens_but_impossible_ones_alike(draw: Draw) -> None:
    tokens = draw(Sampling(1e30), torch.tensor([1.0, 90.0, -90.0, -torch.inf]), DRAWS)
    assert tokens.max() < 3
    assert distance(tokens, torch.ones(3) / 3) < 0.03


@both
def test_logits_may_differ_by_more_than_a_float(draw: Draw) -> None:
    assert draw(Sampling(1.0), torch.tensor([-3e38, 3e38, 0.0]), 20).tolist() == [1] * 20


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_sampled_in_float32(draw: Draw, dtype: torch.dtype) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
    settings = Sampling(0.7, top_k=20, top_p=0.9)
    assert torch.equal(draw(settings, logits, 100), draw(settings, logits.float(), 100))


def test_noise_is_precise_near_zero_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the smallest hashes, which draw rare tokens, and the largest, whose share rounds to one."""
    hashes = torch.tensor([[0, 1, 2**20, 2**31 - 3, 2**31 - 2]])
    monkeypatch.setattr(sampling, "mix", lambda number: hashes)
    noise = one_row(Sampling(temperature=1.0))._noise(torch.zeros(1, dtype=torch.int64), 5)
    expected = -torch.log1p(-(hashes.double() + 0.5) / 2**31)
    torch.testing.assert_close(noise[0, :3].double(), expected[0, :3], atol=0, rtol=1e-5)
    assert (noise[0, 3:] > 20).all()
    assert noise.isfinite().all()


@pytest.mark.parametrize("seed", [0, PRIME, 1])
def test_no_seed_draws_a_token_of_next_to_no_probability(seed: int) -> None:
    logits = torch.tensor([-18.0, 0.0, 0.0])
    assert by_hash(Sampling(temperature=1.0, seed=seed), logits, 50).min() > 0


def test_rows_tell_the_host_what_they_need() -> None:
    rows = RowSampling.of(2, CPU)
    assert (rows.draws, rows.has_limits) == (False, False)
    rows.set_row(1, Sampling(0.5))
    assert (rows.draws, rows.has_limits) == (True, False)
    rows.set_row(1, Sampling(0.5, top_p=0.3))
    assert (rows.draws, rows.has_limits) == (True, True)
    rows.set_row(1, Sampling())
    assert (rows.draws, rows.has_limits) == (False, False)
