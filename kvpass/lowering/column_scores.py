"""What the queries of a prompt paid to each key, without ever holding a [queries x keys] matrix.

The rows of the attention matrix are made again in pieces and only their sums survive.  What a policy asks
about the last queries alone is made from those queries alone.  Where attention itself is wanted on a CPU, two
more operators take it from the same pieces.  All are opaque to the compiler so that one compiled prompt graph
serves every prompt length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvpass import policies
from kvpass.budget import Budget, slots_for
from kvpass.lowering.attend import softmax_beside
from kvpass.policies.heads import Spread
from kvpass.precision import wide, widest

PIECE = 1 << 21  # logits alive at a time: 8 MB in float32, of which each pass over them finds some in caches
LOWEST = torch.finfo(torch.float32).min


def _shape(query: Tensor, key: Tensor, keys: int | torch.SymInt) -> tuple[int | torch.SymInt, ...]:
    return (query.shape[0], key.shape[1], query.shape[1] // key.shape[1], keys)


class _Room:
    """Memory for one piece after the other; what was made in it before is lost."""

    def __init__(self, like: Tensor, size: int, dtype: torch.dtype) -> None:
        self.buffer = like.new_empty(size, dtype=dtype)

    def shaped(self, *shape: int) -> Tensor:
        """A tensor of that shape, of unknown content."""
        return self.buffer[: math.prod(shape)].view(shape)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Queries and all that makes attention rows of them; see `column_scores`."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    cap: float | None
    sink: Tensor | None

    def spans(self) -> list[slice]:
        """Consecutive queries, few enough for one piece."""
        count = self.query.shape[2]
        step = max(1, PIECE // max(1, self.query.shape[0] * self.query.shape[1] * self.key.shape[2]))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def room(self, spans: list[slice], dtype: torch.dtype) -> _Room:
        """Memory for what each of the spans makes of all keys."""
        most = max((span.stop - span.start for span in spans), default=0)
        return _Room(self.query, self.query.shape[0] * self.query.shape[1] * most * self.key.shape[2], dtype)

    def chosen(self, span: slice) -> _Rows:
        """Some of the queries, which if causal see the keys up to their own alone."""
        seen = self.key.shape[2] - self.query.shape[2] + span.stop if self.causal else self.key.shape[2]
        mask = None if self.mask is None else _among(self.mask, span)[..., :seen]
        sink = None if self.sink is None else _among(self.sink, span)
        query, key = self.query[:, :, span], self.key[:, :, :seen]
        return dataclasses.replace(self, query=query, key=key, mask=mask, sink=sink)

    def by_heads(self) -> Iterator[tuple[slice, _Rows]]:
        """The KV heads, as many at a time as there are threads: products of few large matrices are faster."""
        heads = self.key.shape[1]
        step = max(1, torch.get_num_threads() // len(self.key))
        for start in range(0, heads, step):
            some = slice(start, min(start + step, heads))
            query, mask, sink = (_of_heads(x, some, heads) for x in (self.query, self.mask, self.sink))
            assert query is not None
            yield some, dataclasses.replace(self, query=query, key=self.key[:, some], mask=mask, sink=sink)

    def picked(self, place: Tensor) -> _Rows:
        """The queries at places [B, w], with their causal mask spelled out."""
        rows, count, keys = len(place), self.query.shape[2], self.key.shape[2]
        mask, sink = _at(self.mask, place), _at(self.sink, place)
        if self.causal:
            visible = torch.arange(keys, device=place.device) <= (place + keys - count)[:, None, :, None]
            hidden = LOWEST if mask is not None and mask.dtype != torch.bool else False
            mask = visible if mask is None else torch.where(visible, mask, hidden)
        query = self.query.gather(
            2, place[:, None, :, None].expand(rows, *self.query.shape[1:2], -1, self.query.shape[3])
        )
        return dataclasses.replace(self, query=query, mask=mask, sink=sink, causal=False)

    def logits(self, room: _Room) -> Tensor:
        """Masked logits, [B, Hkv, G, n, S] as `wide` has them."""
        rows, heads, keys, dim = self.key.shape
        groups, count = self.query.shape[1] // heads, self.query.shape[2]
        grouped = self.query.reshape(rows * heads, groups * count, dim)
        out, turned = room.shaped(rows * heads, groups * count, keys), self.key.flatten(0, 1).transpose(1, 2)
        # baddbmm for its factor on the product: no pass over the logits of its own
        with torch.autocast(out.device.type, enabled=False):  # it would have another dtype than `out`
            torch.baddbmm(out[:, :1, :1], grouped, turned, beta=0, alpha=self.scale, out=out)
        logits = wide(out).view(rows, heads, groups, count, keys)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        if self.mask is None:
            return logits
        part = _grouped(self.mask, heads)
        return logits.masked_fill_(~part, LOWEST) if part.dtype == torch.bool else logits.add_(part)

    def paid(self, logits: Tensor, room: _Room | None = None) -> Tensor:
        """The probabilities of such logits; none for a query whose mask hides every key."""
        if self.sink is not None:
            return softmax_beside(logits, _grouped(self.sink, self.key.shape[1]))
        made = torch.softmax(logits, -1, out=None if room is None else room.shaped(*logits.shape))
        blind = self._blind()
        if blind is None or (blind.device.type == "cpu" and not blind.any()):  # elsewhere the host does not wait
            return made
        return made.masked_fill_(_grouped(blind, self.key.shape[1]), 0)

    def _blind(self) -> Tensor | None:
        """Whose mask hides every key, [B or 1, Hq, Hkv or 1, q or 1, 1]; such is padding."""
        if self.mask is None:
            return None
        if self.mask.dtype == torch.bool:
            return ~self.mask.any(-1, keepdim=True)
        return self.mask.amax(-1, keepdim=True) == -math.inf

    @property
    def by_kernel(self) -> bool:
        """Whether the sums are those of a kernel, which are in float32."""
        return self.query.device.type == "cuda" and self.query.dtype != torch.float64

    def summed(self, weight: Tensor, powers: int) -> list[Tensor]:
        """Probabilities to the power of 1, ..., `powers`, each summed over queries that count `weight` [B, q]."""
        if not self.by_kernel or not powers:
            return _sums(self, weight, powers)
        from kvpass.lowering.column_kernel import column_sums  # needs triton, which not every machine has

        return column_sums(
            self.query, self.key, self.mask, weight, self.causal, self.scale, self.cap, self.sink, powers
        )


def _among(x: Tensor, span: slice) -> Tensor:
    """Some of the queries of [., ., q or 1, N]."""
    return x if x.shape[2] == 1 else x[:, :, span]


def _of_heads(x: Tensor | None, some: slice, heads: int) -> Tensor | None:
    """Of [., Hq, Hkv or 1, ...] what belongs to some of the KV heads, `heads` in all."""
    if x is None or x.shape[1] == 1:
        return x
    each = x.shape[1] // heads
    return x[:, some.start * each : some.stop * each]


def _at(x: Tensor | None, place: Tensor) -> Tensor | None:
    """Places [B, w] of the queries of [B or 1, H, q or 1, N]."""
    if x is None or x.shape[2] == 1:
        return x
    x = x.expand(len(place), -1, -1, -1)
    return x.gather(2, place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[B or 1, Hq, Hkv or 1, ...] as [B or 1, Hkv or 1, G or 1, ...]."""
    return torch.unflatten(x, 1, (heads, -1)) if x.shape[1] > 1 else x[:, :, None]


