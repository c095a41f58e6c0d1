"""Test which tokens window, streaming, h2o, tova, roco, knorm, snapkv and random keep."""

from __future__ import annotations

import pytest
import torch

from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies import parse, resolve
from kvpass.policies.budgets import share_of
from kvpass.policies.cascade import Cascade
from kvpass.policies.d2o import D2O
from kvpass.policies.sage import Sage


def layer(tokens, heads=1, groups=1, dim=8, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads * groups, tokens, dim, generator=drawn) * 2
    k, v = (torch.randn(1, heads, tokens, dim, generator=drawn) for _ in range(2))
    return q, k, v


def probabilities(q, k):
    """Return the probabilities [Hq, T, T] of full causal attention."""
    logits = q[0] @ k[0].repeat_interleave(q.shape[1] // k.shape[1], 0).transpose(1, 2) / q.shape[-1] ** 0.5
    ahead = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    return logits.masked_fill(ahead, -torch.inf).softmax(-1)


def prompt_keeps(name, q, k, v, **options):
    """Return the positions kept after a prompt, for each KV head."""
    trace = simulate(name, q, k, v, prompt=q.shape[2], compiled=True, **options)
    return [set(head.tolist()) - {-1} for head in trace.positions[0, 0]]


def test_window_and_streaming_keep_what_they_always_kept():
    q, k, v = layer(40)
    assert prompt_keeps("window", q, k, v, budget=7) == [set(range(33, 40))]
    assert prompt_keeps("streaming", q, k, v, budget=16) == [{0, 1, 2, 3, *range(28, 40)}]


def test_h2o_keeps_the_sum_and_not_the_mean():
    q, k, v = layer(24, heads=2, groups=2)
    sums = probabilities(q, k).sum(1).view(2, 2, 24).sum(1)  # [Hkv, T]
    kept = prompt_keeps("h2o", q, k, v, budget=10)
    seen = torch.arange(24, 0, -1)
    for head in range(2):
        assert kept[head] == {*sums[head, :19].topk(5).indices.tolist(), *range(19, 24)}
    assert any(kept[h] != {*(sums[h] / seen)[:19].topk(5).indices.tolist(), *range(19, 24)} for h in range(2))


def test_tova_keeps_what_the_last_query_of_all_heads_looks_at():
    q, k, v = layer(20, heads=2, groups=3)
    last = probabilities(q, k)[:, -1].mean(0)
    last[-1] = 2.0
    assert prompt_keeps("tova", q, k, v, budget=6) == [set(last.topk(6).indices.tolist())] * 2


def test_tova_never_drops_the_newest_token():
    trace = simulate("tova", *layer(30), prompt=4, budget=3, compiled=True)
    assert (trace.positions.amax(-1)[:, 0, 0] == torch.arange(3, 30)).all()


def test_knorm_keeps_the_smallest_keys():
    q, k, v = layer(20, heads=2)
    smallest = k[0].norm(dim=-1).topk(6, largest=False).indices
    assert prompt_keeps("knorm", q, k, v, budget=6) == [set(head.tolist()) for head in smallest]


def test_knorm_keeps_the_smallest_of_all_keys_seen():
    q, k, v = layer(40, heads=2)
    held = simulate("knorm", q, k, v, prompt=8, budget=6, rope_theta=1e4, compiled=True).positions[:, 0]
    for seen, heads in enumerate(held, 8):
        smallest = k[0, :, :seen].norm(dim=-1).topk(6, largest=False).indices
        assert torch.equal(heads, smallest.sort().values)


@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("theta", [100.0, 1e4, 1e6])
def test_knorm_keeps_the_earlier_of_two_equal_keys(theta, positions):
    """Check ties of a repeated word, whose keys in the first layer differ only by rotation.

    Their norms differ by rounding alone. Rounding to float16 is coarser by four orders of magnitude, so it makes them
    equal.
    """
    q, k, v = layer(48, heads=2, dim=64)
    k = k[:, :, :6].repeat(1, 1, 8, 1)  # six words, repeated
    norms = k[0].norm(dim=-1).half()
    options = dict(prompt=24, budget=10, rope_theta=theta, positions=positions)
    ours, literal = (simulate("knorm", q, k, v, compiled=way, **options).positions[:, 0] for way in (True, False))
    assert torch.equal(ours, literal)
    for seen, heads in enumerate(ours, 24):
        earliest = norms[:, :seen].sort(stable=True).indices[:, :10]
        assert torch.equal(heads, earliest.sort().values)


def test_roco_averages_and_protects_what_varies():
    q, k, v = layer(32, groups=2)
    rows, budget = probabilities(q, k), 8
    older = range(32 - budget // 2)
    probs = {j: rows[:, j:, j].flatten() for j in older}  # by every query that saw the token
    varied = sorted(older, key=lambda j: -probs[j].var(unbiased=False))[: budget // 4]
    means = sorted(set(older) - set(varied), key=lambda j: -probs[j].mean())[: budget // 4]
    assert prompt_keeps("roco", q, k, v, budget=budget) == [{*varied, *means, *range(28, 32)}]


def test_snapkv_smooths_the_votes_of_the_window():
    q, k, v = layer(32, groups=2)
    votes = probabilities(q, k)[:, -4:, :28].mean((0, 1))
    smooth = torch.nn.functional.avg_pool1d(votes[None], 5, stride=1, padding=2)[0]
    expected = {*smooth.topk(6).indices.tolist(), *range(28, 32)}
    assert prompt_keeps("snapkv", q, k, v, budget=10, window=4) == [expected]


def test_snapkv_selects_once_and_then_rolls_a_ring():
    q, k, v = layer(60)
    trace = simulate("snapkv", q, k, v, prompt=30, budget=10, window=4, compiled=True)
    selected = [p for p in trace.positions[0, 0, 0].tolist() if p < 26]
    for step, held in enumerate(trace.positions[:, 0, 0].tolist()):
        assert held == [*selected, *range(26 + step, 30 + step)]


def test_random_is_uniform():
    counts = torch.zeros(40)
    for seed in range(300):
        q, k, v = layer(40, dim=2)
        counts[list(prompt_keeps("random", q, k, v, budget=10, seed=seed)[0])] += 1
    assert (counts / 300 - 0.25).abs().max() < 0.1


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("streaming", {"sinks": -1}, "sinks"),
        ("h2o", {"heavy": 1.5}, "heavy"),
        ("snapkv", {"window": 0}, "window"),
        ("snapkv", {"kernel": 4}, "kernel"),
        ("random", {"seed": -1}, "seed"),
        ("random", {"keep_prompt": 1}, "keep_prompt"),
        ("tova", {"window": 3}, "window"),
    ],
)
def test_bad_options_are_named(name, options, named):
    with pytest.raises(PolicyError, match=named):
        resolve(name, options)


@pytest.mark.parametrize(("name", "budget"), [("streaming", 4), ("h2o", 1), ("snapkv", 64), ("roco", 1)])
def test_budgets_below_the_smallest_are_refused(name, budget):
    with pytest.raises(BudgetError, match=f"budget={budget}"):
        resolve(name, {}).check_budget(budget)


def test_a_share_of_the_budget_is_exact():
    assert share_of(100, 0.29) == 29
    assert share_of(7, 0.5) == 3


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("d2o", D2O()),
        ("sage:select_at=overflow,top=4", Sage(select_at="overflow", top=4)),
        ("cascade:cascades=8:sinks=2:select=False", Cascade(cascades=8, sinks=2, select=False)),
        ("d2o:skip_layers=(0,1,-1),beta=0.3,", D2O(skip_layers=(0, 1, -1), beta=0.3)),
    ],
)
def test_a_policy_is_read_as_people_write_it(text, policy):
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "named"),
    [("h2o:heavy", "option 'heavy' has no value"), ("h2o:weight=1", "unknown option 'weight'"), ("", "unknown policy")],
)
def test_a_malformed_policy_text_is_refused(text, named):
    with pytest.raises(PolicyError, match=named):
        parse(text)
