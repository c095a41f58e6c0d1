"""Test calibration: rotary embeddings are measured, and queries come from the model's projections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvpass
from kvpass.apps import cli, policy_weights
from kvpass.calibration.gate_measurement import measure_gates
from kvpass.errors import CalibrationError
from tests import on_reference
from tests.calibration.test_gate_measurement import with_other_layer
from tests.models import build

TEXT = torch.randint(3, 128, (300,), generator=torch.Generator().manual_seed(5))
HALVES = [[*range(8)], [*range(8, 16)]]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("architecture", "theta", "pairs"),
    [
        ("Llama", 10_000, HALVES),
        ("Gemma", 10_000, HALVES),
        ("GPTNeoX", 10_000, [[0, 1], [2, 3]]),
        ("Cohere", 500_000, [[*range(0, 16, 2)], [*range(1, 16, 2)]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rotary_embedding_is_measured(
    architecture: str, theta: float, pairs: list[list[int]], dtype: torch.dtype
) -> None:
    """Check halves, neighbours, and partial rotations; dimensions without rotation have frequency 0."""
    found = kvpass.calibrate(build(architecture, dtype=dtype), TEXT, window=64).tensors
    count = len(pairs[0])
    wanted = theta ** -(torch.arange(count).double() / count)
    for frequency, found_pairs in zip(found["frequency"], found["pairs"], strict=True):
        near = dict(atol=1e-6, rtol=1e-5) if dtype == torch.float32 else dict(atol=2e-3, rtol=1e-2)
        torch.testing.assert_close(frequency[:count], wanted, **near)
        assert found_pairs[:, :count].tolist() == pairs
        assert (frequency[count:].abs() < 2e-3).all()


def projected(model: Any, ids: Tensor, window: int) -> Tensor:
    """Return the queries of each layer before rotation, float64 [L, Hq, n, D], without each window's first 4."""
    found: list[list[Tensor]] = [[] for _ in model.model.layers]

    def keep(layer: int) -> Any:
        return lambda _, given, out: found[layer].append(out[0].view(len(out[0]), 4, -1)[4:].transpose(0, 1).double())

    hooks = [each.self_attn.q_proj.register_forward_hook(keep(i)) for i, each in enumerate(model.model.layers)]
    with torch.no_grad():
        for part in ids.split(window):
            if len(part) == window:
                model(part[None])
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(each, 1) for each in found])


def test_statistics_are_those_of_the_projections() -> None:
    model = build("Llama")
    found = kvpass.calibrate(model, TEXT, window=64)
    queries = projected(model, TEXT, 64)
    mean = queries.mean(2)
    covariance = (queries - mean[:, :, None]).mT @ (queries - mean[:, :, None]) / queries.shape[2]
    size = (queries[..., :8].square() + queries[..., 8:].square()).sqrt().mean(2)
    torch.testing.assert_close(found.tensors["mean"].double(), mean, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.tensors["second"].double(), covariance, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.tensors["size"].double(), size, atol=1e-4, rtol=1e-4)
    assert found.tensors["scale"].tolist() == [0.25, 0.25]
    assert (found.model.query_heads, found.model.heads, found.model.dim) == (4, 2, 16)
    assert found == kvpass.calibrate(build("Llama"), TEXT, window=64)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["tri_attention", "expected_attention"])
def test_a_calibrated_model_runs(policy: str) -> None:
    model = build("Llama")
    given = dict(calibration=kvpass.calibrate(model, TEXT, window=64), interval=4, budget=16)
    ids = TEXT[None, :40]
    how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    said = []
    for inner in ("eager", "reference"):
        torch._dynamo.reset()
        said.append(on_reference.compile(build("Llama"), policy, inner=inner, **given).generate(ids, **how))
    assert torch.equal(*said)