def _pieces(spans: list[slice], rows: _Rows) -> Iterator[tuple[_Rows, Tensor]]:
    """Consecutive queries and their logits, [B, Hkv, G, n, s]; of causal ones for the s keys they see."""
    room = rows.room(spans, rows.query.dtype)
    for span in spans:
        piece = rows.chosen(span)
        logits = piece.logits(room)
        if rows.causal:
            new, seen = span.stop - span.start, piece.key.shape[2]
            ahead = torch.ones(new, new, dtype=torch.bool, device=logits.device).triu(1)
            logits[..., seen - new :].masked_fill_(ahead, LOWEST)
        yield piece, logits


def _sums(rows: _Rows, real: Tensor, powers: int) -> list[Tensor]:
    """Probabilities to the power of 1, ..., `powers`, each summed over the real queries: [B, Hkv, G, S]."""
    sums = _zeros(rows, powers)
    for heads, part in rows.by_heads() if powers else ():
        for span, paid in _paid(part):
            _add([total[:, heads] for total in sums], paid, real[:, span])
    return sums


def _zeros(rows: _Rows, powers: int) -> list[Tensor]:
    query, key = rows.query, rows.key
    return [query.new_zeros(_shape(query, key, key.shape[2]), dtype=torch.float32) for _ in range(powers)]


