"""What the queries of a prompt paid to each key, without ever holding a [queries x keys] matrix.

The rows of the attention matrix are made again in pieces and only their sums survive.  What a policy asks
about the last queries alone is made from those queries alone.  Both operators are opaque to the compiler
so that one compiled prompt graph serves every prompt length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvpass import policies
from kvpass.budget import slots_for

PIECE = 1 << 20  # logits alive at a time: 4 MB in float32; much more would leave the caches of a core
LOWEST = torch.finfo(torch.float32).min


def _shape(query: Tensor, key: Tensor, keys: int | torch.SymInt) -> tuple[int | torch.SymInt, ...]:
    return (query.shape[0], key.shape[1], query.shape[1] // key.shape[1], keys)


def _spans(count: int, query: Tensor, key: Tensor) -> list[slice]:
    """Consecutive queries, `count` in all, few enough for one piece."""
    step = max(1, PIECE // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class _Room:
    """Memory for one piece after the other; what was made in it before is lost."""

    def __init__(self, spans: list[slice], query: Tensor, key: Tensor, dtype: torch.dtype) -> None:
        most = max((span.stop - span.start for span in spans), default=0)
        self.buffer = query.new_empty(query.shape[0] * query.shape[1] * most * key.shape[2], dtype=dtype)

    def shaped(self, *shape: int) -> Tensor:
        """A tensor of that shape, of unknown content."""
        return self.buffer[: math.prod(shape)].view(shape)


def _logits(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, room: _Room) -> Tensor:
    """Masked logits, float32 [B, Hkv, G, n, S]; mask bool or additive [B or 1, Hq or 1, n or 1, S]."""
    rows, heads, keys, dim = key.shape
    groups, count = query.shape[1] // heads, query.shape[2]
    grouped = query.reshape(rows * heads, groups * count, dim)
    out = room.shaped(rows * heads, groups * count, keys)
    # baddbmm for its factor on the product: no pass over the logits of its own
    torch.baddbmm(out[:, :1, :1], grouped, key.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale, out=out)
    logits = out.float().view(rows, heads, groups, count, keys)
    if mask is None:
        return logits
    part = mask.reshape(mask.shape[0], heads, groups, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
    return logits.masked_fill_(~part, LOWEST) if part.dtype == torch.bool else logits.add_(part)


def _pieces(
    spans: list[slice], query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Iterator[Tensor]:
    """The logits of consecutive queries, float32 [B, Hkv, G, n, s]; of causal ones only for the s keys they see."""
    count, keys = query.shape[2], key.shape[2]
    room = _Room(spans, query, key, query.dtype)
    for chosen in spans:
        part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, chosen]
        seen = keys - count + chosen.stop if causal else keys
        part = None if part is None else part[..., :seen]
        logits = _logits(query[:, :, chosen], key[:, :, :seen], part, scale, room)
        if causal:
            new = chosen.stop - chosen.start
            ahead = torch.ones(new, new, dtype=torch.bool, device=key.device).triu(1)
            logits[..., seen - new :].masked_fill_(ahead, LOWEST)
        yield logits


def _sums(
    query: Tensor, key: Tensor, mask: Tensor | None, real: Tensor, causal: bool, scale: float, powers: int
) -> list[Tensor]:
    """Probabilities to the power of 1, ..., `powers`, each summed over the real queries: [B, Hkv, G, S]."""
    sums = [query.new_zeros(_shape(query, key, key.shape[2]), dtype=torch.float32) for _ in range(powers)]
    spans = _spans(query.shape[2], query, key) if powers else []
    room, counted = _Room(spans, query, key, torch.float32), real.float()[:, None, None, None]  # [B, 1, 1, 1, q]
    for span, logits in zip(spans, _pieces(spans, query, key, mask, causal, scale), strict=True):
        paid = torch.softmax(logits, -1, out=room.shaped(*logits.shape))
        weight = counted[..., span].expand(*paid.shape[:3], 1, -1)
        for power, total in enumerate(sums, 1):
            paid = paid if power == 1 else paid.square_()
            total[..., : paid.shape[-1]] += torch.matmul(weight, paid)[..., 0, :]
    return sums


def _late(
    query: Tensor, key: Tensor, mask: Tensor | None, real: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the last `window` real queries: the last row, the mean of the rows, and the last logits, [B, Hkv, G, S]."""
    count, keys = query.shape[2], key.shape[2]
    latest = torch.where(real, torch.arange(count, device=key.device), -1).topk(min(window, count))  # last one first
    place = latest.values.clamp(min=0)  # [B, w]
    if mask is not None and mask.shape[2] > 1:
        mask = _picked(mask.expand(len(place), -1, -1, -1), place)
    if causal:
        visible = torch.arange(keys, device=key.device) <= (place + keys - count)[:, None, :, None]
        mask = visible if mask is None else torch.where(visible, mask, False if mask.dtype == torch.bool else LOWEST)
    chosen, counted = _picked(query, place), (latest.values >= 0).float()[:, None, None, :, None]
    spans, mean = _spans(chosen.shape[2], chosen, key), query.new_zeros(_shape(query, key, keys), dtype=torch.float32)
    last, logits = mean, mean
    for span, made in zip(spans, _pieces(spans, chosen, key, mask, False, scale), strict=True):
        paid = torch.softmax(made, -1) * counted[..., span, :]
        if span.start == 0:
            last, logits = paid[..., 0, :].clone(), made[..., 0, :] * counted[..., 0, :]
        mean += paid.sum(-2)
    return last, mean.div_(real.sum(-1).clamp(1, window)[:, None, None, None]), logits


def _picked(x: Tensor, place: Tensor) -> Tensor:
    """Places [B, w] of the third dimension of [B, H, q, N]."""
    return x.gather(2, place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


@torch.library.custom_op("kvpass::column_scores", mutates_args=())
def column_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    window: int,
    powers: int = 2,
) -> list[Tensor]:
    """Column statistics of the attention matrix softmax(scale * query key^T + mask).

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; the queries are the last q of the S tokens.
        mask: bool or additive [B or 1, Hq or 1, q, S], or None.
        real: bool [B, q], false for queries that are padding; they are left out of every figure.
        causal: a query does not see the keys after it.
        window: how many of the last real queries `window` averages over.
        powers: 2 for all; 1 leaves out squares, 0 total as well.  They alone need the rows of all queries.

    Returns:
        total, squares, last, window and logits as in `kvpass.policies.Attention`, each float32 [B, Hkv, G, S];
        what is left out has no keys.
    """
    sums = _sums(query, key, mask, real, causal, scale, powers)
    nothing = [query.new_empty(_shape(query, key, 0), dtype=torch.float32) for _ in range(2 - powers)]
    return [*sums, *nothing, *_late(query, key, mask, real, causal, scale, window)]


@column_scores.register_fake
def _(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    window: int,
    powers: int = 2,
) -> list[Tensor]:
    widths = [key.shape[2] if powers >= power else 0 for power in (1, 2)] + [key.shape[2]] * 3
    return [query.new_empty(_shape(query, key, width), dtype=torch.float32) for width in widths]


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
    chosen, keys, held = policies.specified(policy), key.shape[2], key.shape[2] - query.shape[2]
    slots = slots_for(chosen, json.loads(budget), query.shape[2])
    spans = _spans(query.shape[2], query, key)
    pieces = (torch.softmax(piece, -1) for piece in _pieces(spans, query, key, mask, causal, scale))
    rows = (torch.nn.functional.pad(piece, (0, keys - piece.shape[-1])) for piece in pieces)
    return chosen.scan(rows, real, held, slots).clone(memory_format=torch.contiguous_format)


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