def sigmoid_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **how: Any) -> Any:
    """Attend by sigmoid, which capture does not read as attention."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    return ((query @ key.mT * how["scaling"]).sigmoid() @ value).transpose(1, 2), None


def unreadable_model() -> Any:
    transformers.AttentionInterface.register("sigmoid", sigmoid_attention)
    model = build("Llama")
    model.config._attn_implementation = "sigmoid"
    return model


def measured(model: Any) -> list[Callable[[], Any]]:
    how: dict[str, Any] = dict(window=64, sinks=4, recent=8)
    return [lambda: kvpass.calibrate(model, TEXT, window=64), lambda: measure_gates(model, TEXT, **how)]


def test_a_refused_cache_update_is_an_error_of_kvpass() -> None:
    for measure in measured(unreadable_model()):
        with pytest.raises(kvpass.UnsupportedGraph, match="cannot be read: the cache that is grown here feeds no att"):
            measure()


def test_an_error_while_reading_is_a_refusal_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise LookupError("of a new kind")

    monkeypatch.setattr("kvpass.capture.cache_search.find_cached_attention", fails)
    for measure in measured(build("Llama")):
        with pytest.raises(kvpass.UnsupportedGraph, match=r"\.py:\d+: .*reading the graph failed with LookupError: of"):
            measure()


@pytest.mark.parametrize("command", ["calibrate", "gates"])
def test_a_command_prints_a_refusal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy_weights, "_model_and_tokens", lambda *_: (unreadable_model(), TEXT.repeat(4)))
    out = tmp_path / "out"
    assert cli.main([command, "MODEL", "--window", "600", "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith("kvpass: a cache of the model cannot be read: ")
    assert not out.exists()


def test_bad_input() -> None:
    with pytest.raises(CalibrationError, match="the keys of layer 0 of gpt2 do not rotate with their position"):
        kvpass.calibrate(build("GPT2"), TEXT, window=64)
    for ids, window in ((TEXT[None], 64), (TEXT[:50], 64), (TEXT, 4)):
        with pytest.raises(CalibrationError, match="has no window of"):
            kvpass.calibrate(build("Llama"), ids, window=window)
    with pytest.raises(kvpass.PolicyError, match="window=0"):
        kvpass.calibrate(build("Llama"), TEXT, window=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "named"),
    [(8, 2, "layers 0 and 2 of llama have 4 and 8 query heads"), (4, 4, "layers 0 and 2 of llama have 2 and 4 KV hea")],
)
def test_layers_that_differ_are_named(heads: int, kv_heads: int, named: str) -> None:
    with pytest.raises(CalibrationError, match=named):
        kvpass.calibrate(with_other_layer(heads, kv_heads), TEXT, window=64)


def test_layers_that_differ_in_the_size_of_their_heads_are_named() -> None:
    config = transformers.Gemma4TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
    )  # fmt: skip
    with pytest.raises(CalibrationError, match="layers 0 and 1 of gemma4_text have 16 and 32 dimensions of a head"):
        kvpass.calibrate(transformers.Gemma4ForCausalLM(config).eval(), TEXT, window=64)


@pytest.mark.parametrize("dim", [1, 9, 13, 15, 17])
def test_an_odd_head_dimension_is_named(dim: int) -> None:
    """Test dimensions without any even part to rotate, and those with one."""
    config = transformers.GPT2Config(vocab_size=128, n_embd=4 * dim, n_layer=1, n_head=4, n_positions=64)
    with pytest.raises(CalibrationError, match=f"the keys of layer 0 of gpt2 have {dim} dimensions, which make no pa"):
        kvpass.calibrate(transformers.GPT2LMHeadModel(config).eval(), TEXT, window=64)


def test_a_partial_rotation_of_an_odd_head_dimension_is_named() -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=128, hidden_size=68, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(CalibrationError, match="the keys of layer 0 of gpt_neox have 17 dimensions"):
        kvpass.calibrate(transformers.GPTNeoXForCausalLM(config).eval(), TEXT, window=64)
