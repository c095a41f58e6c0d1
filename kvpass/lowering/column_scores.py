"""What the queries of a prompt paid to each key, without ever holding a [queries x keys] matrix.

The rows of the attention matrix are made again in chunks and only their sums survive.  It is an operator
of its own so that one compiled prompt graph serves every prompt length.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 22  # logits alive at a time: 16 MB in float32


def _rows(query: Tensor, key: Tensor, mask: Tensor | None, start: int, causal: bool, scale: float) -> Tensor:
    """Probabilities float32 [B, Hkv, G, n, S] of the n queries whose first is number `start` of the prompt."""
    groups, count, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], groups))  # [B, Hkv, G, n, D]
    logits = torch.matmul(grouped.flatten(2, 3), key.transpose(-1, -2)).float() * scale
    logits = logits.unflatten(2, (groups, count))
    if causal:
        ahead = torch.arange(keys, device=key.device) > torch.arange(start, start + count, device=key.device)[:, None]
        logits = logits.masked_fill(ahead, torch.finfo(torch.float32).min)
    if mask is not None:
        part = mask.expand(-1, -1, query.shape[2] if mask.shape[2] == 1 else -1, -1)
        part = part.unflatten(1, (key.shape[1], groups)) if part.shape[1] == query.shape[1] else part[:, :, None]
        if part.dtype == torch.bool:
            logits = logits.masked_fill(~part, torch.finfo(torch.float32).min)
        else:
            logits = logits + part.float()
    return torch.softmax(logits, -1)


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
        total, squares, last and window as in `kvpass.policies.Attention`, each float32 [B, Hkv, G, S].
    """
    shape = (query.shape[0], key.shape[1], query.shape[1] // key.shape[1], key.shape[2])
    total, squares, last, recent = (query.new_zeros(shape, dtype=torch.float32) for _ in range(4))
    count, offset = query.shape[2], key.shape[2] - query.shape[2]
    place = real.long().cumsum(-1)  # [B, q], 1-based among the real queries
    seen = place[:, -1:]
    step = max(1, CHUNK // max(1, shape[0] * query.shape[1] * shape[3]))
    for start in range(0, count, step):
        chosen = slice(start, min(start + step, count))
        rows = _rows(
            query[:, :, chosen],
            key,
            mask if mask is None or mask.shape[2] == 1 else mask[:, :, chosen],
            start + offset,
            causal,
            scale,
        )
        weights = real[:, chosen], real[:, chosen] & (place == seen)[:, chosen], (real & (place > seen - window))[:, chosen]
        for sums, weight in zip((total, last, recent), weights, strict=True):
            sums += torch.einsum("bhgqs,bq->bhgs", rows, weight.float())
        squares += torch.einsum("bhgqs,bq->bhgs", rows.square(), weights[0].float())
    recent /= seen.clamp(1, window)[:, :, None, None]
    return [total, squares, last, recent]


@column_scores.register_fake
def _(query: Tensor, key: Tensor, mask: Tensor | None, real: Tensor, causal: bool, scale: float, window: int) -> list[Tensor]:
    shape = (query.shape[0], key.shape[1], query.shape[1] // key.shape[1], key.shape[2])
    return [query.new_empty(shape, dtype=torch.float32) for _ in range(4)]
