"""Test TriAttention and Expected Attention: examples by hand, dependencies of scores, and calibration files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvpass
from kvpass.errors import BudgetError, CalibrationError, PolicyError
from kvpass.policies import resolve, tri_attention
from kvpass.policies.calibration import CalibratedModel, Calibration
from kvpass.policies.expected_attention import ExpectedAttention
from kvpass.policies.tri_attention import TriAttention
from kvpass.policies.types import State, Tokens
from tests.calibrations import CALIBRATED, random_calibration
from tests.models import build

POLICIES = (TriAttention, ExpectedAttention)


def made_up(mean: list[list[float]], frequency: float, second: list[float], size: list[float]) -> Calibration:
    """Return a calibration of one layer and KV head of dimension 2."""
    heads = len(mean)
    return Calibration(
        CalibratedModel("made up", 1, heads, 1, 2),
        dict(
            mean=torch.tensor(mean)[None],
            second=torch.diag(torch.tensor(second)).expand(1, heads, 2, 2).clone(),
            size=torch.tensor(size)[None, :, None],
            frequency=torch.tensor([[frequency]], dtype=torch.float64),
            pairs=torch.tensor([[[0], [1]]]),
            scale=torch.tensor([2**-0.5]),
        ),
    )


def tokens(count: int, budget: int, state: State | None = None) -> Tokens:
    return Tokens(torch.arange(count)[None, None], torch.full((1, 1, 1), count), state or {}, budget)


def rescored(policy: Any, these: Tokens, key: Tensor, value: Tensor | None = None) -> State:
    found: State = policy.rescore(these, key, key if value is None else value, policy.layer_weights(0))
    return found


def kept(policy: Any, these: Tokens, changes: State) -> list[int]:
    keep, _ = policy.compact(these.with_state(changes))
    return [index for index, stays in enumerate(keep[0, 0].tolist()) if stays]


def test_tri_attention_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tri_attention, "DISTANCES", (1, 2, 4))
    calibration = made_up([[1, 0], [0, 0.5]], 0.5, [0, 0], [1.5, 1])
    policy = TriAttention(calibration=calibration, sinks=0)
    size = torch.tensor([2.0, 1, 1, 3, 1, 1, 2, 1, 1, 1])
    angle = torch.tensor([0.0, 0, 1, 2, 3, 0, 1, 2, 3, 0]) + 0.5 * torch.arange(10)
    state = rescored(policy, tokens(10, 3), torch.stack([size * angle.cos(), size * angle.sin()], -1)[None, None])
    wanted = [
        [2.6152, 1.1563, 0.0645, -0.6537, 0.8339, -0.2124, 0.1097, 1.1494, 1.0370, 0.4366],
        [1.1093, 0.7416, 0.8444, 0.9215, 0.1283, 0.6979, 0.3174, 0.2538, 0.8065, 0.0938],
    ]
    for name, each in zip(("score_0", "score_1"), wanted, strict=True):
        torch.testing.assert_close(state[name][0, 0], torch.tensor(each), atol=6e-5, rtol=0)
    after = tokens(10, 3, state)  # the prompt of three tokens is pinned, so the policy does not see it
    after = dataclasses.replace(after, position=torch.where(after.position < 3, -1, after.position))
    highest = torch.tensor([1.4633, 0.7182, 0.7544, -0.4424, 1.2239, 1.0988, 0.0815])
    torch.testing.assert_close(policy.score(after)[0, 0, 3:], highest, atol=3e-4, rtol=0)  # scores are rounded
    assert kept(policy, after, {}) == [3, 7, 8]


@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_expected_attention_by_hand(epsilon: float) -> None:
    calibration = made_up([[1, 0]], 0.0, [0, 0.5], [1])
    policy = ExpectedAttention(calibration=calibration, sinks=2, epsilon=epsilon)
    key = torch.tensor([[9.0, 9], [9, 9], [1, 0], [0, 1], [1, 1], [-1, 0], [0, 2], [2, 0], [0, 0], [1, -1]])
    size = torch.tensor([9.0, 9, 1, 2, 1, 1, 1, 1, 3, 2])
    these = tokens(10, 5)
    state = rescored(policy, these, key[None, None], torch.stack([size, torch.zeros(10)], -1)[None, None])
    probs = torch.tensor([0.1351, 0.0755, 0.1531, 0.0328, 0.1098, 0.2740, 0.0666, 0.1531])
    torch.testing.assert_close(state["score"][0, 0, 2:], (probs + epsilon) * size[2:], atol=2e-4, rtol=0)
    assert kept(policy, these, state) == [0, 1, 7, 8, 9]


@pytest.mark.parametrize("policy", POLICIES)
def test_scores_depend_on_relative_positions_alone(policy: Any) -> None:
    """Check that keys rotated further keep their scores if the next position moves as far."""
    calibration = random_calibration(1)
    chosen, drawn = policy(calibration=calibration, sinks=0), torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 1, 2, 20, 8, generator=drawn)
    angle = 30 * calibration.tensors["frequency"][0]
    cos, sin = angle.cos().float(), angle.sin().float()
    first, second = key.chunk(2, -1)
    later = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    here = tokens(20, 5)
    there = dataclasses.replace(here, position=here.position + 30, seen=here.seen + 30)
    for one, other in zip(
        *(rescored(chosen, *each, value).values() for each in ((here, key), (there, later))), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_free_slots_are_not_read(policy: Any) -> None:
    chosen, drawn = policy(calibration=random_calibration(1)), torch.Generator().manual_seed(3)
    key, value = torch.randn(2, 1, 2, 6, 8, generator=drawn)
    these = Tokens(torch.tensor([[[0, 1, -1, 4, 5, 6]]]), torch.full((1, 1, 1), 7), {}, 4)
    clean = rescored(chosen, these, key, value)
    key[:, :, 2], value[:, :, 2] = torch.nan, torch.inf
    for name, score in rescored(chosen, these, key, value).items():
        assert torch.equal(score, clean[name])


def test_pairs_anywhere_in_a_row() -> None:
    """Check that permuted dimensions with matching pairs have the same scores."""
    plain = random_calibration(1)
    order = torch.tensor([3, 1, 4, 0, 7, 5, 2, 6])
    moved = Calibration(plain.model, {**plain.tensors, "pairs": torch.argsort(order)[plain.tensors["pairs"]]})
    key = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(1))
    one = rescored(TriAttention(calibration=plain), tokens(9, 4), key)
    other = rescored(TriAttention(calibration=moved), tokens(9, 4), key[..., order])
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_files(tmp_path: Path) -> None:
    calibration, path = random_calibration(2), tmp_path / "statistics.safetensors"
    calibration.save(path)
    assert Calibration.load(path) == calibration
    assert hash(TriAttention(calibration=str(path))) == hash(TriAttention(calibration=calibration))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CalibrationError, match="cannot read a calibration from"):
        Calibration.load(path)
    with pytest.raises(CalibrationError, match="cannot read a calibration from"):
        TriAttention(calibration=tmp_path / "none")
    with pytest.raises(CalibrationError, match=r"tensors of the shapes .*'mean': \(2, 4, 8\)"):
        Calibration(calibration.model, {**calibration.tensors, "mean": torch.zeros(1)})


@pytest.mark.parametrize("name", CALIBRATED)
def test_bad_input(name: str) -> None:
    with pytest.raises(CalibrationError, match=rf"{name} needs calibration=.*kvpass calibrate"):
        resolve(name, {})
    options = {"calibration": random_calibration(2, heads=2, dim=16)}
    with pytest.raises(BudgetError, match=r"budget=131 .* at least 132 slots: 5 .* interval - 1 = 127"):
        resolve(name, options).check_budget(131)
    with pytest.raises(PolicyError, match="positions='cache': it predicts attention from positions in the text"):
        kvpass.backend(name, budget=200, positions="cache", **options)
    for layers, dim, found in ((1, 16, "layers=2, and this one has 1"), (2, 8, "dim=8, and this one has 16")):
        given = {"calibration": random_calibration(2, dim=dim), "interval": 2, "budget": 12}
        model = torch.compile(build("Llama", layers=layers), backend=kvpass.backend(name, inner="eager", **given))
        with torch.no_grad(), pytest.raises(CalibrationError, match=found):
            model(torch.arange(3, 20)[None], use_cache=True)


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("window", [8, 400])
def test_a_layer_that_keeps_its_own_window_is_one_of_the_model(name: str, window: int) -> None:
    """Check windows within the budget, of which kvpass keeps every token, and beyond it."""
    sizes = dict(hidden_size=64, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = transformers.Gemma2Config(
        vocab_size=64, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=window,
        pad_token_id=0, **sizes
    )  # fmt: skip
    options = {"calibration": random_calibration(2, dim=16), "interval": 2}
    model = transformers.Gemma2ForCausalLM(config).eval()
    compiled = torch.compile(model, backend=kvpass.backend(name, inner="eager", budget=12, **options))
    with torch.no_grad():
        report = kvpass.inspect(compiled(torch.arange(3, 43)[None], use_cache=True))
    first, second = (layer.policy.partition("(")[0] for layer in report.layers)
    own = type(resolve(name, options)).__name__
    assert (first, second) == ("Window" if window == 8 else own, own)


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_simulated_layer_has_the_statistics_of_the_first(name: str, compiled: bool) -> None:
    calibration = random_calibration(3, dim=16)
    first = Calibration(
        dataclasses.replace(calibration.model, layers=1), {key: x[:1] for key, x in calibration.tensors.items()}
    )
    q, k, v = (torch.randn(1, heads, 40, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    found = [
        kvpass.simulate(
            name, q, k, v, prompt=20, budget=12, interval=2, compiled=compiled, calibration=each, rope_theta=1e4
        )
        for each in (calibration, first)
    ]
    assert torch.equal(found[0].positions, found[1].positions)
