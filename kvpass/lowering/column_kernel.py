"""Define the Triton kernels of `attention_sums`: column sums of an attention matrix that is never stored.

`totals` computes the log of the sum of each row, as the first half of flash attention does (Dao et al., 2022,
https://arxiv.org/abs/2205.14135).  `columns` then computes the probabilities again, one block of keys per program, and
adds them up over the queries.  There are no atomic operations, so the sums are the same from run to run.

The module is imported when the first prompt runs on a GPU, and needs triton.
"""

# Triton gives the arguments of kernels their types when it compiles them.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.lowering.attend import broadcast_strides
from kvpass.lowering.attend_kernel import LOG2_E, LOWEST
from kvpass.lowering.attention_blocks import AttentionInputs, with_dense_last_dim

TILE = 8 << 10  # numbers of queries, and of keys, that a program holds at a time
TILE_OF_FLOATS = 2 << 10  # the same in float32, whose products use no tensor cores and many registers


@triton.jit
def block_of_logits(
    q,
    k,
    rows,  # indices of the queries [BQ]
    columns,  # indices of the keys [BK]
    masks,
    mask_query: tl.constexpr,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    COUNT: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return masked logits [BQ, BK] of q [BQ, D] and k [D, BK], times log2(e).

    CAUSAL masks keys after their query.  KIND of the mask: 0 none, 1 bool, 2 additive.
    """
    x = tl.dot(q, k, input_precision="ieee")
    if CAP > 0:
        x = (2.0 / (1.0 + tl.exp(-2.0 * SCALE / CAP * x)) - 1.0) * (CAP * LOG2_E)  # tanh
    else:
        x *= SCALE * LOG2_E
    if KIND > 0:
        inside = (rows < COUNT)[:, None] & (columns < KEYS)[None, :]
        given = tl.load(masks + rows.to(tl.int64)[:, None] * mask_query + columns[None, :], mask=inside, other=0)
        added = tl.maximum(x + given.to(tl.float32) * LOG2_E, LOWEST)
        x = tl.where(given != 0, x, LOWEST) if KIND == 1 else added
    if CAUSAL:
        x = tl.where(columns[None, :] <= rows[:, None] + (KEYS - COUNT), x, LOWEST)
    return x


@triton.jit
def totals(
    query,  # [B, Hq, q, D], dense
    key,  # [B, Hkv, S, D], dense
    mask,  # [B or 1, Hq or 1, q or 1, S]; unused for KIND 0
    sink_logit,  # float32 [B or 1, Hq, q or 1]; unused without HAS_SINK
    out,  # float32 [B, Hq, q]: the logarithm to base two of the sum of exp(logit)
    mask_row: tl.constexpr,
    mask_head: tl.constexpr,
    mask_query: tl.constexpr,
    sink_row: tl.constexpr,
    sink_query: tl.constexpr,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNT,
    KEYS,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Process one block of queries of one head; the last blocks first, which see most keys if causal."""
    start, which = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ, tl.program_id(1).to(tl.int64)
    row, head = which // HEADS, which % HEADS
    i, d = start + tl.arange(0, BQ), tl.arange(0, WIDTH)
    q = tl.load(query + (which * COUNT + i)[:, None] * D + d[None, :], mask=(i < COUNT)[:, None] & (d < D), other=0.0)
    keys = key + (row * (HEADS // GROUPS) + head // GROUPS) * KEYS * D
    masks = mask + row * mask_row + head * mask_head
    top = tl.full([BQ], LOWEST, tl.float32)
    probs = tl.zeros([BQ], tl.float32)
    end, visible = KEYS, KEYS // BK * BK  # blocks up to `visible` are whole and lie before every query
    if CAUSAL:
        end = min(KEYS, start + BQ + (KEYS - COUNT))
        visible = min(KEYS, start + (KEYS - COUNT) + 1) // BK * BK
    for at in range(0, visible, BK):
        j = at + tl.arange(0, BK)
        k = tl.load(keys + j[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)
        x = block_of_logits(q, k, i, j, masks, mask_query, KIND, False, SCALE, CAP, COUNT, KEYS)
        higher = tl.maximum(top, tl.max(x, 1))
        probs = probs * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher[:, None]), 1)
        top = higher
    for at in range(visible, end, BK):
        j = at + tl.arange(0, BK)
        k = tl.load(keys + j[None, :] * D + d[:, None], mask=(j < KEYS)[None, :] & (d < D)[:, None], other=0.0)
        x = block_of_logits(q, k, i, j, masks, mask_query, KIND, CAUSAL, SCALE, CAP, COUNT, KEYS)
        x = tl.where((j < KEYS)[None, :], x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        probs = probs * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher[:, None]), 1)
        top = higher
    if HAS_SINK:
        index = row * sink_row + head * max(1, sink_query) + i * (sink_query > 1)
        of_sink = tl.load(sink_logit + index, mask=i < COUNT, other=0) * LOG2_E
        higher = tl.maximum(top, of_sink)
        probs = probs * tl.exp2(top - higher) + tl.exp2(of_sink - higher)
        top = higher
    tl.store(out + which * COUNT + i, top + tl.log2(probs), mask=i < COUNT)


@triton.jit
def probabilities(
    query,
    k,  # [D, BK]
    total,
    weight,
    masks,
    which,
    row,
    i,  # indices of the queries [BQ]
    j,  # indices of the keys [BK]
    d,
    mask_query: tl.constexpr,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    COUNT: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """Return a block's probabilities [BQ, BK] and query weights [BQ, 1], zero beyond the last query."""
    there = i < COUNT
    whole = tl.load(total + which * COUNT + i, mask=there, other=0.0)
    counted = tl.load(weight + row * COUNT + i, mask=there, other=0.0)
    q = tl.load(query + (which * COUNT + i)[:, None] * D + d[None, :], mask=there[:, None] & (d < D), other=0.0)
    x = block_of_logits(q, k, i, j, masks, mask_query, KIND, CAUSAL, SCALE, CAP, COUNT, KEYS)
    return tl.exp2(x - whole[:, None]), counted[:, None]


@triton.jit
def columns(
    query,  # as for `totals`
    key,
    mask,
    total,  # the output of `totals`
    weight,  # float32 [B, q]: the weight of each query
    sums,  # float32 [B, Hq, S]: the weighted sum of the probabilities,
    squares,  # and of their squares; unused without SQUARES
    mask_row: tl.constexpr,
    mask_head: tl.constexpr,
    mask_query: tl.constexpr,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    SQUARES: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNT,
    KEYS,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Process one block of keys for one query head.

    Queries are added up elementwise over blocks, and across a block at the end.
    """
    start, which = tl.program_id(0) * BK, tl.program_id(1).to(tl.int64)
    row, head = which // HEADS, which % HEADS
    j, d = start + tl.arange(0, BK), tl.arange(0, WIDTH)
    keys = key + (row * (HEADS // GROUPS) + head // GROUPS) * KEYS * D
    k = tl.load(keys + j[None, :] * D + d[:, None], mask=(j < KEYS)[None, :] & (d < D)[:, None], other=0.0)
    masks = mask + row * mask_row + head * mask_head
    first, after = 0, 0
    if CAUSAL:
        first = max(0, start - (KEYS - COUNT)) // BQ * BQ  # earlier queries see none of these keys,
        after = max(0, start + BK - 1 - (KEYS - COUNT) + BQ - 1) // BQ * BQ  # and later ones see all of them
        after = max(first, min(after, tl.cdiv(COUNT, BQ) * BQ))
    summed = tl.zeros([BQ, BK], tl.float32)
    squared = tl.zeros([BQ, BK], tl.float32)
    for at in range(first, after, BQ):
        i = at + tl.arange(0, BQ)
        p, counted = probabilities(
            query, k, total, weight, masks, which, row, i, j, d, mask_query, KIND, True, SCALE, CAP, COUNT, KEYS, D
        )  # fmt: skip
        summed += p * counted
        if SQUARES:
            squared += p * (p * counted)
    for at in range(after, COUNT, BQ):
        i = at + tl.arange(0, BQ)
        p, counted = probabilities(
            query, k, total, weight, masks, which, row, i, j, d, mask_query, KIND, False, SCALE, CAP, COUNT, KEYS, D
        )  # fmt: skip
        summed += p * counted
        if SQUARES:
            squared += p * (p * counted)
    tl.store(sums + which * KEYS + j, tl.sum(summed, 0), mask=j < KEYS)
    if SQUARES:
        tl.store(squares + which * KEYS + j, tl.sum(squared, 0), mask=j < KEYS)


def column_sums_by_kernel(attention: AttentionInputs, weight: Tensor, powers: int) -> list[Tensor]:
    """Sum the probabilities over the queries, and with two `powers` also their squares.

    Args:
        attention: with a mask [B or 1, Hq or 1, q or 1, S], or None.
        weight: [B, q], the weight of each query.

    Returns:
        One or two float32 tensors [B, Hkv, G, S].
    """
    query, key, mask, sink_logit = attention.query, attention.key, attention.mask, attention.sink_logit
    rows, heads, count, dim = query.shape
    groups, keys = heads // key.shape[1], key.shape[2]
    query, key, weight = query.contiguous(), key.contiguous(), weight.float().contiguous()
    width = max(16, triton.next_power_of_2(dim))
    side = side_of(width, query.dtype)
    total = query.new_empty((rows, heads, count), dtype=torch.float32)
    sink_options = _sink(sink_logit, heads)
    mask = None if mask is None else with_dense_last_dim(mask)
    common: dict[str, Any] = dict(
        **_mask(mask), CAUSAL=attention.causal, SCALE=attention.scale, CAP=attention.cap or 0.0,
        HEADS=heads, GROUPS=groups, COUNT=count, KEYS=keys, D=dim, WIDTH=width, BQ=side, BK=side,
        num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    masks = query if mask is None else mask  # the kernels read no mask and no sink if there is none
    sinks = total if sink_logit is None else sink_logit.float().contiguous()
    totals[(triton.cdiv(count, side), rows * heads)](query, key, masks, sinks, total, **common, **sink_options)
    result = [query.new_empty((rows, heads, keys), dtype=torch.float32) for _ in range(powers)]
    grid = (triton.cdiv(keys, side), rows * heads)
    columns[grid](query, key, masks, total, weight, result[0], result[-1], **common, SQUARES=powers == 2)
    return [torch.unflatten(sums, 1, (-1, groups)) for sums in result]


def side_of(width: int, dtype: torch.dtype) -> int:
    """Return how many queries, and keys, of `width` numbers a program holds at a time."""
    return max(16, min(64, (TILE_OF_FLOATS if dtype == torch.float32 else TILE) // width))


def _mask(mask: Tensor | None) -> dict[str, int]:
    """Return the kernels' arguments for the mask."""
    names = ("mask_row", "mask_head", "mask_query")
    if mask is None:
        return dict.fromkeys((*names, "KIND"), 0)
    return {**dict(zip(names, broadcast_strides(mask), strict=False)), "KIND": 1 if mask.dtype == torch.bool else 2}


def _sink(sink_logit: Tensor | None, heads: int) -> dict[str, Any]:
    """Return the arguments of `totals` for the logits of the sink [B or 1, Hq, q or 1, 1]."""
    if sink_logit is None:
        return dict(sink_row=0, sink_query=0, HAS_SINK=False)
    queries = sink_logit.shape[2]
    return dict(sink_row=0 if sink_logit.shape[0] == 1 else heads * queries, sink_query=queries, HAS_SINK=True)
