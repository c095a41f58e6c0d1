"""Compute attention with its statistics, and its logits in blocks, so that its matrix is never in memory.

Blocks serve every device, dtype and mask. `attention_sums` takes a kernel or loops in C++ where they can run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.fx.precision import accumulate_dtype, upcast
from kvpass.lowering.attend import LOWEST, softmax_with_sink

BLOCK = 1 << 20  # logits in memory at a time: 4 MB in float32, which stay in the caches between passes


class _Workspace:
    """Memory that each block reuses; the previous block's content is lost."""

    def __init__(self, like: Tensor, size: int, dtype: torch.dtype) -> None:
        self.buffer = like.new_empty(size, dtype=dtype)

    def shaped(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor of that shape."""
        return self.buffer[: math.prod(shape)].view(shape)


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The attention of queries whose statistics are computed.

    Attributes:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; the queries are the last q of the S tokens.
        mask: bool or additive [B or 1, Hq, Hkv or 1, q or 1, S], or None; with Hkv only on a CPU.
        causal: a query does not see later keys.
        scale, cap: see `kvpass.capture.canonical.attention`.
        sink_logit: [B or 1, Hq, q or 1, 1], or None.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    cap: float | None = None
    sink_logit: Tensor | None = None

    def pieces(self, whole_rows: bool = False) -> Iterator[tuple[tuple[slice, slice], AttentionInputs]]:
        """Split into pieces of few rows and KV heads, with about as many matrices as threads.

        All rows and heads together would leave only a few queries of each in a block.  On a CPU the pieces are float32:
        a product in float32 takes less time than converting the result of a product in half precision.

        Args:
            whole_rows: take all heads of one row at a time.
        """
        (rows, heads), threads = self.key.shape[:2], torch.get_num_threads()
        most_rows = 1 if whole_rows else max(1, threads // heads)
        most_heads = heads if whole_rows else min(heads, threads)
        for row, head in itertools.product(range(0, rows, most_rows), range(0, heads, most_heads)):
            part = slice(row, min(row + most_rows, rows)), slice(head, min(head + most_heads, heads))
            query, key, mask, sink_logit = (
                _select_heads(x, part, heads) for x in (self.query, self.key, self.mask, self.sink_logit)
            )
            assert query is not None
            assert key is not None
            inputs = dataclasses.replace(self, query=query, key=key, mask=mask, sink_logit=sink_logit)
            yield part, inputs.in_float32_on_cpu()

    def in_float32_on_cpu(self) -> AttentionInputs:
        """Return inputs that a CPU multiplies in float32, if they have half precision."""
        if self.key.device.type != "cpu":
            return self
        return dataclasses.replace(self, query=upcast(self.query), key=upcast(self.key))

    def query_slices(self, size: int) -> list[slice]:
        """Return consecutive slices of queries, each with at most `size` logits if it has several queries."""
        count = self.query.shape[2]
        step = max(1, size // max(1, self.query.shape[0] * self.query.shape[1] * self.key.shape[2]))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def workspace(self, query_slices: list[slice], dtype: torch.dtype) -> _Workspace:
        """Return memory for the logits of each slice of queries over all keys."""
        most = max((span.stop - span.start for span in query_slices), default=0)
        return _Workspace(self.query, self.query.shape[0] * self.query.shape[1] * most * self.key.shape[2], dtype)

    def keys_before(self, span: slice) -> slice:
        """Return the keys up to the last that causal queries see, or all keys."""
        return slice(0, self.key.shape[2] - self.query.shape[2] + span.stop if self.causal else self.key.shape[2])

    def sliced(self, span: slice, keys: slice) -> AttentionInputs:
        """Return the attention of some queries to some keys."""
        mask = None if self.mask is None else _slice_queries(self.mask, span)[..., keys]
        sink_logit = None if self.sink_logit is None else _slice_queries(self.sink_logit, span)
        query, key = self.query[:, :, span], self.key[:, :, keys]
        return dataclasses.replace(self, query=query, key=key, mask=mask, sink_logit=sink_logit)

    def gathered(self, index: Tensor) -> AttentionInputs:
        """Return the attention of the queries at indices int64 [B, w], with an explicit causal mask."""
        batch, count, keys = len(index), self.query.shape[2], self.key.shape[2]
        mask, sink_logit = _gather_queries(self.mask, index), _gather_queries(self.sink_logit, index)
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
        # baddbmm applies the scale without another pass over the logits
        with torch.autocast(out.device.type, enabled=False):  # autocast would give another dtype than `out` has
            torch.baddbmm(out[:, :1, :1], grouped, transposed, beta=0, alpha=self.scale, out=out)
        logits = upcast(out).view(batch, heads, groups, count, keys)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        if self.mask is None:
            return logits
        mask = by_group(self.mask, heads)
        return logits.masked_fill_(~mask, LOWEST) if mask.dtype == torch.bool else logits.add_(mask)

    def probs(self, logits: Tensor, workspace: _Workspace | None = None) -> Tensor:
        """Return the probabilities of logits; zero for a query whose mask hides every key."""
        if self.sink_logit is not None:
            return softmax_with_sink(logits, by_group(self.sink_logit, self.key.shape[1]))
        probs = torch.softmax(logits, -1, out=None if workspace is None else workspace.shaped(*logits.shape))
        no_key = self._queries_without_keys()
        if no_key is None or (no_key.device.type == "cpu" and not no_key.any()):  # elsewhere the host must not wait
            return probs
        return probs.masked_fill_(by_group(no_key, self.key.shape[1]), 0)

    def _queries_without_keys(self) -> Tensor | None:
        """Return the padding queries, whose mask hides every key, [B or 1, Hq, Hkv or 1, q or 1, 1]."""
        if self.mask is None:
            return None
        if self.mask.dtype == torch.bool:
            return ~self.mask.any(-1, keepdim=True)
        return self.mask.amax(-1, keepdim=True) == -math.inf


def _slice_queries(x: Tensor, span: slice) -> Tensor:
    """Return some of the queries of [., ., q or 1, N]."""
    return x if x.shape[2] == 1 else x[:, :, span]


def _select_heads(x: Tensor | None, part: tuple[slice, slice], heads: int) -> Tensor | None:
    """Return a part's rows and KV heads of [B or 1, Hq, Hkv or 1, ...] with `heads` KV heads."""
    if x is None:
        return None
    rows, kv_heads = part
    each = x.shape[1] // heads  # 0 if all heads share it
    return x[
        rows if x.shape[0] > 1 else slice(None),
        slice(kv_heads.start * each, kv_heads.stop * each) if each else slice(None),
    ]


def _gather_queries(x: Tensor | None, index: Tensor) -> Tensor | None:
    """Return the queries at indices [B, w] of [B or 1, H, q or 1, N]."""
    if x is None or x.shape[2] == 1:
        return x
    x = x.expand(len(index), -1, -1, -1)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def by_group(x: Tensor, heads: int) -> Tensor:
    """Reshape [B or 1, Hq, Hkv or 1, ...] to [B or 1, Hkv or 1, G or 1, ...]."""
    return torch.unflatten(x, 1, (heads, -1)) if x.shape[1] > 1 else x[:, :, None]


def regrouped(x: Tensor, heads: int) -> Tensor:
    """Reshape [B, Hkv, G, ...] to [B, heads, Hkv * G / heads, ...]."""
    return x if heads == x.shape[1] else torch.unflatten(x.flatten(1, 2), 1, (heads, -1))


def with_dense_last_dim(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def zeros(attention: AttentionInputs) -> Tensor:
    """Return float32 zeros [B, Hkv, G, S]."""
    (batch, heads, keys), query = attention.key.shape[:3], attention.query
    return query.new_zeros(batch, heads, query.shape[1] // heads, keys, dtype=torch.float32)


class Block(NamedTuple):
    """Some queries' attention to some keys.

    Attributes:
        queries, keys: slices of all queries and keys.
        attention: their attention.
        logits: [B, Hkv, G, n, s], lost with the next block.
    """

    queries: slice
    keys: slice
    attention: AttentionInputs
    logits: Tensor


def blocks(attention: AttentionInputs, size: int | None = None) -> Iterator[Block]:
    """Yield the logits of consecutive queries.

    Args:
        size: the most logits of a block, None for `BLOCK`.
    """
    query_slices = attention.query_slices(size or BLOCK)
    workspace = attention.workspace(query_slices, attention.query.dtype)
    most = max((span.stop - span.start for span in query_slices), default=0) if attention.causal else 0
    ahead = torch.ones(most, most, dtype=torch.bool, device=attention.query.device).triu(1)
    for span in query_slices:
        keys = attention.keys_before(span)
        part = attention.sliced(span, keys)
        logits = part.logits(workspace)
        if attention.causal:
            new = span.stop - span.start
            logits[..., -new:].masked_fill_(ahead[:new, :new], LOWEST)
        yield Block(span, keys, part, logits)


def probs_in_blocks(attention: AttentionInputs, size: int | None = None) -> Iterator[tuple[Block, Tensor]]:
    """Yield the blocks of `blocks`, each with its probabilities [B, Hkv, G, n, s], which may be overwritten."""
    workspace = attention.workspace(attention.query_slices(size or BLOCK), accumulate_dtype(attention.query.dtype))
    for block in blocks(attention, size):
        yield block, block.attention.probs(block.logits, workspace)


def column_sums_in_blocks(attention: AttentionInputs, weight: Tensor, powers: int) -> list[Tensor]:
    """Sum probabilities, and with two `powers` squares, over queries with weights [B, q]: float32 [B, Hkv, G, S]."""
    sums = [zeros(attention) for _ in range(powers)]
    for part, piece in attention.pieces():
        totals, weights = [total[part] for total in sums], weight[part[0]]
        for block, probs in probs_in_blocks(piece):
            _add([total[..., block.keys] for total in totals], probs, weights[:, block.queries])
    return sums


def _add(sums: list[Tensor], probs: Tensor, weight: Tensor) -> None:
    """Add the probabilities of queries with weights [B, n], then their squares, each to its sum."""
    weight = weight[:, None, None, None].to(probs.dtype).expand(*probs.shape[:3], 1, -1)
    for power, total in enumerate(sums, 1):
        probs = probs if power == 1 else probs.square_()
        total += torch.matmul(weight, probs)[..., 0, :]
