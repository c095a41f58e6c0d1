"""What the queries of a prompt paid to each key, without ever holding a [queries x keys] matrix.

The rows of the attention matrix are made again in pieces and only their sums survive.  Both operators are
opaque to the compiler so that one compiled prompt graph serves every prompt length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from kvpass import policies
from kvpass.budget import slots_for

CHUNK = 1 << 22  # logits alive at a time: 16 MB in float32
LOWEST = torch.finfo(torch.float32).min


def _pieces(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive queries and their logits, float32 [B, Hkv, G, n, S]."""
    count = query.shape[2]
    step = max(1, CHUNK // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    for start in range(0, count, step):
        chosen = slice(start, min(start + step, count))
        part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, chosen]
        yield chosen, _logits(query[:, :, chosen], key, part, start + key.shape[2] - count if causal else None, scale)


def _logits(query: Tensor, key: Tensor, mask: Tensor | None, first: int | None, scale: float) -> Tensor:
    """Masked logits; `first` is the place of the first query among the keys, or None if it may see them all."""
    rows, heads, keys, _ = key.shape
    groups, count = query.shape[1] // heads, query.shape[2]
    grouped = query.reshape(rows, heads, groups * count, -1)  # [B, Hkv, G*n, D]
    logits = torch.matmul(grouped, key.transpose(-1, -2)).float() * scale
    logits = logits.view(rows, heads, groups, count, keys)
    if first is not None:
        ahead = torch.arange(keys, device=key.device) > torch.arange(first, first + count, device=key.device)[:, None]
        logits = logits.masked_fill(ahead, LOWEST)
    if mask is None:
        return logits
    part = mask.reshape(mask.shape[0], heads, groups, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
    return logits.masked_fill(~part, LOWEST) if part.dtype == torch.bool else logits + part.float()


@torch.library.custom_op("kvpass::column_scores", mutates_args=())
def column_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, real: Tensor, causal: bool, scale: float, window: int
) -> list[Tensor]:
    """Column statistics of the attention matrix softmax(scale * query key^T + mask).

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; the queries are the last q of the S tokens.
        mask: bool or additive [B or 1, Hq or 1, q, S], or None.
        real: bool [B, q], false for queries that are padding; they are left out of every figure.
        causal: a query does not see the keys after it.
        window: how many of the last real queries `window` averages over.

    Returns:
        total, squares, last, window and logits as in `kvpass.policies.Attention`, each float32 [B, Hkv, G, S].
    """
    shape = (query.shape[0], key.shape[1], query.shape[1] // key.shape[1], key.shape[2])
    total, squares, last, recent, logits = (query.new_zeros(shape, dtype=torch.float32) for _ in range(5))
    place = real.long().cumsum(-1)  # [B, q], 1-based among the real queries
    seen = place[:, -1:]
    final, late = real & (place == seen), real & (place > seen - window)
    for chosen, piece in _pieces(query, key, mask, causal, scale):
        logits += torch.einsum("bhgqs,bq->bhgs", piece, final[:, chosen].float())
        rows = torch.softmax(piece, -1)
        for sums, weight in ((total, real), (last, final), (recent, late)):
            sums += torch.einsum("bhgqs,bq->bhgs", rows, weight[:, chosen].float())
        squares += torch.einsum("bhgqs,bq->bhgs", rows.square_(), real[:, chosen].float())
    recent /= seen.clamp(1, window)[:, :, None, None]
    return [total, squares, last, recent, logits]


@column_scores.register_fake
def _(
    query: Tensor, key: Tensor, mask: Tensor | None, real: Tensor, causal: bool, scale: float, window: int
) -> list[Tensor]:
    shape = (query.shape[0], key.shape[1], query.shape[1] // key.shape[1], key.shape[2])
    return [query.new_empty(shape, dtype=torch.float32) for _ in range(5)]


@torch.library.custom_op("kvpass::row_scan", mutates_args=())
def row_scan(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    policy: str,
    budget: str,
) -> Tensor:
    """What a policy makes of the rows, float32 [B, H', S], when it must see one query after the other.

    Args:
        policy: its specification, see `kvpass.policies.specify`.
        budget: as users write it: a number of slots, or a share of the prompt.
        The others are as for `column_scores`.
    """
    chosen, held = policies.specified(policy), key.shape[2] - query.shape[2]
    slots = slots_for(chosen, json.loads(budget), query.shape[2])
    pieces = (torch.softmax(piece, -1) for _, piece in _pieces(query, key, mask, causal, scale))
    return chosen.scan(pieces, real, held, slots)


@row_scan.register_fake
def _(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    policy: str,
    budget: str,
) -> Tensor:
    groups = 1 if policies.specified(policy).heads == "shared" else key.shape[1]
    return query.new_empty((key.shape[0], groups, key.shape[2]), dtype=torch.float32)
