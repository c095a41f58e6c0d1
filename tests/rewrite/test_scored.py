"""Test prompts whose attention and scores come from one operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.testing import EagerAndRecordGraphs

import kvpass
from kvpass.capture.canonical import ATTENTION
from tests.models import ARCHITECTURES, build, prompt, teacher_forced


def counted(model: Any, count: int, **backend: Any) -> tuple[int, int, int]:
    """Count calls in a prompt's graph: of attention, of scores alone, and of both combined."""
    inner, (ids, mask) = EagerAndRecordGraphs(), prompt(2, count, ())
    teacher_forced(model, ids, mask, [count], inner=inner, **backend)
    nodes = inner.graphs[-1].graph.nodes
    values = [node.args[2] for node in nodes if node.target == torch.ops.kvpass.attention_statistics.default]
    return sum(node.target == ATTENTION for node in nodes), values.count(None), len(values) - values.count(None)


def spelled_out() -> Any:
    name, config = ARCHITECTURES["Llama"]
    made = getattr(transformers, name).config_class(**config, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    made._attn_implementation = "eager"
    return getattr(transformers, name)(made).eval()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("window", (2, 0, 0)),  # needs no scores
        ("h2o", (0, 0, 2)),
        ("roco", (0, 0, 2)),
        ("cascade", (0, 0, 2)),
        ("tova", (2, 2, 0)),  # needs scores of the last rows only
        ("snapkv", (2, 2, 0)),
    ],
)
def test_rows_of_all_queries_are_made_once(policy: str, expected: tuple[int, int, int]) -> None:
    assert counted(build("Llama"), 9, policy=policy, budget=72) == expected


@pytest.mark.parametrize("policy", ["h2o", "cascade"])
def test_half_precision_has_attention_of_the_library_too(policy: str) -> None:
    assert counted(build("Llama", torch.bfloat16), 9, policy=policy, budget=72) == (0, 0, 2)


def test_attention_that_a_model_spells_out_is_kept() -> None:
    assert counted(spelled_out(), 9, policy="h2o", budget=8) == (2, 2, 0)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("policy", ["h2o", "cascade"])
@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_a_prompt_gives_what_the_model_gives(architecture: str, policy: str, dtype: torch.dtype) -> None:
    """Compare outputs of padded prompts, whose padding is marked by the model's mask."""
    model = build(architecture, dtype)
    ids, mask = prompt()
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=position).logits
    got = teacher_forced(model, ids, mask, [ids.shape[1]], policy=policy, budget=8, inner="eager").logits
    there = mask.bool()
    torch.testing.assert_close(got[there], expected[there], atol=1e-5, rtol=1e-4)


class Masked(torch.nn.Module):
    """A model whose mask adds -inf, so that padding attends to nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 48)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor, past: Any = None) -> Any:
        x = self.embed(ids)
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        count, total = ids.shape[1], key.shape[2]
        index = torch.arange(total)
        seen = (index <= index[total - count :, None]) & attention_mask[:, None, None].bool()
        bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return x + out.transpose(1, 2).flatten(2), (key, value)


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["h2o", "roco", "tova", "cascade"])
def test_padding_that_sees_nothing_makes_no_score_a_nan(policy: str) -> None:
    """Check queries that attend to nothing: the library gives zeros, while a softmax would give NaN."""
    torch._dynamo.reset()
    compiled = torch.compile(Masked().eval(), backend=kvpass.backend(policy=policy, budget=8, inner="eager"))
    together, mask = torch.randint(3, 32, (2, 7), generator=torch.Generator().manual_seed(0)), torch.ones(2, 7).long()
    together[0, :3], mask[0, :3] = 0, 0
    outputs = []
    with torch.no_grad():
        for ids, seen in ((together, mask), (together[:1, 3:], mask[:1, 3:])):
            out, past = compiled(ids, seen)
            for token in range(4, 12):
                seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
                out, past = compiled(torch.full_like(ids[:, :1], token), seen, past)
                outputs.append(out[0])
    assert all(torch.isfinite(out).all() for out in outputs)
    for padded, alone in zip(outputs[:8], outputs[8:], strict=True):
        torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)


class Bare(torch.nn.Module):
    """A model that returns the output of its attention."""

    def forward(self, rows: torch.Tensor, past: Any = None) -> Any:
        query, key, value = rows.unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)  # each [B, 2, q, 4]
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        count, total = query.shape[2], key.shape[2]
        seen = torch.arange(total) <= torch.arange(total - count, total)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen), (key, value)


@pytest.mark.parametrize("policy", ["h2o", "cascade"])
def test_attention_may_be_what_a_model_returns(policy: str) -> None:
    torch._dynamo.reset()
    model, rows = Bare(), torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, backend=kvpass.backend(policy=policy, budget=8, inner="eager"))
    with torch.no_grad():
        expected, _ = model(rows)
        out, past = compiled(rows[:, :6])
        last, _ = compiled(rows[:, 6:], past)
    torch.testing.assert_close(torch.cat([out, last], 2), expected, atol=1e-5, rtol=1e-4)
