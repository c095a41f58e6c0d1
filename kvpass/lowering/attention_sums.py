"""Sum attention probabilities over queries, without the whole attention matrix in memory.

A kernel computes them on a GPU (`column_kernel`), and loops in C++ on a CPU (`attention_tiles`). Elsewhere the
probabilities are computed in blocks (`attention_blocks`). Statistics of the last queries are computed from those
queries alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvpass.lowering import attention_blocks, attention_tiles
from kvpass.lowering.attend import LOWEST
from kvpass.lowering.attention_blocks import AttentionInputs, blocks, regrouped, zeros
from kvpass.torch_private.operators import attend_with_lse

SCAN_BLOCK = 4 * attention_blocks.BLOCK
"""Logits in memory at a time for a scan, which needs all heads of a query together."""

Smooth = Callable[[Tensor, Tensor], Tensor]
"""A function that changes probabilities [B, Hkv, G, n, S], given which queries are real, bool [B, q]."""


def uses_kernel(attention: AttentionInputs) -> bool:
    """Return whether a kernel computes the sums, in float32."""
    return attention.query.device.type == "cuda" and attention.query.dtype != torch.float64


def uses_tiles(attention: AttentionInputs) -> bool:
    """Return whether the loops in C++ compute the sums."""
    query = attention.query
    return query.device.type == "cpu" and attention_tiles.dtype_of_products(query.dtype, query.shape[3]) is not None


def column_sums(
    attention: AttentionInputs, weight: Tensor, powers: int, log_sum_exp: Tensor | None = None
) -> list[Tensor]:
    """Sum probabilities, and with two `powers` squares, over queries with weights [B, q]: float32 [B, Hkv, G, S].

    Args:
        log_sum_exp: the log-sum-exp of each query's logits, [B, Hq, q], if it is known.
    """
    if not powers:
        return []
    if uses_tiles(attention):
        return attention_tiles.TiledAttention.of(attention, log_sum_exp).with_totals().column_sums(weight, powers)
    if not uses_kernel(attention):
        return attention_blocks.column_sums_in_blocks(attention, weight, powers)
    from kvpass.lowering import column_kernel  # needs triton, which some machines lack

    return column_kernel.column_sums_by_kernel(attention, weight, powers)


def probabilities(attention: AttentionInputs, log_sum_exp: Tensor | None = None) -> Iterator[Iterator[Tensor]]:
    """Yield for each row of the batch the probabilities of consecutive queries, [1, Hkv, G, n, s].

    They are of the first s keys: all keys, or if causal the keys up to the last query.

    Args:
        log_sum_exp: the log-sum-exp of each query's logits, [B, Hq, q], if it is known.
    """
    if not uses_tiles(attention):
        for _, piece in attention.pieces(whole_rows=True):
            yield (probs for _, probs in attention_blocks.probs_in_blocks(piece, size=SCAN_BLOCK))
        return
    tiled = attention_tiles.TiledAttention.of(attention, log_sum_exp).with_totals()
    yield from _by_span(attention, tiled.probabilities, heads=attention.query.shape[1])


def _by_span(
    attention: AttentionInputs, probs_of: Callable[[int, slice, int], Tensor], heads: int, least: int = 1
) -> Iterator[Iterator[Tensor]]:
    """Call a function of `attention_tiles` for consecutive queries of each row of the batch.

    Args:
        probs_of: called with the row of the batch, the queries, and the number of keys that they see.
        heads: how many heads it returns for each query.
        least: the fewest blocks of queries in a call.  It must not depend on the process: others that share the heads
            reduce the same queries.
    """
    batch, _, count, _ = attention.query.shape
    tile = heads * attention.key.shape[2] * attention_tiles.QUERIES
    step = attention_tiles.QUERIES * max(least, SCAN_BLOCK // max(1, tile))
    spans = [slice(start, min(start + step, count)) for start in range(0, count, step)]
    for row in range(batch):
        yield (probs_of(row, span, attention.keys_before(span).stop) for span in spans)


def attend(
    attention: AttentionInputs, value: Tensor, weight: Tensor, powers: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute attention without a cap and a sink on a CPU, and the result of `column_sums`.

    Args:
        value: [B, Hkv, S, D], with the dimension and the dtype of a key.
        weight, powers: see `column_sums`.

    Returns:
        As `kvpass.torch_private.operators.attend_with_lse`, and the sums.
    """
    query, key = attention.query, attention.key
    if attends_in_tiles(attention, summed=powers > 0):
        return attention_tiles.TiledAttention.of(attention).attend(value, weight, powers)
    output, log_sum_exp = attend_with_lse(query, key, value, attention.mask, attention.causal, attention.scale)
    return output, log_sum_exp, column_sums(attention, weight, powers, log_sum_exp)


