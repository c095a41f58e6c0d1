"""Test which of two caches is that of the keys, and calls that add none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.cache.model_cache import caches_in

QKV = torch.randn(3, 1, 1, 12, 8, generator=torch.Generator().manual_seed(0)).unbind(0)


class Kept(nn.Module):
    """Attention to a cache of another dtype, whose keys or values grow first."""

    def __init__(self, dtype: torch.dtype, values_first: bool) -> None:
        super().__init__()
        self.dtype, self.values_first = dtype, values_first

    def forward(self, query: Tensor, key: Tensor, value: Tensor, past: Any = None) -> Any:
        key, value = key.to(self.dtype), value.to(self.dtype)
        if past is not None and self.values_first:
            value = torch.cat([past[1], value], 2)
            key = torch.cat([past[0], key], 2)
        elif past is not None:
            key = torch.cat([past[0], key], 2)
            value = torch.cat([past[1], value], 2)
        total, new = key.shape[2], query.shape[2]
        mask = torch.arange(total) <= torch.arange(total - new, total)[:, None]
        return F.scaled_dot_product_attention(query, key.float(), value.float(), attn_mask=mask), (key, value)


@torch.no_grad()
def tokens_kept(policy: str, dtype: torch.dtype, values_first: bool) -> tuple[list[int], Tensor]:
    """Return the positions of the cached tokens after a conversation, and its outputs."""
    torch._dynamo.reset()
    compiled = torch.compile(Kept(dtype, values_first), backend=kvpass.backend(policy, budget=8, inner="eager"))
    past, outputs = None, []
    for start, end in ((0, 6), *((n, n + 1) for n in range(6, 12))):
        out, past = compiled(*(x[:, :, start:end].contiguous() for x in QKV), past)
        outputs.append(out)
    return caches_in(past)[0].slots.position.sort(-1).values.flatten().tolist(), torch.cat(outputs, 2)


@pytest.mark.parametrize("policy", ["knorm", "d2o", "h2o"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_order_in_which_keys_and_values_grow_does_not_matter(policy: str, dtype: torch.dtype) -> None:
    kept, outputs = tokens_kept(policy, dtype, values_first=False)
    also_kept, same = tokens_kept(policy, dtype, values_first=True)
    assert kept == also_kept
    assert torch.equal(outputs, same)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "streaming", "h2o", "tova"])
def test_a_call_without_new_tokens_is_refused(policy: str, fresh_dynamo: None) -> None:
    """Check that nothing is touched: the conversation goes on behind the refusal."""
    budget = {} if policy == "full" else {"budget": 8}
    compiled = torch.compile(Kept(torch.float32, False), backend=kvpass.backend(policy, inner="eager", **budget))
    _, past = compiled(*(x[:, :, :6].contiguous() for x in QKV))
    _, past = compiled(*(x[:, :, 6:7].contiguous() for x in QKV), past)
    with pytest.raises(kvpass.UnsupportedGraph, match="a call without new tokens"):
        compiled(*(x[:, :, :0].contiguous() for x in QKV), past)
    out, _ = compiled(*(x[:, :, 7:8].contiguous() for x in QKV), past)
    assert out.shape == (1, 1, 1, 8)
