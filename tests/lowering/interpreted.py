"""Run kernels next to their plain forms under Triton's interpreter; each function returns pairs of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpass.lowering import attend_kernel, attention_blocks, attention_sums, column_kernel
from kvpass.lowering.attend import Rope, RotaryPairs, attend
from kvpass.lowering.attention_blocks import AttentionInputs
from kvpass.lowering.formats import EncodedVectors, KVDtype, format_of, plain

Pairs = list[tuple[Tensor, Tensor]]


def _drawer(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=drawn).to(dtype)


def attention_of(
    seed: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mask_shape: tuple[int, ...],
    extras: dict[str, bool],
    kv_dtype: KVDtype | None = None,
) -> Pairs:
    """Compare attention for a shape (B, Hkv, G, q, C, D, Dv) and optional parts.

    The extras are a `bias`, a `sink`, a `cap` and a `rope` at read. The rope may mix `interleaved` pairs in the first
    half of D; ranks are shared or each head's `own`. Queries may see nothing: `empty` clears the first row, and
    `hidden` sets the bias to the lowest number for all slots.
    """
    rows, heads, groups, queries, slots, dim, width = shape
    draw = _drawer(seed, dtype)
    query, key, value = (
        draw(rows, heads, groups, queries, dim), draw(rows, heads, slots, dim), draw(rows, heads, slots, width)
    )  # fmt: skip
    mask = draw(*mask_shape).float() > -0.5
    mask[..., -1] = True
    bias = draw(*mask_shape).float() if extras.get("bias") else None
    if extras.get("empty"):
        mask[0] = False
    if extras.get("hidden"):
        bias = torch.full(mask_shape, torch.finfo(torch.float32).min)
    given: dict[str, Any] = dict(
        scale=0.3,
        mask=mask,
        bias=bias,
        cap=2.0 if extras.get("cap") else None,
        sink_logit=draw(1, heads, groups, 1, 1).float() if extras.get("sink") else None,
        with_logits=True,
    )
    rope = _rope(draw, key, extras) if extras.get("rope") else None
    keys, values = (EncodedVectors.of(format_of(kv_dtype, x.shape[-1], dtype), x) for x in (key, value))
    got = attend_kernel.attend_by_kernel(query, keys, values, rope=rope, **given)
    exact = keys.read().double()
    rotated = exact if rope is None else _rotated(exact, rope)
    expected = attend(query.double(), plain(rotated), plain(values.read().double()), **given)
    assert got[1] is not None
    assert got[2] is not None
    return [(a.float(), b.float()) for a, b in zip(got, expected, strict=True)]  # type: ignore[union-attr]


def _rope(draw: Callable[..., Tensor], key: Tensor, extras: dict[str, bool]) -> Rope:
    rows, heads, slots, dim = key.shape
    pairs = RotaryPairs(dim // 2, True) if extras.get("interleaved") else RotaryPairs(dim, False)
    cos, sin = draw(slots, dim), draw(slots, dim)
    sin[:, pairs.width :] = 0
    rank = torch.rand(rows, heads if extras.get("own") else 1, slots, generator=torch.Generator().manual_seed(1))
    return Rope(cos, sin, pairs, rank.argsort(-1))


def _rotated(key: Tensor, rope: Rope) -> Tensor:
    assert rope.rank is not None
    rank, partner = rope.rank.expand(*key.shape[:2], -1), rope.pairs.partner(torch.arange(key.shape[3]))
    return key * rope.cos[rank] + key[..., partner] * rope.sin[rank]


def column_sums(seed: int, dtype: torch.dtype, kind: str, causal: bool, sink: bool, cap: bool) -> Pairs:
    """Compare sums over all queries and over the last ones, with a kind of mask."""
    rows, heads, groups, count, dim, window = 2, 2, 3, 70, 24, 5
    keys, draw = count + seed % 3 * 7, _drawer(seed, dtype)
    query, key = draw(rows, heads * groups, count, dim), draw(rows, heads, keys, dim)
    shown = draw(rows, 1, count, keys).float() > -0.5
    shown[..., 0] = True
    mask = {"none": None, "bool": shown, "additive": draw(1, heads * groups, count, keys).float()}[kind]
    sinks = draw(1, heads * groups, 1, 1).float() if sink else None
    real = draw(rows, count).float() > -0.8
    plain = AttentionInputs(query.float(), key.float(), mask, causal, 0.3, 3.0 if cap else None, sinks)
    expected = [
        *attention_blocks.column_sums_in_blocks(plain, real, 2),
        *attention_sums.late_statistics(plain, real, window),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_sums, "column_sums", column_kernel.column_sums_by_kernel)
        given = dataclasses.replace(plain, query=query, key=key)
        latest = torch.where(real, torch.arange(count), -1).topk(window)
        chosen, counted = given.gathered(latest.values.clamp(min=0)), (latest.values >= 0).float()
        late = attention_sums._late_by_column_sums(chosen, counted, real.sum(-1, keepdim=True).clamp(1, window))
        return list(zip([*attention_sums.column_sums(given, real, 2), *late], expected, strict=True))
