"""Sums over the rows of an attention matrix that is never in memory.

A kernel computes them on a GPU (`column_kernel`), and loops in C++ on a CPU (`attention_tiles`). Elsewhere the rows of
the matrix are computed in blocks. Statistics of the last queries are computed from those queries alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvpass.fx.precision import accumulate_dtype, upcast
from kvpass.lowering import attention_tiles
from kvpass.lowering.attend import softmax_with_sink
from kvpass.lowering.attention_tiles import by_group
from kvpass.torch_private.fx_nodes import attend_with_lse

BLOCK = 1 << 20  # logits in memory at a time: 4 MB in float32, which stay in the caches between passes
SCANNED = 4 * BLOCK  # for a scan, which needs all heads of a row at once
LOWEST = torch.finfo(torch.float32).min

Smooth = Callable[[Tensor, Tensor], Tensor]
"""A function that changes probabilities [B, Hkv, G, n, S], given which queries are real, bool [B, q]."""
Seen = Callable[[slice], slice]
"""A function that returns the keys to read for a slice of the queries."""


class _Workspace:
    """Memory that each block reuses; the previous block's content is lost."""

    def __init__(self, like: Tensor, size: int, dtype: torch.dtype) -> None:
        self.buffer = like.new_empty(size, dtype=dtype)

    def shaped(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor of that shape."""
        return self.buffer[: math.prod(shape)].view(shape)


@dataclasses.dataclass(frozen=True)
class ScoredAttention:
    """The attention of queries whose statistics are computed.

    Attributes:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; the queries are the last q of the S tokens.
        mask: bool or additive [B or 1, Hq, Hkv or 1, q or 1, S], or None; with Hkv on a CPU alone.
        causal: a query does not see later keys.
        scale, cap: see `kvpass.capture.canonical.attention`.
        sink_logit: [B or 1, Hq, q or 1, 1], or None.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    cap: float | None
    sink_logit: Tensor | None

    def pieces(self, whole_rows: bool = False) -> Iterator[tuple[tuple[slice, slice], ScoredAttention]]:
        """Split into pieces of few rows and KV heads, with about as many matrices as threads.

        All rows and heads at once would leave only a few queries of each in a block.  On a CPU the pieces are float32:
        a product in float32 takes less time than converting the result of one in half precision.

        Args:
            whole_rows: take all heads of one row at a time.
        """
        (rows, heads), threads = self.key.shape[:2], torch.get_num_threads()
        most_rows = 1 if whole_rows else max(1, threads // heads)
        most_heads = heads if whole_rows else min(heads, threads)
        for row, head in itertools.product(range(0, rows, most_rows), range(0, heads, most_heads)):
            part = slice(row, min(row + most_rows, rows)), slice(head, min(head + most_heads, heads))
            query, key, mask, sink_logit = (
                _part(x, part, heads) for x in (self.query, self.key, self.mask, self.sink_logit)
            )
            assert query is not None
            assert key is not None
            if key.device.type == "cpu":
                query, key = upcast(query), upcast(key)
            yield part, dataclasses.replace(self, query=query, key=key, mask=mask, sink_logit=sink_logit)

    def spans(self, block: int) -> list[slice]:
        """Return consecutive slices of queries, each small enough for one block of logits."""
        count = self.query.shape[2]
        step = max(1, block // max(1, self.query.shape[0] * self.query.shape[1] * self.key.shape[2]))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def workspace(self, spans: list[slice], dtype: torch.dtype) -> _Workspace:
        """Return memory for the logits of each span over all keys."""
        most = max((span.stop - span.start for span in spans), default=0)
        return _Workspace(self.query, self.query.shape[0] * self.query.shape[1] * most * self.key.shape[2], dtype)

    def keys_before(self, span: slice) -> slice:
        """Return the keys up to the last that causal queries see, or all keys."""
        return slice(0, self.key.shape[2] - self.query.shape[2] + span.stop if self.causal else self.key.shape[2])

    def keys_seen(self, span: slice) -> slice:
        """Return `keys_before`, without outer keys that a boolean mask hides from all of these queries."""
        keys = self.keys_before(span)
        if self.mask is None or self.mask.dtype != torch.bool or self.mask.device.type != "cpu":
            return keys  # an additive mask spreads a row without visible keys over all keys
        seen = _among(self.mask, span)[..., keys].flatten(0, -2).any(0).nonzero()
        first, last = (int(seen[0]), int(seen[-1])) if len(seen) else (0, 0)
        return slice(first, keys.stop if self.causal else last + 1)  # causal queries end where their keys do

    def chosen(self, span: slice, keys: slice) -> ScoredAttention:
        """Return the attention of some queries to some keys."""
        mask = None if self.mask is None else _among(self.mask, span)[..., keys]
        sink_logit = None if self.sink_logit is None else _among(self.sink_logit, span)
        query, key = self.query[:, :, span], self.key[:, :, keys]
        return dataclasses.replace(self, query=query, key=key, mask=mask, sink_logit=sink_logit)

    def picked(self, index: Tensor) -> ScoredAttention:
        """Return the queries at indices [B, w], with an explicit causal mask."""
        batch, count, keys = len(index), self.query.shape[2], self.key.shape[2]
        mask, sink_logit = _at(self.mask, index), _at(self.sink_logit, index)
        if self.causal:
            visible = torch.arange(keys, device=index.device) <= (index + keys - count)[:, None, :, None]
            hidden = LOWEST if mask is not None and mask.dtype != torch.bool else False
            mask = visible if mask is None else torch.where(visible, mask, hidden)
        query = self.query.gather(
            2, index[:, None, :, None].expand(batch, *self.query.shape[1:2], -1, self.query.shape[3])
        )
        return dataclasses.replace(self, query=query, mask=mask, sink_logit=sink_logit, causal=False)

    def logits(self, workspace: _Workspace) -> Tensor:
        """Return masked logits, [B, Hkv, G, n, S] in the dtype of `upcast`."""
        batch, heads, keys, dim = self.key.shape
        groups, count = self.query.shape[1] // heads, self.query.shape[2]
        grouped = self.query.reshape(batch * heads, groups * count, dim)
        out, transposed = workspace.shaped(batch * heads, groups * count, keys), self.key.flatten(0, 1).transpose(1, 2)
        # baddbmm applies the scale without a further pass over the logits
        with torch.autocast(out.device.type, enabled=False):  # autocast would give another dtype than that of `out`
            torch.baddbmm(out[:, :1, :1], grouped, transposed, beta=0, alpha=self.scale, out=out)
        logits = upcast(out).view(batch, heads, groups, count, keys)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        if self.mask is None:
            return logits
        part = by_group(self.mask, heads)
        return logits.masked_fill_(~part, LOWEST) if part.dtype == torch.bool else logits.add_(part)

    def probs(self, logits: Tensor, workspace: _Workspace | None = None) -> Tensor:
        """Return the probabilities of logits; zero for a query whose mask hides every key."""
        if self.sink_logit is not None:
            return softmax_with_sink(logits, by_group(self.sink_logit, self.key.shape[1]))
        made = torch.softmax(logits, -1, out=None if workspace is None else workspace.shaped(*logits.shape))
        blind = self._blind()
        if blind is None or (blind.device.type == "cpu" and not blind.any()):  # on other devices the host must not wait
            return made
        return made.masked_fill_(by_group(blind, self.key.shape[1]), 0)

    def _blind(self) -> Tensor | None:
        """Return the padding queries, whose mask hides every key, [B or 1, Hq, Hkv or 1, q or 1, 1]."""
        if self.mask is None:
            return None
        if self.mask.dtype == torch.bool:
            return ~self.mask.any(-1, keepdim=True)
        return self.mask.amax(-1, keepdim=True) == -math.inf

    @property
    def by_kernel(self) -> bool:
        """True if a kernel computes the sums, in float32."""
        return self.query.device.type == "cuda" and self.query.dtype != torch.float64

    @property
    def by_loops(self) -> bool:
        """True if the loops in C++ compute the sums."""
        query = self.query
        return query.device.type == "cpu" and attention_tiles.dtype_of_products(query.dtype, query.shape[3]) is not None

    def summed(self, weight: Tensor, powers: int, log_sum_exp: Tensor | None = None) -> list[Tensor]:
        """Sum probabilities to the power of 1, ..., `powers` over queries with weights [B, q].

        Args:
            log_sum_exp: that of the rows, [B, Hq, q], if it is known.
        """
        if powers and self.by_loops:
            return attention_tiles.tiled(
                lambda: self._loops(log_sum_exp).column_sums(weight, powers), lambda: _sums(self, weight, powers)
            )
        if not powers or not self.by_kernel:
            return _sums(self, weight, powers)
        from kvpass.lowering.column_kernel import column_sums  # needs triton, which not every machine has

        common = self.causal, self.scale, self.cap, self.sink_logit
        return column_sums(self.query, self.key, self.mask, weight, *common, powers)

    def rows(self, log_sum_exp: Tensor | None = None) -> Iterator[Iterator[Tensor]]:
        """Yield for each row of the batch the probabilities of consecutive queries, [1, Hkv, G, n, s].

        They are of the first s keys: all keys, or those up to the last query if causal.

        Args:
            log_sum_exp: as of `summed`.
        """
        loops = attention_tiles.tiled(lambda: self._loops(log_sum_exp), lambda: None) if self.by_loops else None
        if loops is None:
            for _, piece in self.pieces(whole_rows=True):
                yield (probs for _, _, probs in _probs(piece, SCANNED, piece.keys_before))
            return
        batch, heads, count, _ = self.query.shape
        step = attention_tiles.QUERIES * max(1, SCANNED // max(1, heads * self.key.shape[2] * attention_tiles.QUERIES))
        spans = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        for row in range(batch):
            yield (self._row(loops, row, span) for span in spans)

    def _row(self, loops: attention_tiles.AttentionRows, row: int, span: slice) -> Tensor:
        """Return the probabilities of consecutive queries of a row, as of `rows`."""

        def by_blocks() -> Tensor:
            _, piece = next(itertools.islice(self.pieces(whole_rows=True), row, None))
            [(_, some, logits)] = _blocks(piece, [span], piece.keys_before)
            return some.probs(logits)

        return attention_tiles.tiled(lambda: loops.probabilities(row, span, self.keys_before(span).stop), by_blocks)

    def _loops(self, log_sum_exp: Tensor | None) -> attention_tiles.AttentionRows:
        common = self.mask, self.causal, self.scale, self.cap, self.sink_logit
        return attention_tiles.AttentionRows.of(self.query, self.key, *common, log_sum_exp).with_totals()

    def attend(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Compute attention without a cap and a sink on a CPU.

        Args:
            value: [B, Hkv, S, D], with as many numbers as a key and in its dtype.

        Returns:
            As `kvpass.torch_private.fx_nodes.attend_with_lse`.
        """
        query, key = self.query, self.key
        assert self.cap is None
        assert self.sink_logit is None
        assert not self.causal or query.shape[2] == key.shape[2]
        few = query.shape[2] < attention_tiles.FEWEST_QUERIES
        if few or not attention_tiles.is_faster(query.dtype, query.shape[3]):
            return attend_with_lse(query, key, value, self.mask, self.causal, self.scale)
        rows = attention_tiles.AttentionRows.of(query, key, self.mask, self.causal, self.scale)
        return attention_tiles.tiled(
            lambda: rows.attend(value), lambda: attend_with_lse(query, key, value, self.mask, self.causal, self.scale)
        )


def _among(x: Tensor, span: slice) -> Tensor:
    """Return some of the queries of [., ., q or 1, N]."""
    return x if x.shape[2] == 1 else x[:, :, span]


def _part(x: Tensor | None, part: tuple[slice, slice], heads: int) -> Tensor | None:
    """Return some rows and KV heads of [B or 1, Hq, Hkv or 1, ...].

    Args:
        part: the rows and the KV heads.
        heads: the number of KV heads in all.
    """
    if x is None:
        return None
    rows, some = part
    each = x.shape[1] // heads  # 0 if all heads share it
    return x[
        rows if x.shape[0] > 1 else slice(None), slice(some.start * each, some.stop * each) if each else slice(None)
    ]


def _at(x: Tensor | None, index: Tensor) -> Tensor | None:
    """Return the queries at indices [B, w] of [B or 1, H, q or 1, N]."""
    if x is None or x.shape[2] == 1:
        return x
    x = x.expand(len(index), -1, -1, -1)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _blocks(
    attention: ScoredAttention, spans: list[slice], seen: Seen
) -> Iterator[tuple[slice, ScoredAttention, Tensor]]:
    """Yield for each span its visible keys, the attention of both, and its logits [B, Hkv, G, n, s]."""
    workspace = attention.workspace(spans, attention.query.dtype)
    most = max((span.stop - span.start for span in spans), default=0) if attention.causal else 0
    ahead = torch.ones(most, most, dtype=torch.bool, device=attention.query.device).triu(1)
    for span in spans:
        keys = seen(span)
        block = attention.chosen(span, keys)
        logits = block.logits(workspace)
        if attention.causal:
            new = span.stop - span.start
            diagonal = logits[..., max(0, logits.shape[-1] - new) :]
            diagonal.masked_fill_(ahead[:new, new - diagonal.shape[-1] : new], LOWEST)
        yield keys, block, logits


def _sums(attention: ScoredAttention, valid: Tensor, powers: int) -> list[Tensor]:
    """Sum probabilities to the power of 1, ..., `powers` over the real queries: [B, Hkv, G, S]."""
    sums = zeros(attention, powers)
    for part, piece in attention.pieces() if powers else ():
        totals, real = [total[part] for total in sums], valid[part[0]]
        for span, keys, probs in _probs(piece, BLOCK, piece.keys_seen):
            _add([total[..., keys] for total in totals], probs, real[:, span])
    return sums


def zeros(attention: ScoredAttention, count: int) -> list[Tensor]:
    (batch, heads, keys), query = attention.key.shape[:3], attention.query
    shape = batch, heads, query.shape[1] // heads, keys
    return [query.new_zeros(shape, dtype=torch.float32) for _ in range(count)]


def _probs(attention: ScoredAttention, block: int, seen: Seen) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield spans of queries, their keys, and the probabilities [B, Hkv, G, n, s], which may be overwritten."""
    spans = attention.spans(block)
    workspace = attention.workspace(spans, accumulate_dtype(attention.query.dtype))
    for span, (keys, some, logits) in zip(spans, _blocks(attention, spans, seen), strict=True):
        yield span, keys, some.probs(logits, workspace)


def _add(sums: list[Tensor], probs: Tensor, valid: Tensor) -> None:
    """Add the probabilities of queries with weights [B, n], to the power of 1, 2, ..., each to its sum."""
    weight = valid[:, None, None, None].to(probs.dtype).expand(*probs.shape[:3], 1, -1)
    for power, total in enumerate(sums, 1):
        probs = probs if power == 1 else probs.square_()
        total += torch.matmul(weight, probs)[..., 0, :]


def late_statistics(attention: ScoredAttention, valid: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last row, mean row and last logits of the last `window` real queries, [B, Hkv, G, S]."""
    latest = _latest(valid, window)
    chosen, counted = attention.picked(latest.clamp(min=0)), (latest >= 0).float()
    if attention.by_kernel:
        return _late_by_kernel(chosen, counted, valid.sum(-1, keepdim=True).clamp(1, window))
    last, mean, logits = zeros(attention, 3)
    for part, piece in chosen.pieces():
        real, spans = counted[part[0], None, None, :, None], piece.spans(BLOCK)
        for span, (_, block, made) in zip(spans, _blocks(piece, spans, piece.keys_before), strict=True):
            probs = block.probs(made) * real[..., span, :]
            if span.start == 0:
                last[part] = probs[..., 0, :]
                logits[part] = torch.where(real[..., 0, :] > 0, made[..., 0, :], 0)
            mean[part] += probs.sum(-2)
    return last, mean.div_(valid.sum(-1).clamp(1, window)[:, None, None, None]), logits


def _latest(valid: Tensor, window: int) -> Tensor:
    """Return the indices of the last `window` real queries [B, w], the last one first, and -1 behind the earliest."""
    count = valid.shape[1]
    return torch.where(valid, torch.arange(count, device=valid.device), -1).topk(min(window, count)).values


def votes_for_older(attention: ScoredAttention, valid: Tensor, window: int, heads: int | None = None) -> Tensor:
    """Return the mean softmax of the last `window` real queries over the keys before the first of these queries.

    Args:
        heads: take the highest logit of the query heads of each of so many heads first; None for a row of each head.

    Returns:
        [B, Hkv, G, S], or [B, heads, 1, S]; zero for a row without such keys.
    """
    (batch, _, keys), count = attention.key.shape[:3], attention.query.shape[2]
    latest = _latest(valid, window)
    first = torch.where(latest < 0, count, latest).amin(-1) + keys - count  # [B]
    older = torch.arange(keys, device=latest.device) < first[:, None]
    chosen, counted = attention.picked(latest.clamp(min=0)), (latest >= 0).float()
    votes = zeros(attention, 1)[0] if heads is None else counted.new_zeros(batch, heads, 1, keys)
    regroups = heads not in (None, attention.key.shape[1])
    for (rows, some), piece in chosen.pieces(whole_rows=regroups):
        spans, among = piece.spans(BLOCK), older[rows, None, None, None]
        for span, (_, _, made) in zip(spans, _blocks(piece, spans, piece.keys_before), strict=True):
            if heads is not None:
                grouped = torch.unflatten(made.flatten(1, 2), 1, (heads, -1)) if regroups else made
                made = grouped.amax(2, keepdim=True)
            probs = torch.where(among, made.clamp(min=LOWEST), -torch.inf).softmax(-1)
            probs = torch.where(among, probs, 0) * counted[rows, None, None, span, None]  # no key among: was NaN
            votes[rows, slice(None) if regroups else some] += probs.sum(-2)
    return votes.div_(valid.sum(-1).clamp(1, window)[:, None, None, None])


def _late_by_kernel(chosen: ScoredAttention, counted: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `late_statistics` returns, by the kernel.

    Args:
        chosen: the last queries.
        counted: float [B, w], one for real queries.
        count: the number of real queries, [B, 1].
    """
    newest = chosen.chosen(slice(0, 1), slice(None))
    logits = newest.logits(newest.workspace([slice(0, 1)], newest.query.dtype))
    first = counted[:, None, None, :1, None]
    last = (newest.probs(logits) * first)[..., 0, :]
    mean = last if counted.shape[1] == 1 else chosen.summed(counted / count, 1)[0]
    return last, mean, torch.where(first > 0, logits, 0)[..., 0, :]


def highest_rows(attention: ScoredAttention, valid: Tensor, window: int, smoothed: Smooth) -> Tensor:
    """Return the highest of the smoothed probabilities of the last `window` real queries, float32 [B, Hkv, G, S]."""
    latest = _latest(valid, window)
    chosen, real, peaks = attention.picked(latest.clamp(min=0)), latest >= 0, zeros(attention, 1)[0]
    for part, piece in chosen.pieces():
        spans = piece.spans(BLOCK)
        for span, (_, block, made) in zip(spans, _blocks(piece, spans, piece.keys_before), strict=True):
            rows = smoothed(block.probs(made).float(), valid[part[0]]) * real[part[0], None, None, span, None]
            peaks[part] = torch.maximum(peaks[part], rows.amax(-2))
    return peaks
