"""Test that a float64 model is computed in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import kvpass
from kvpass.fx.precision import upcast
from kvpass.lowering.attend import attend
from kvpass.lowering.formats import plain
from kvpass.policies.d2o import D2O
from tests.test_backend import loop

EXACT = 1e-10


class Rotated(nn.Module):
    """Grouped attention with a rotary embedding, by SDPA or decomposed, with a cap, a sink or a bias."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.embed, self.q, self.kv = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("frequencies", 0.3 ** torch.arange(4).double())
        self.sink, self.out = nn.Parameter(torch.randn(4)), nn.Linear(32, 64)

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        before = 0 if past is None else past[0].shape[2]
        place = torch.arange(before, before + ids.shape[1])
        angle = place[None, :, None].double() * self.frequencies
        cos, sin = (torch.cat([y(angle)] * 2, -1)[:, None] for y in (torch.cos, torch.sin))
        q, k = (y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin for y in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        hidden = torch.arange(k.shape[2])[None] > place[:, None]
        bias = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)[None, None]
        return self.out(self.attention(q, k, v, bias).transpose(1, 2).flatten(2)), (k, v)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if self.spelling == "sdpa":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        logits = q @ k.transpose(2, 3) * 0.4
        if self.spelling == "cap":
            logits = torch.tanh(logits / 3.0) * 3.0
        logits = logits + bias
        if self.spelling == "sink":
            sink = self.sink[None, :, None, None].expand(*logits.shape[:3], 1)
            return torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ v
        return logits.softmax(-1) @ v


@pytest.mark.few(4)
@pytest.mark.parametrize("positions", ["absolute", "cache"])
@pytest.mark.parametrize("policy", ["h2o", "d2o"])
@pytest.mark.parametrize("spelling", ["sdpa", "by hand", "cap", "sink"])
def test_as_the_uncompiled_model(spelling: str, policy: str, positions: str) -> None:
    if policy == "d2o" and positions == "cache":
        pytest.skip("its layers differ in what they hold")
    torch.manual_seed(0)
    model, ids = Rotated(spelling).double().eval(), torch.randint(0, 64, (2, 16))
    backend = kvpass.backend(policy, budget=32, positions=positions, inner="eager")
    got, expected = loop(torch.compile(model, backend=backend), ids), loop(model, ids)
    assert got.dtype == torch.float64
    assert torch.allclose(got, expected, rtol=0, atol=EXACT)


def test_merged_rows_and_those_beside_them() -> None:
    """Check that merging leaves rows without a merged token unchanged to the last bit."""
    torch.manual_seed(0)
    model, ids = Rotated("sdpa").double().eval(), torch.randint(0, 64, (1, 30))
    backend = kvpass.backend(D2O(merge="official"), budget=12, positions="absolute", inner="eager")
    with torch.no_grad():
        _, past = torch.compile(model, backend=backend)(ids)
        _, (key, _) = model(ids)
    slots = past[0].cache.slots
    exact = [
        bool((row == key[0, head, int(place)]).all())
        for head in range(2)
        for place, row in zip(slots.position[0, head], slots.key.read()[0, head], strict=True)
        if place >= 0
    ]
    assert sum(exact) > 0


def test_only_float64_is_wider() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert upcast(torch.ones(1, dtype=dtype)).dtype == torch.float32
    assert upcast(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_in_the_dtype_of_the_sums(dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 2, 2, 1, 8, dtype=dtype), torch.randn(1, 2, 5, 8, dtype=dtype)
    output, probabilities, logits = attend(q, plain(k), plain(k), scale=0.3, mask=torch.ones(5, dtype=torch.bool))
    assert probabilities is not None
    assert logits is not None
    assert (output.dtype, probabilities.dtype, logits.dtype) == (dtype,) * 3


@pytest.mark.parametrize(("dim", "cap"), [(64, None), (96, None), (80, 50.0)])
def test_products_beyond_float16_give_finite_logits(dim: int, cap: float | None) -> None:
    q, k = (torch.full((1, 2, 2, 1, dim), 40.0, dtype=torch.float16), torch.randn(1, 2, 5, dim).half() + 40)
    assert bool((q.float() @ k.float()[:, :, None].mT > torch.finfo(torch.float16).max).any())
    scale, mask = dim**-0.5, torch.ones(5, dtype=torch.bool)
    output, _, logits = attend(q, plain(k), plain(k), scale=scale, mask=mask, cap=cap)
    exact, _, wanted = attend(q.double(), plain(k.double()), plain(k.double()), scale=scale, mask=mask, cap=cap)
    assert logits is not None
    assert wanted is not None
    torch.testing.assert_close(logits.double(), wanted, rtol=2e-3, atol=0)
    assert output.isfinite().all()
    if cap is not None:
        torch.testing.assert_close(output.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_a_model_in_float16_whose_products_exceed_it(policy: str) -> None:
    """Test keys with large biases, such as those of Qwen2, on which validation and steps once gave NaN."""
    config = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config, num_key_value_heads=2)).half().eval()
    with torch.no_grad():
        for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
            projection.bias.fill_(100.0)
    ids = torch.randint(3, 128, (2, 12))
    with torch.no_grad():
        expected = model(ids).logits[:, 8:]
        kvpass.compile(model, policy, budget=32, inner="eager")
        out, got = model(ids[:, :8]), []
        for t in range(8, 12):
            out = model(ids[:, t : t + 1], past_key_values=out.past_key_values)
            got.append(out.logits)
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=0.01, atol=0.01)
