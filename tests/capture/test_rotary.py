"""Test which inputs a rotation is proven to depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.capture import rotary
from tests.lowering.layer_dedup.test_segments import Recorder
from tests.models import build, prompt, teacher_forced


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_followed_past_a_size_that_is_read_from_them(dim: int) -> None:
    """Test `size()` calls, which Dynamo writes into graphs with a dynamic number of rows."""

    def angles(position: Tensor, frequencies: Tensor) -> Tensor:
        expanded = frequencies[None, :, None].expand(position.size()[0], -1, 1)
        return (expanded * position[:, None, :].float()).transpose(1, 2)

    gm = fx.symbolic_trace(angles)
    Recorder(gm).run(torch.zeros(3, 1, dtype=torch.int64), torch.ones(8))
    position, *_ = gm.graph.nodes
    assert rotary._is_followed(position, dim, set(gm.graph.nodes) - {gm.graph.output_node()})


class TwoRotations(nn.Module):
    """One attention layer whose query is changed by a function of its own of both positions."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.embed, self.project = nn.Embedding(16, 16), nn.Linear(16, 48)
        self.register_buffer("frequencies", 1 / 10.0 ** torch.arange(0, 1, 0.25))
        self.eval()

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        angle = position[:, None, :, None].float() * self.frequencies
        angle, (one, two) = torch.cat([angle, angle], -1), x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

    def forward(self, ids: Tensor, others: Tensor, past: Any = None) -> Any:
        q, k, v = self.project(self.embed(ids)).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(3, 1)
        seen = 0 if past is None else past[0].shape[2]
        i = torch.arange(seen, seen + ids.shape[1])[None]
        q, k = self.change(self, q, i, others), self.rotate(k, i)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mask = torch.arange(k.shape[2]) <= i[0][:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2), (k, v)


def scale(q: Tensor, position: Tensor) -> Tensor:
    return q * (1 + 0.1 * torch.log1p(position))[:, None, :, None]


@torch.no_grad()
def run(change: Callable[..., Tensor]) -> None:
    """Run a prompt and a step under positions='cache'."""
    ids, past = torch.randint(0, 16, (1, 9)), None
    compiled = torch.compile(
        TwoRotations(change), backend=kvpass.backend("streaming", budget=6, positions="cache", inner="eager")
    )
    for start, end in ((0, 8), (8, 9)):
        _, past = compiled(ids[:, start:end].contiguous(), torch.arange(start, end)[None], past)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, q, i, others: scale(m.rotate(q, others), i),
        lambda m, q, i, others: m.rotate(scale(q, others), i),
        lambda m, q, i, others: m.rotate(m.rotate(q, others), i),
        lambda m, q, i, others: m.rotate(q, others + i),
        lambda m, q, i, others: m.rotate(q, torch.arange(q.shape[2])[None] + i),
    ],
)
def test_a_query_that_other_positions_change_too_is_refused(change: Any) -> None:
    with pytest.raises(kvpass.UnsupportedGraph, match=rotary.QUERY_ROTATED_BY_OTHERS):
        run(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, q, i, others: m.rotate(q, i),
        lambda m, q, i, others: scale(m.rotate(q, i), i),
        lambda m, q, i, others: m.rotate(scale(q, i + 1), i),
        lambda m, q, i, others: m.rotate(F.normalize(q, dim=-1), i),
    ],
)
def test_a_query_that_the_positions_of_the_key_change_is_accepted(change: Any) -> None:
    run(change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_key_that_is_rotated_in_float32_is_cached_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    (ids, mask), model = prompt(2, 12, (2, 0)), build("Cohere", dtype, layers=1)
    how: dict[str, Any] = dict(policy="streaming", budget=64, positions="cache", inner="eager")
    run = teacher_forced(model, ids, mask, [9, 1, 2], **how)
    assert run.cache.layers[0].keys.dtype == dtype
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(run.logits[mask.bool()], expected[mask.bool()], atol=0.01, rtol=0.02)
