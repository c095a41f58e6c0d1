"""Test that a float64 model is computed in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
