"""Test input sizes that equal the number of tokens seen by coincidence."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import kvpass
from kvpass.runtime.sizes import guard_predicate
from kvpass.runtime.steps import StepRunner
from tests.models import build, prompt

ENCODED = 9


class Crossed(nn.Module):
    """Self-attention with a cache, and cross-attention to an encoder's keys and values, which are inputs."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.qkv, self.out = nn.Embedding(64, dim), nn.Linear(dim, 4 * dim), nn.Linear(dim, 64)

    def forward(
        self, ids: Tensor, encoded: tuple[Tensor, Tensor], past: Any = None, hidden: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        parts = self.qkv(self.embed(ids)).chunk(4, -1)
        q, k, v, across = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        count, total = q.shape[2], k.shape[2]
        seen = (torch.arange(total) <= torch.arange(total - count, total)[:, None])[None, None]
        if mask is not None:
            seen = seen & mask.bool()[:, None, None]
        own = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        hidden = None if hidden is None else hidden.bool()[:, None, None]
        other = scaled_dot_product_attention(across, *encoded, attn_mask=hidden)
        return self.out((own + other).transpose(1, 2).flatten(2)), (k, v)


@torch.no_grad()
def decoded(model: Any, ids: Tensor, encoded: int, pieces: list[int], padded: bool, hides: bool) -> Tensor:
    """Return logits of ids that are fed in pieces, with this many encoder tokens."""
    generator = torch.Generator().manual_seed(encoded)
    rows = len(ids)
    keys, values = (torch.randn(rows, 2, encoded, 8, generator=generator) for _ in range(2))
    hidden = torch.ones(rows, encoded)
    hidden[0, 1:3] = 0
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    logits, past, done = [], None, 0
    for count in pieces:
        done += count
        given = dict(hidden=hidden if hides else None, mask=mask[:, :done].contiguous() if padded else None)
        made, past = model(ids[:, done - count : done], (keys, values), past, **given)
        logits.append(made)
    return torch.cat(logits, 1)[1:]


@pytest.mark.few(1)
@pytest.mark.parametrize("hides", [False, True], ids=["seen", "hidden"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("pieces", [[8, *[1] * 6], [3, 3, 3, 5]], ids=str)
def test_an_encoder_as_long_as_what_was_seen(pieces: list[int], padded: bool, hides: bool) -> None:
    """Vary the encoder's length: its size becomes a symbol, and equals the tokens seen during decoding."""
    torch.manual_seed(0)
    model, ids = Crossed().eval(), torch.randint(0, 64, (2, 14))
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=32, inner="eager"))
    for encoded in (4, 7, ENCODED, ENCODED + 1, 11):
        got = decoded(compiled, ids, encoded, pieces, padded, hides)
        assert torch.allclose(got, decoded(model, ids, encoded, pieces, padded, hides), atol=1e-5), encoded


@torch.no_grad()
def test_padding_is_not_due_when_sizes_are_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a step whose only row at the budget gets padding: none of the graphs that are tried compacts."""
    compacts, rewrite = list[bool](), StepRunner._rewrite

    def recorded(runner: StepRunner, call: Any) -> Any:
        compacts.append(call.compact)
        return rewrite(runner, call)

    monkeypatch.setattr(StepRunner, "_rewrite", recorded)
    torch.manual_seed(0)
    backend = kvpass.backend("streaming", budget=8, sinks=1, interval=4, inner="eager")
    model, ids, mask = torch.compile(Crossed().eval(), backend=backend), torch.randint(0, 64, (2, 9)), torch.ones(2, 9)
    mask[0, 8] = mask[1, :3] = 0
    for encoded in (4, ENCODED):
        across = (torch.randn(2, 2, encoded, 8), torch.randn(2, 2, encoded, 8))
        _, past = model(ids[:, :8], across, mask=mask[:, :8].contiguous())
        model(ids[:, 8:], across, past, mask=mask)
    assert compacts == [False] * len(compacts)
    assert compacts


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "beams"), [(1, 4), (2, 4), (3, 3)])
def test_guidance_after_beams(rows: int, beams: int) -> None:
    """Test two rows, for which a padding mask has as many rows as the second step has tokens."""
    ids, mask = prompt(rows, 9, (3, 1, 0))
    model, plain = (build("Llama") for _ in range(2))
    kvpass.compile(model, "h2o", budget=64, inner="eager")
    common: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for how in ({}, {"num_beams": beams}, {"guidance_scale": 2.0}):
        for each in (model, plain):
            each.generation_config.eos_token_id = None
        assert torch.equal(model.generate(ids, **common, **how), plain.generate(ids, **common, **how)), how


@pytest.mark.parametrize("earlier_rows", [(3,), (3, 2), (2, 3, 4)])
@torch.no_grad()
def test_one_token_of_one_row_after_prompts_of_several_rows(earlier_rows: tuple[int, ...]) -> None:
    """Test ids that are passed by position, whose rows torch has not seen change, with a cache whose rows it has."""
    ids, _ = prompt(4, 9, ())
    model = build("Llama", layers=1)
    expected = model(ids[:1]).logits
    kvpass.compile(model, "h2o", budget=16, inner="eager")
    for rows in earlier_rows:
        out = model(input_ids=ids[:rows, :4], use_cache=True)
        for at in (4, 5):
            out = model(input_ids=ids[:rows, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
    out = model(ids[:1, :1], use_cache=True)
    for at in range(1, 9):
        out = model(ids[:1, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
        torch.testing.assert_close(out.logits[:, 0], expected[:, at], rtol=1e-4, atol=1e-4)


def test_guards_are_evaluated_for_later_tokens() -> None:
    s, t, u = sympy.symbols("s t u", integer=True)
    holds = guard_predicate([s < 8, sympy.Eq(t, 3), sympy.Max(0, s - 5) <= 1, sympy.Ne(s, 6)], {s: 4, t: 3}, {s})
    assert [holds(by) for by in range(5)] == [True, True, False, False, False]
    assert guard_predicate([], {}, set())(7)
    assert not guard_predicate([u > 3], {s: 4}, {s})(0)  # the value of u is unknown
