"""Build small models with a cache that grows by concatenation from functions, and feed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[..., Tensor]
"""(query [B, H, q, D], key and value [B, Hkv, S, D], i int64 [q, 1], j int64 [S], **inputs) -> [B, H, q, D]."""

Past = list[tuple[Tensor, Tensor]] | None
DIM = 8
TOKENS = 16  # of the vocabulary, and the longest conversation


def grow(past: Tensor, new: Tensor) -> Tensor:
    """Append new tokens to the cache, the ordinary update."""
    return torch.cat([past, new], -2)


class Ordered(nn.Module):
    """A model whose cache may store tokens before heads."""

    tokens_first: bool

    def ordered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Convert keys and values from [B, Hkv, S, D] to the order of the cache, or back."""
        return (k.transpose(1, 2), v.transpose(1, 2)) if self.tokens_first else (k, v)


class Small(Ordered):
    """Attention layers without norms and MLPs: forward(ids [B, q], past, **inputs) -> (hidden [B, q, H * D], new past).

    Args:
        attend: one attention function for all layers, or a list with one for each.
        layers, heads, kv_heads: sizes; D is 8.
        rotary: entry of `INDICES` for the index that rotates queries and keys; None for no rotation.
        grow: the cache update, (past, new) -> grown.
        kept: dtype of the cache, if it differs from the model's.
        tokens_first: whether the cache is [B, S, Hkv, D].
        tables: buffers that `attend` gets among its inputs.
    """

    def __init__(
        self,
        attend: Attend | list[Attend],
        *,
        layers: int = 1,
        heads: int = 2,
        kv_heads: int | None = None,
        rotary: str | None = None,
        dtype: torch.dtype = torch.float32,
        grow: Callable[[Tensor, Tensor], Tensor] = grow,
        kept: torch.dtype | None = None,
        tokens_first: bool = False,
        tables: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.attends = attend if isinstance(attend, list) else [attend] * layers
        self.heads, self.kv_heads, self.rotary, self.grow = heads, kv_heads or heads, rotary, grow
        self.kept = kept or dtype
        self.tokens_first = tokens_first
        width = heads * DIM
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, width)
        self.project = nn.ModuleList(nn.Linear(width, width + 2 * self.kv_heads * DIM) for _ in self.attends)
        self.tables = list(tables or {})
        for name, table in (tables or {}).items():
            self.register_buffer(name, table)
        self.to(dtype).eval()

    def forward(self, ids: Tensor, past: Past = None, **inputs: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, present = self.embed(ids), []
        seen = 0 if past is None else past[0][0].shape[1 if self.tokens_first else 2]
        i = torch.arange(seen, seen + ids.shape[1])[:, None]
        inputs.update({name: getattr(self, name) for name in self.tables})
        for layer, attend in enumerate(self.attends):
            heads = self.project[layer](x).unflatten(-1, (-1, DIM)).transpose(1, 2)
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
            if self.rotary:
                index = {**INDICES, **ODD_INDICES}[self.rotary](i, inputs.get("p"))
                q, k = rotated(q, index), rotated(k, index)
            k, v = k.to(self.kept), v.to(self.kept)
            k, v = self.ordered(k, v)
            if past is not None:
                k, v = self.grow(past[layer][0], k), self.grow(past[layer][1], v)
            present.append((k, v))
            k, v = self.ordered(k, v)
            j = torch.arange(k.shape[-2])
            x = x + attend(q, k, v, i, j, **inputs).transpose(1, 2).flatten(2)
        return x, present


class Bare(Ordered):
    """One layer without projections, which traces in half the time: forward([B, H + 2 Hkv, q, D], past, **inputs).

    It equals `Small` otherwise. `call` makes queries, keys and values from ids.
    """

    def __init__(
        self,
        attend: Attend,
        *,
        heads: int = 2,
        kv_heads: int = 2,
        dtype: torch.dtype = torch.float32,
        grow: Callable[[Tensor, Tensor], Tensor] = grow,
        kept: torch.dtype | None = None,
        tokens_first: bool = False,
        table: Tensor,
    ) -> None:
        super().__init__()
        self.attend, self.heads, self.kv_heads, self.grow, self.kept = attend, heads, kv_heads, grow, kept or dtype
        self.tokens_first = tokens_first
        self.register_buffer("table", table.to(dtype))
        drawn = torch.Generator().manual_seed(0)
        self.given = torch.randn(TOKENS, heads + 2 * kv_heads, DIM, generator=drawn).to(dtype)

    def forward(self, x: Tensor, past: Past = None, **inputs: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        q, k, v = x.split([self.heads, self.kv_heads, self.kv_heads], 1)
        k, v = self.ordered(k.to(self.kept), v.to(self.kept))
        seen = 0 if past is None else past[0][0].shape[1 if self.tokens_first else 2]
        if past is not None:
            k, v = self.grow(past[0][0], k), self.grow(past[0][1], v)
        present = [(k, v)]
        k, v = self.ordered(k, v)
        i, j = torch.arange(seen, seen + q.shape[2])[:, None], torch.arange(k.shape[-2])
        return self.attend(q, k, v, i, j, table=self.table, **inputs), present

    def call(self, compiled: Any) -> Callable[..., Any]:
        """Wrap the model, or its compiled form, as forward(ids, past, **inputs) -> ([B, q, H, D], new past)."""

        def run(ids: Tensor, past: Past, **inputs: Any) -> Any:
            output, present = compiled(self.given[ids].transpose(1, 2).contiguous(), past, **inputs)
            return output.transpose(1, 2), present

        return run


INDICES: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "[q, 1]": lambda i, p: i,
    "[1, q, 1]": lambda i, p: i[None],
    "[1, 1, q, 1]": lambda i, p: i[None, None],
    "[B, 1, q, 1]": lambda i, p: _real_ones(i, p)[:, None, :, None],
}
"""Functions that compute the rotation index from i [q, 1] and p [B, S], which is 0 for padding."""


ODD_INDICES = {"long": lambda i, p: torch.where(i.max() >= 8, 0.5 * i, i.float())[None, None]}
"""Rotation indices with a factor that depends on all tokens of a call."""


def _real_ones(i: Tensor, p: Tensor | None) -> Tensor:
    """Return the position [B, q] of each new token among the real ones."""
    return i[None, :, 0] if p is None else (p.cumsum(-1) - 1).clamp(min=0)[:, -i.shape[0] :]


def rotated(x: Tensor, index: Tensor) -> Tensor:
    """Rotate [B, H, q, D] by an index of one of the shapes of `INDICES`."""
    angle = index / 10.0 ** torch.arange(0, 1, 2 / DIM)  # [..., D / 2]
    angle = torch.cat([angle, angle], -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


# -- attention by a mask -----------------------------------------------------------------------------------


def sdpa(mask: Callable[..., Tensor]) -> Attend:
    """Attend by scaled_dot_product_attention with the bool or additive mask(i, j, **inputs)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **inputs: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(i, j, **inputs))

    return attend


def logits(change: Callable[..., Tensor]) -> Attend:
    """Attend by products and a softmax, with change(logits, i, j, **inputs) before the softmax."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **inputs: Any) -> Tensor:
        a = change(q @ k.transpose(-1, -2) * DIM**-0.5, i, j, **inputs)
        return a.softmax(-1) @ v

    return attend


def plain(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **_: Any) -> Tensor:
    """Attend causally."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(i, j))


def heads(pick: Callable[[Tensor], Tensor]) -> Attend:
    """Attend causally to pick(x), which maps keys and values [B, Hkv, S, D] to [B, H, S, D]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, pick(k), pick(v), attn_mask=causal(i, j))

    return attend


def causal(i: Tensor, j: Tensor, **_: Any) -> Tensor:
    """Return the causal mask, bool [1, 1, q, S]."""
    return (j <= i)[None, None]


def keys(x: Tensor) -> Tensor:
    """Reshape a value for each key from [B, S] to [B, 1, 1, S]."""
    return x[:, None, None, :]


def queries(x: Tensor, i: Tensor) -> Tensor:
    """Return the values of the last q tokens of [B, S] as [B, 1, q, 1]."""
    return x[:, None, -i.shape[0] :, None]


def additive(allowed: Tensor, low: float = torch.finfo(torch.float32).min) -> Tensor:
    """Return an additive mask: zero where allowed, a low number elsewhere."""
    return torch.zeros(()).masked_fill(~allowed, low)


# -- inputs of calls ---------------------------------------------------------------------------------------

Feed = Callable[[int, int], Any]
"""Function from the numbers of tokens before a call and after it to an argument of the call."""


def seen(values: Any) -> Feed:
    """Feed the columns [B, past + new] of a table [B, T]."""
    table = torch.as_tensor(values)
    return lambda start, stop: table[:, :stop].contiguous()


def new(values: Any) -> Feed:
    """Feed the columns [B, new] of a table [B, T]."""
    table = torch.as_tensor(values)
    return lambda start, stop: table[:, start:stop].contiguous()


def always(value: Any) -> Feed:
    """Feed the same value in every call."""
    return lambda start, stop: value


def later(first: Any, then: Any, since: int) -> Feed:
    """Feed [B, past + new] of one table up to a length of `since`, and of another table afterwards."""
    one, other = torch.as_tensor(first), torch.as_tensor(then)
    return lambda start, stop: (one if stop <= since else other)[:, :stop].contiguous()


class Checking(Small):
    """A model that checks a condition on its inputs, its output and its new past.

    It stands here because pytest rewrites the assert statements of test modules.
    """

    def __init__(self, check: Callable[..., Tensor]) -> None:
        super().__init__(sdpa(lambda i, j, marks: causal(i, j) & keys(marks).bool()))
        self.check = check

    def forward(self, ids: Tensor, past: Past = None, *, marks: Tensor, **inputs: Any) -> Any:
        x, present = super().forward(ids, past, marks=marks, **inputs)
        assert self.check(ids, marks, x, present), "checked"
        return x, present


class WithoutPadding(Small):
    """A model that refuses padding on the left, which the synthetic conversations of a validation have."""

    def forward(self, ids: Tensor, past: Past = None, *, marks: Tensor, **inputs: Any) -> Any:
        assert (marks[:, 0] == 1).all(), "no padding on the left"
        return super().forward(ids, past, marks=marks, **inputs)