def _paid(rows: _Rows) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive queries and their probabilities, [B, Hkv, G, n, s], which may be written to."""
    spans = rows.spans()
    room = rows.room(spans, widest(rows.query.dtype))
    for span, (piece, logits) in zip(spans, _pieces(spans, rows), strict=True):
        yield span, piece.paid(logits, room)


def _add(sums: list[Tensor], paid: Tensor, real: Tensor) -> None:
    """Add probabilities of queries that count `real` [B, n], to the power of 1, 2, ..., each to its sum."""
    weight = real[:, None, None, None].to(paid.dtype).expand(*paid.shape[:3], 1, -1)
    for power, total in enumerate(sums, 1):
        paid = paid if power == 1 else paid.square_()
        total[..., : paid.shape[-1]] += torch.matmul(weight, paid)[..., 0, :]


def _late(rows: _Rows, real: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the last `window` real queries: the last row, the mean of the rows, and the last logits, [B, Hkv, G, S]."""
    query, key = rows.query, rows.key
    count = query.shape[2]
    latest = torch.where(real, torch.arange(count, device=key.device), -1).topk(min(window, count))  # last one first
    chosen = rows.picked(latest.values.clamp(min=0))
    if rows.by_kernel:
        return _late_by_kernel(chosen, (latest.values >= 0).float(), real.sum(-1, keepdim=True).clamp(1, window))
    counted = (latest.values >= 0).float()[:, None, None, :, None]
    mean = query.new_zeros(_shape(query, key, key.shape[2]), dtype=torch.float32)
    last, logits = mean, mean
    spans = chosen.spans()
    for span, (piece, made) in zip(spans, _pieces(spans, chosen), strict=True):
        paid = piece.paid(made) * counted[..., span, :]
        if span.start == 0:
            last = paid[..., 0, :].float().clone()
            logits = (made[..., 0, :] * counted[..., 0, :]).float()
        mean += paid.sum(-2)
    return last, mean.div_(real.sum(-1).clamp(1, window)[:, None, None, None]), logits


def _late_by_kernel(chosen: _Rows, counted: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `_late` returns, from its queries, of which `counted` [B, w] are real; their number is `count` [B, 1]."""
    newest = chosen.chosen(slice(0, 1))
    logits = newest.logits(newest.room([slice(0, 1)], newest.query.dtype))
    first = counted[:, None, None, :1, None]
    last = (newest.paid(logits) * first)[..., 0, :]
    mean = last if counted.shape[1] == 1 else chosen.summed(counted / count, 1)[0]
    return last, mean, (logits * first)[..., 0, :]


def _alike(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes, which differ under autocast."""
    dtype = torch.promote_types(query.dtype, key.dtype)
    return query.to(dtype), key.to(dtype)


def _scores(rows: _Rows, sums: list[Tensor], real: Tensor, window: int, heads: int | None) -> list[Tensor]:
    """What `column_scores` returns, from the sums over all queries."""
    left_out = rows.query.new_empty(_shape(rows.query, rows.key, 0), dtype=torch.float32)
    nothing = [left_out.clone() for _ in range(2 - len(sums))]
    return [regrouped(x, heads) for x in (*sums, *nothing, *_late(rows, real, window))]


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
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
) -> list[Tensor]:
    """Column statistics of the attention matrix softmax(scale * query key^T + mask).

    Args:
        query: [B, Hq, q, D]; key: [B, Hkv, S, D]; the queries are the last q of the S tokens.
        mask: bool or additive [B or 1, Hq, Hkv or 1, q, S], or None; with Hkv on a CPU alone.
        real: bool [B, q], false for queries that are padding; they are left out of every figure.
        causal: a query does not see the keys after it.
        window: how many of the last real queries `window` averages over.
        cap, sink: see `kvpass.capture.canonical.attention`; the sink is [B or 1, Hq, q or 1, 1].
        powers: 2 for all; 1 leaves out squares, 0 total as well.  They alone need the rows of all queries.
        heads: Hc, the heads of the cache, if they are not those of the keys.

    Returns:
        total, squares, last, window and logits as in `kvpass.policies.Attention`, each float32 [B, Hc, Hq / Hc, S];
        what is left out has no keys.
    """
    query, key = _alike(query, key)
    rows = _Rows(query, key, mask, causal, scale, cap, sink)
    return _scores(rows, rows.summed(real, powers), real, window, heads)


def _mixing(rows: _Rows, value: Tensor, output: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """`_paid`, and on the way the values that are paid, written to `output` [B, Hkv, G, q, Dv]."""
    for span, paid in _paid(rows):
        seen = value[:, :, : paid.shape[-1]]
        mixed = torch.matmul(paid.flatten(2, 3).to(value.dtype), seen)  # [B, Hkv, G * n, Dv]
        output[:, :, :, span] = mixed.view(*paid.shape[:4], -1)
        yield span, paid


def _output(query: Tensor, value: Tensor) -> Tensor:
    """Room for the output, [B, Hq, q, Dv], with tokens outside of heads as the library's attention has them."""
    rows, heads, count, _ = query.shape
    return query.new_empty(rows, count, heads, value.shape[3]).transpose(1, 2)


@torch.library.custom_op("kvpass::scored_attention", mutates_args=())
def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    window: int,
    powers: int,
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
) -> list[Tensor]:
    """Attention and its column statistics from the same products, on a CPU.

    Args:
        value: [B, Hkv, S, Dv], of the dtype that query and key have.
        powers: 1 or 2.
        The others are as for `column_scores`.

    Returns:
        [B, Hq, q, Dv], and what `column_scores` returns.
    """
    rows, output = _Rows(query, key, mask, causal, scale, cap, sink), _output(query, value)
    sums, grouped = _zeros(rows, powers), torch.unflatten(output, 1, (key.shape[1], -1))
    for among, part in rows.by_heads():
        for span, paid in _mixing(part, value[:, among], grouped[:, among]):
            _add([total[:, among] for total in sums], paid, real[:, span])
    return [output, *_scores(rows, sums, real, window, heads)]