def attend_with_means(attention: AttentionInputs, value: Tensor) -> tuple[Tensor, Iterator[Iterator[Tensor]]]:
    """Compute attention that `attends_in_tiles`, and the means over all heads of the blocks of `probabilities`.

    Returns:
        The output, which is complete when all means have been read, and the means, [1, 1, 1, n, s].
    """
    output, means_of = attention_tiles.TiledAttention.of(attention).attend_with_means(value)
    return output, _by_span(attention, means_of, heads=1, least=attention.query.shape[1])


def attends_in_tiles(attention: AttentionInputs, summed: bool) -> bool:
    """Return whether the loops in C++ compute attention without a cap and a sink.

    Args:
        summed: whether sums or means of the probabilities are also computed.
    """
    assert attention.cap is None
    assert attention.sink_logit is None
    assert not attention.causal or attention.query.shape[2] == attention.key.shape[2]
    return attention_tiles.is_faster(attention.query, attention.mask, summed)


def _last_indices(valid: Tensor, window: int) -> Tensor:
    """Return the indices of the last `window` real queries [B, w], the last one first, and -1 after the earliest."""
    count = valid.shape[1]
    return torch.where(valid, torch.arange(count, device=valid.device), -1).topk(min(window, count)).values


def late_statistics(attention: AttentionInputs, valid: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last row, mean row and last logits of the last `window` real queries, [B, Hkv, G, S]."""
    index = _last_indices(valid, window)
    latest, weight = attention.gathered(index.clamp(min=0)), (index >= 0).float()
    count = valid.sum(-1, keepdim=True).clamp(1, window)
    if uses_kernel(attention) or uses_tiles(attention):
        return _late_by_column_sums(latest, weight, count)
    last, mean, logits = (zeros(attention) for _ in range(3))
    for part, piece in latest.pieces():
        weights = weight[part[0], None, None, :, None]
        for block in blocks(piece):
            probs = block.attention.probs(block.logits) * weights[..., block.queries, :]
            if block.queries.start == 0:
                last[part] = probs[..., 0, :]
                logits[part] = torch.where(weights[..., 0, :] > 0, block.logits[..., 0, :], 0)
            mean[part] += probs.sum(-2)
    return last, mean.div_(count[:, :, None, None]), logits


def _late_by_column_sums(latest: AttentionInputs, weight: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `late_statistics` of the last queries, whose mean is one of `column_sums`.

    Args:
        weight: float [B, w], one for real queries.
        count: the number of real queries, [B, 1].
    """
    newest = latest.sliced(slice(0, 1), slice(None)).in_float32_on_cpu()
    logits = newest.logits(newest.workspace([slice(0, 1)], newest.query.dtype))
    first = weight[:, None, None, :1, None]
    last = (newest.probs(logits) * first)[..., 0, :]
    mean = last.clone() if weight.shape[1] == 1 else column_sums(latest, weight / count, 1)[0]
    return last, mean, torch.where(first > 0, logits, 0)[..., 0, :]


def votes_for_older(attention: AttentionInputs, valid: Tensor, window: int, heads: int | None = None) -> Tensor:
    """Return the mean softmax of the last `window` real queries over the keys before the first of these queries.

    Args:
        heads: the number of heads, each with the highest logit of its query heads; None for a row of each query head.

    Returns:
        [B, Hkv, G, S], or [B, heads, 1, S]; zero for a row without such keys.
    """
    (batch, _, keys), count = attention.key.shape[:3], attention.query.shape[2]
    index = _last_indices(valid, window)
    first = torch.where(index < 0, count, index).amin(-1) + keys - count  # [B]
    older = torch.arange(keys, device=index.device) < first[:, None]
    latest, real = attention.gathered(index.clamp(min=0)), (index >= 0).float()
    votes = zeros(attention) if heads is None else real.new_zeros(batch, heads, 1, keys)
    regroups = heads not in (None, attention.key.shape[1])
    for (rows, kv_heads), piece in latest.pieces(whole_rows=regroups):
        is_older = older[rows, None, None, None]
        for block in blocks(piece):
            logits = block.logits
            if heads is not None:
                logits = (regrouped(logits, heads) if regroups else logits).amax(2, keepdim=True)
            probs = torch.where(is_older, logits.clamp(min=LOWEST), -torch.inf).softmax(-1)
            probs = torch.where(is_older, probs, 0) * real[rows, None, None, block.queries, None]  # NaN if none is
            votes[rows, slice(None) if regroups else kv_heads] += probs.sum(-2)
    return votes.div_(valid.sum(-1).clamp(1, window)[:, None, None, None])


def highest_probs(attention: AttentionInputs, valid: Tensor, window: int, smoothed: Smooth) -> Tensor:
    """Return the highest of the smoothed probabilities of the last `window` real queries, float32 [B, Hkv, G, S]."""
    index = _last_indices(valid, window)
    latest, real, peaks = attention.gathered(index.clamp(min=0)), index >= 0, zeros(attention)
    for part, piece in latest.pieces():
        for block in blocks(piece):
            probs = smoothed(block.attention.probs(block.logits).float(), valid[part[0]])
            probs = probs * real[part[0], None, None, block.queries, None]
            peaks[part] = torch.maximum(peaks[part], probs.amax(-2))
    return peaks
