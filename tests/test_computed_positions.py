"""Test models that compute positions themselves, from a mask of all tokens and with frequencies made on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

import kvpass
from tests.adversary.models import DIM, Small, causal, keys, sdpa

MASK = torch.tensor([[1] * 16, [0] * 3 + [1] * 13])
FORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "last": lambda p, q: (p.cumsum(-1) - 1).clamp(min=0)[:, -q:],
    "clamped later": lambda p, q: (p.long().cumsum(-1) - 1)[:, -q:].clamp(min=0),
    "filled": lambda p, q: (p.cumsum(-1) - 1).masked_fill(p == 0, 0)[:, -q:],
    "from the length on": lambda p, q: (p.cumsum(-1) * p - 1).clamp(min=0).long()[:, p.shape[1] - q :],
}


def turned(x: Tensor, position: Tensor) -> Tensor:
    """Rotate [B, H, q, D] by positions [B, q], with frequencies computed from an arange of integers."""
    angle = position[:, None, :, None] / 10.0 ** (torch.arange(0, DIM, 2) / DIM)
    one, other = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Counting(Small):
    """`Small` with rotated queries and keys, at positions that are given or computed from the mask `p` [B, S]."""

    def __init__(self, count: Callable[[Tensor, int], Tensor] | None) -> None:
        super().__init__(sdpa(lambda i, j, p: causal(i, j) & keys(p).bool()))
        self.count = count

    def forward(self, ids: Tensor, past: Any = None, *, p: Tensor, position: Tensor | None = None) -> Any:
        if self.count is not None:
            position = self.count(p, ids.shape[1])
        assert position is not None
        q, k, v = self.project[0](self.embed(ids)).unflatten(-1, (-1, DIM)).transpose(1, 2).split([2, 2, 2], 1)
        q, k = turned(q, position), turned(k, position)
        if past is not None:
            k, v = torch.cat([past[0][0], k], 2), torch.cat([past[0][1], v], 2)
        i = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        return self.attends[0](q, k, v, i, torch.arange(k.shape[2]), p=p).transpose(1, 2).flatten(2), [(k, v)]


def outputs(model: Any, count: bool, **settings: Any) -> list[Tensor]:
    """Return the outputs of real tokens over a prompt, steps and a chunk, with room for 6 tokens."""
    compiled = torch.compile(model, backend=kvpass.backend(budget=6, inner="eager", **settings))
    ids, past, seen, found = torch.arange(32).view(2, 16) % 16, None, 0, []
    position = FORMS["last"](MASK, 16)
    for new in (7, 1, 1, 3, 1, 1):
        given = {} if count else {"position": position[:, seen : seen + new].contiguous()}
        with torch.no_grad():
            out, past = compiled(ids[:, seen : seen + new], past, p=MASK[:, : seen + new].contiguous(), **given)
        found.append(out[MASK[:, seen : seen + new].bool()])
        seen += new
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("settings", [{"policy": "h2o", "positions": "absolute"}, {"policy": "streaming"}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_positions_counted_in_a_mask_are_those_of_the_caller(form: str, settings: dict[str, str]) -> None:
    """Check steps and chunks after evictions, with absolute positions and with ranks."""
    computed = outputs(Counting(FORMS[form]), count=True, **settings)
    given = outputs(Counting(None), count=False, **settings)
    for one, other in zip(computed, given, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.few(1)
@pytest.mark.parametrize("padded", [False, True])
def test_opt_counts_positions_without_position_ids(padded: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 32, "num_attention_heads": 2}
    model = OPTForCausalLM(OPTConfig(vocab_size=64, word_embed_proj_dim=32, max_position_embeddings=64, **sizes)).eval()
    ids = torch.arange(32).view(2, 16)
    logits: list[list[Tensor]] = []
    for given in (False, True):
        compiled, cache = torch.compile(model, backend=kvpass.backend("h2o", budget=6, inner="eager")), None
        logits.append([])
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 12), (12, 13)):
            mask = MASK[:, :stop] if padded else torch.ones_like(MASK[:, :stop])
            inputs: dict[str, Any] = {"attention_mask": mask} if padded or given else {}
            if given:
                inputs["position_ids"] = (mask.cumsum(-1) * mask - 1)[:, start:stop]
            with torch.no_grad():
                out = compiled(ids[:, start:stop], past_key_values=cache, use_cache=True, **inputs)
            cache = out.past_key_values
            logits[-1].append(out.logits[mask[:, start:stop].bool()])
    for one, other in zip(*logits, strict=True):
        torch.testing.assert_close(one, other)


class Recomputing(Small):
    """A model that attends once more to all tokens, whose ids it reads in each call: its keys are no cache."""

    def forward(self, ids: Tensor, past: Any = None, *, p: Tensor) -> Any:
        out, present = super().forward(ids, past, p=p)
        every = self.embed(p)
        return out + (self.embed(ids) @ every.mT).softmax(-1) @ every, present


def test_attention_over_all_tokens_is_not_left_to_the_host() -> None:
    model = Recomputing(sdpa(lambda i, j, p: causal(i, j) & keys(p >= 0)))
    compiled = torch.compile(model, backend=kvpass.backend("streaming", budget=6, inner="eager"))
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        _, past = compiled(ids[:, :7], None, p=ids[:, :7].contiguous())
        with pytest.raises(kvpass.UnsupportedGraph, match=r"still depends on the length of the cache"):
            compiled(ids[:, 7:], past, p=ids)


ANGLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "computed": lambda table, position: position[..., None] * table[1],
    "indexed": lambda table, position: table[position],
}
"""Functions of a table of angles [T, D / 2] and positions [B, q], an argument of the model."""


class Turning(Small):
    """A layer that rotates queries and keys before or after their transposition, and caches tokens along `dim`."""

    def __init__(self, angle: Callable[[Tensor, Tensor], Tensor], tokens_first: bool, dim: int) -> None:
        super().__init__(sdpa(causal))
        self.angle, self.dim, self.rotates_tokens_first = angle, dim, tokens_first
        self.register_buffer("angles", torch.arange(16)[:, None] / 10.0 ** (torch.arange(0, DIM, 2) / DIM))

    def turned(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate [B, q, H, D] and return [B, H, q, D]."""
        x = x if self.rotates_tokens_first else x.transpose(1, 2)
        angle = self.angle(self.angles, position).unsqueeze(2 if self.rotates_tokens_first else 1)
        one, other = x.chunk(2, -1)
        x = torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)
        return x.transpose(1, 2) if self.rotates_tokens_first else x

    def forward(self, ids: Tensor, past: Any = None, *, position: Tensor) -> Any:
        q, k, v = self.project[0](self.embed(ids)).unflatten(-1, (-1, DIM)).split([2, 2, 2], 2)
        q, k, v = self.turned(q, position), self.turned(k, position), v.transpose(1, 2)
        k, v = (x.transpose(1, 2) if self.dim == 1 else x for x in (k, v))
        if past is not None:
            k, v = torch.cat([past[0][0], k], self.dim), torch.cat([past[0][1], v], self.dim)
        read, values = (x.transpose(1, 2) if self.dim == 1 else x for x in (k, v))
        i = torch.arange(k.shape[self.dim] - ids.shape[1], k.shape[self.dim])[:, None]
        return self.attends[0](q, read, values, i, torch.arange(k.shape[self.dim])).transpose(1, 2).flatten(2), [(k, v)]


@pytest.mark.parametrize(("tokens_first", "dim"), [(True, 2), (False, 2), (True, 1)])
@pytest.mark.parametrize("angle", ANGLES)
@torch.no_grad()
def test_a_stream_equals_a_prompt_of_the_cached_tokens(angle: str, tokens_first: bool, dim: int) -> None:
    """Check positions among the cached tokens against the uncompiled model: in one layer, keys depend on no others."""
    model = Turning(ANGLES[angle], tokens_first, dim)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=4, positions="cache", inner="eager"))
    ids, position = torch.arange(24).view(2, 12) % 16, torch.arange(12).expand(2, -1).contiguous()
    _, past = compiled(ids[:, :7], position=position[:, :7].contiguous())
    for new in range(7, 12):
        out, past = compiled(ids[:, new : new + 1], past, position=position[:, new : new + 1].contiguous())
        expected, _ = model(ids[:, new - 4 : new + 1], position=position[:, :5])
        torch.testing.assert_close(out, expected[:, -1:], atol=1e-5, rtol=1e-5)