@scored_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    window: int,
    powers: int,
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
) -> list[Tensor]:
    return [_output(query, value), *_empty_scores(query, key, powers, heads)]


def _empty_scores(query: Tensor, key: Tensor, powers: int, heads: int | None) -> list[Tensor]:
    """Tensors like those that `column_scores` returns."""
    widths = [key.shape[2] if powers >= power else 0 for power in (1, 2)] + [key.shape[2]] * 3
    made = [query.new_empty(_shape(query, key, width), dtype=torch.float32) for width in widths]
    return [regrouped(x, heads) for x in made]


def regrouped(x: Tensor, heads: int | None) -> Tensor:
    """[B, Hkv, G, ...] as [B, heads, Hkv * G / heads, ...]."""
    return x if heads in (None, x.shape[1]) else torch.unflatten(x.flatten(1, 2), 1, (heads, -1))


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
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
) -> list[Tensor]:
    return _empty_scores(query, key, powers, heads)


def _padded(rows: Tensor, keys: int, room: _Room) -> Tensor:
    """Rows [..., s] with zeros for the keys that they do not see, [..., keys]."""
    seen = rows.shape[-1]
    if seen == keys:
        return rows
    wider = room.shaped(*rows.shape[:-1], keys)
    wider[..., :seen] = rows
    wider[..., seen:] = 0
    return wider


@torch.library.custom_op("kvpass::row_scan", mutates_args=())
def row_scan(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    policy: str,
    budget: int,
    share: float,
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
    spread: str | None = None,
) -> Tensor:
    """What a policy makes of the rows, float32 [B, H', S], when it must see one query after the other.

    Args:
        policy: its specification, see `kvpass.policies.specify`.
        budget, share: a number of slots, or 0 and a share of the prompt.
        spread: where the other heads of the layer are, see `kvpass.policies.heads`, as text.
        The others are as for `column_scores`.
    """
    query, key = _alike(query, key)
    rows = _Rows(query, key, mask, causal, scale, cap, sink)
    return _scanned(rows, _paid(rows), real, policy, budget or share, heads, spread)


@torch.library.custom_op("kvpass::scanned_attention", mutates_args=())
def scanned_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    policy: str,
    budget: int,
    share: float,
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
    spread: str | None = None,
) -> list[Tensor]:
    """Attention and what `row_scan` returns from the same products, on a CPU; value as for `scored_attention`."""
    rows, output = _Rows(query, key, mask, causal, scale, cap, sink), _output(query, value)
    paid = _mixing(rows, value, torch.unflatten(output, 1, (key.shape[1], -1)))
    return [output, _scanned(rows, paid, real, policy, budget or share, heads, spread)]


def _scanned(
    rows: _Rows,
    paid: Iterator[tuple[slice, Tensor]],
    real: Tensor,
    policy: str,
    budget: Budget,
    heads: int | None,
    spread: str | None,
) -> Tensor:
    """What `row_scan` returns, from all that the rows paid."""
    query, key = rows.query, rows.key
    chosen, count, keys = policies.specified(policy), query.shape[2], key.shape[2]
    wider = rows.room(rows.spans(), widest(query.dtype))
    whole = (regrouped(_padded(piece, keys, wider), heads).float() for _, piece in paid)
    made = chosen.scan(whole, real, keys - count, slots_for(chosen, budget, count), Spread.read(spread))
    return made.clone(memory_format=torch.contiguous_format)


@row_scan.register_fake
def _(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    policy: str,
    budget: int,
    share: float,
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
    spread: str | None = None,
) -> Tensor:
    return _empty_scan(query, key, policy, heads)


@scanned_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    real: Tensor,
    causal: bool,
    scale: float,
    policy: str,
    budget: int,
    share: float,
    cap: float | None = None,
    sink: Tensor | None = None,
    heads: int | None = None,
    spread: str | None = None,
) -> list[Tensor]:
    return [_output(query, value), _empty_scan(query, key, policy, heads)]


def _empty_scan(query: Tensor, key: Tensor, policy: str, heads: int | None) -> Tensor:
    """A tensor like the one that `row_scan` returns."""
    groups = 1 if policies.specified(policy).heads == "shared" else key.shape[1] if heads is None else heads
    return query.new_empty((key.shape[0], groups, key.shape[2]), dtype=torch.float32)
