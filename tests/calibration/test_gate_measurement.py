"""Test measured gates: they are the shares of attention to far tokens, read from eager attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvpass
from kvpass.calibration.gate_measurement import measure_gates
from kvpass.errors import CalibrationError
from tests.models import build

TEXT = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(0))
HOW: dict[str, Any] = dict(window=48, sinks=2, recent=8)
SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, attn_implementation="eager",
)  # fmt: skip


@torch.no_grad()
def eager_gates(model: Any) -> list[Tensor]:
    """Return the gates [Hkv] of each layer, from the probabilities that eager attention returns."""
    model.set_attn_implementation("eager")
    totals: dict[int, Tensor] = {}
    for part in (TEXT[:24], TEXT[24:48]):
        whole = torch.cat([part, part])[None]
        for layer, probs in enumerate(model(whole, output_attentions=True).attentions):
            for t in range(24, 48):
                totals[layer] = totals.get(layer, 0.0) + probs[0, :, t, 2 : t - 7].sum(-1) / 48
    return [total.view(-1, model.config.num_attention_heads // 2).amax(-1) for total in totals.values()]


def test_measured_gates_are_the_share_of_far_attention() -> None:
    model = build("Llama")
    found = measure_gates(model, TEXT, **HOW)
    torch.testing.assert_close(found.gates, torch.stack(eager_gates(model)), atol=1e-5, rtol=1e-4)
    assert found.architecture == "llama"
    with pytest.raises(CalibrationError, match="at least half a window, and a window above 513"):
        measure_gates(model, TEXT, window=512)


def with_large_logits(model: Any) -> Any:
    """Let attention differ from a mean over the tokens."""
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            weight.data.mul_(20)
        elif name.endswith("sinks"):
            weight.data.fill_(3.0)
    return model.eval()


def gemma2() -> Any:
    """Return a model with a soft cap, and one layer with a window of 16 tokens."""
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, sliding_window=16, attn_logit_softcapping=1.5)
    )


def gpt_oss() -> Any:
    """Return a model with learned sinks, and one layer with a window of 16 tokens."""
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, sliding_window=16, num_local_experts=2, num_experts_per_tok=1)
    )


@pytest.mark.parametrize("made", [gemma2, gpt_oss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_are_of_the_attention_that_the_model_computes(made: Any, dtype: torch.dtype) -> None:
    """Check that a cap, sinks and a window count: far tokens outside the window get nothing."""
    torch.manual_seed(0)
    model = with_large_logits(made()).to(dtype)
    found = measure_gates(model, TEXT, **HOW).gates
    expected = torch.stack(eager_gates(model)).float()
    near = dict(atol=1e-5, rtol=1e-4) if dtype == torch.float32 else dict(atol=1e-2, rtol=3e-2)
    torch.testing.assert_close(found, expected, **near)
    windowed = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert sorted(windowed) == [False, True]
    assert found[windowed.index(True)].max() < found[windowed.index(False)].min()


def with_other_layer(heads: int, kv_heads: int) -> Any:
    """Return a Llama whose last layer has other numbers of heads."""
    model = build("Llama", layers=3)
    config = copy.deepcopy(model.config)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, kv_heads, 16
    torch.manual_seed(1)
    model.model.layers[2].self_attn = type(model.model.layers[2].self_attn)(config, 2).eval()
    return model


def test_layers_may_have_other_numbers_of_query_heads() -> None:
    model = with_other_layer(8, 2)
    found = measure_gates(model, TEXT, **HOW).gates
    alone = measure_gates(build("Llama", layers=3), TEXT, **HOW).gates
    assert found.shape == (3, 2)
    torch.testing.assert_close(found[:2], alone[:2])


def test_layers_with_other_numbers_of_kv_heads_are_refused_by_name() -> None:
    with pytest.raises(CalibrationError, match=r"layers 0 and 2 of llama have 2 and 4 KV heads"):
        measure_gates(with_other_layer(4, 4), TEXT, **HOW)


def test_a_model_without_attention_has_no_gates() -> None:
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(CalibrationError, match="mamba has no attention call on a cache"):
        measure_gates(model, TEXT, **HOW)
    with pytest.raises(kvpass.KVPassError, match="cache"):
        kvpass.calibrate(model, TEXT, window=16)
