"""Attend from a few queries to slots, and return the probabilities that policies need.

On a CPU this is two grouped matrix products and a softmax in the dtype of `upcast`.  The query heads of a KV head are
rows of one product, so K and V are read once and never repeated.  On a GPU the kernels of `attend_kernel` run, which
the compiler schedules like its own, with torch's operations around them.

A rotary embedding may be applied at read.  On a GPU the kernels then rotate the keys that they load, if the embedding
mixes `RotaryPairs`.  Otherwise the first product is written as multiply and sum: the compiler fuses the rotation into
the reduction and never writes a rotated copy of the keys.  The rotated keys come in sections of D for the same reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.fx.precision import ABSORBING, HIDDEN, upcast
from kvpass.lowering.formats import EncodedVectors, Sections, code_products
from kvpass.torch_private.inductor import materialize


@dataclasses.dataclass(frozen=True)
class RotaryPairs:
    """The pairs of numbers in a key [D] that an embedding mixes, among the first `width` numbers.

    kvpass has no formula of a rotary embedding; it cuts out the model's own code.  All embeddings are linear in the key
    and mix numbers in pairs (Su et al., 2021, https://arxiv.org/abs/2104.09864, section 3.2.2).  Rotating unit vectors
    once reveals the pairs.  Rotating two keys of ones and zeros, one per side of the pairs, reveals the weights.

    Attributes:
        width: the number of mixed numbers.
        interleaved: pairs are 0 and 1, 2 and 3, and so on; otherwise partners are half a width apart.
    """

    width: int
    interleaved: bool

    def partner(self, index: Tensor) -> Tensor:
        """Return the partner indices of the numbers at indices [D]; their own for numbers that are not mixed."""
        half = max(1, self.width // 2)
        other = index ^ 1 if self.interleaved else torch.where(index < half, index + half, index - half)
        return torch.where(index < self.width, other, index)

    def leads(self, index: Tensor) -> Tensor:
        """Return bool [D], true for the first number of each pair and for numbers that are not mixed."""
        return index <= self.partner(index)


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding at read: each number of a key times `cos`, plus its partner times `sin`.

    Attributes:
        cos, sin: [N, D] for positions 0 .. N - 1, in the dtype of the keys, with signs and factors such as YaRN's.
        pairs: the partner of each number.
        rank: int64 [B, Hkv or 1, C], the rank of each slot's token; arbitrary for free slots.
    """

    cos: Tensor
    sin: Tensor
    pairs: RotaryPairs
    rank: Tensor | None = None


def rotary_pairs(matrix: Tensor) -> RotaryPairs | None:
    """Return the pairs that an embedding matrix [D, D] (from, to) mixes, or None if kernels do not support them."""
    index = torch.arange(len(matrix), device=matrix.device)
    mixed = ((matrix != 0) & (index != index[:, None])).any(0)
    if not mixed.any():
        return None
    width = int((index * mixed).max()) + 1
    if width % 2:
        return None
    for pairs in (RotaryPairs(width, False), RotaryPairs(width, True)):
        allowed = (index[:, None] == index) | (index[:, None] == pairs.partner(index))
        if not (matrix != 0)[~allowed].any():
            return pairs
    return None


def weights_of(rotate: Callable[[Tensor], Tensor], pairs: RotaryPairs, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return `cos` and `sin` of a `Rope`, each [N, D].

    Args:
        rotate: rotates one key [D] by every position, [N, D].
        like: a tensor with D numbers, in the dtype and on the device of the keys.
    """
    index = torch.arange(like.shape[-1], device=like.device)
    leads = pairs.leads(index)
    first, second = rotate(leads.to(like.dtype)), rotate((~leads).to(like.dtype))
    return torch.where(leads, first, second), torch.where(leads, second, first)


RotateKeys = Callable[[Sections], list[Tensor]]
"""A function that rotates keys [B, Hkv, N, D] by their slots' positions.

It returns sections [B, Hkv, N, d] of D.
"""

LOWEST = torch.finfo(torch.float32).min
WIDEST_ROTATED = 512  # bytes of a key that the kernels can rotate; wider keys would spill registers
MAX_ROWS = 64  # query heads of a KV head times queries in one program; more accumulators would spill


def attend(
    query: Tensor,
    key: EncodedVectors,
    value: EncodedVectors,
    *,
    scale: float,
    mask: Tensor,
    bias: Tensor | None = None,
    rotate: RotateKeys | None = None,
    cap: float | None = None,
    sink_logit: Tensor | None = None,
    with_logits: bool = True,
    rope: Rope | None = None,
    unknown_queries: UnknownQueries | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute attention of queries to the slots that `mask` allows.

    Args:
        query: [B, Hkv, G, q, D].
        key, value: vectors [B, Hkv, C, D] and [B, Hkv, C, Dv].
        scale: multiplies the logits.
        mask: bool, broadcastable to [B, Hkv, G, q, C].
        bias: added to the logits; broadcastable to the same shape.
        rotate: applied to the keys at read, pointwise in the slots.
        cap: bounds the logits before bias and mask, as cap * tanh(logits / cap).
        sink_logit: more logits [B or 1, Hkv, G, q or 1, 1] in the softmax, without values.
        with_logits: whether to return probabilities and logits too.
        rope: the same embedding as `rotate`, for the kernels.
        unknown_queries: the queries whose output is unknown.

    Returns:
        output [B, Hkv, G, q, Dv] in the dtype of `query`, and with `with_logits` the probabilities and the masked
        logits, [B, Hkv, G, q, C] in the dtype of `upcast`, else None.  A query that may attend to no slot gets zeros.
    """
    if key.format.transforms or query.shape[-1] * query.element_size() > WIDEST_ROTATED:
        rope = None
    if by_kernel(query) and (rotate is None or rope is not None):
        from kvpass.lowering.attend_kernel import attend_by_kernel  # needs triton, which some machines lack

        query = key.format.transform_query(query).to(query.dtype)
        options: dict[str, Any] = dict(
            cap=cap, sink_logit=sink_logit, with_logits=with_logits, rope=rope, unknown_queries=unknown_queries
        )
        return attend_by_kernel(query, key, value, scale=scale, mask=mask, bias=bias, **options)
    logits = capped(query_key_logits(query, key, scale=scale, rotate=rotate), cap)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    logits = torch.where(mask, logits, -torch.inf)
    probabilities = softmax_with_sink(logits, sink_logit)
    output = value.format.weighted_sum(probabilities.flatten(2, 3), value.parts, query.dtype)  # [B, Hkv, G*q, Dv]
    output = output.view(*query.shape[:4], -1)
    if unknown_queries is not None:  # only in the output: a policy would add NaN to its scores
        output = torch.where(unknown_queries.mask(logits.amax(-1, keepdim=True)), torch.nan, output)
    return output, probabilities if with_logits else None, logits if with_logits else None


def by_kernel(query: Tensor) -> bool:
    """Return whether `attend` uses the kernels for a query [B, Hkv, G, q, D].

    The query must have few rows and be on a GPU.  The kernels sum in float32, so float64 is excluded.
    """
    return query.device.type == "cuda" and query.dtype != torch.float64 and query.shape[2] * query.shape[3] <= MAX_ROWS


def broadcast_strides(x: Tensor) -> list[int]:
    """Return the strides of a tensor for kernels, with zero along dimensions of size one."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap), or the logits without a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


class UnknownQueries(NamedTuple):
    """Queries whose output is unknown and becomes NaN; bool, broadcastable to [B, Hkv, G, q, 1].

    Attributes:
        empty: queries that are unknown if no key has a finite logit, as in a softmax that the model computes itself.
        padded: queries that are unknown if finite logits mask every key: the model then also attends to padding, which
            is not cached.
        rounded: queries that are unknown if every key is masked by a number that absorbs logits in the model's half
            precision but not in the dtype of `upcast`; None for no query.
    """

    empty: Tensor
    padded: Tensor
    rounded: Tensor | None = None

    def mask(self, most: Tensor) -> Tensor:
        """Return which queries are unknown, by their highest logits."""
        unknown = self.padded & (most <= HIDDEN)
        if self.rounded is not None:
            unknown = unknown | (self.rounded & (most <= HIDDEN) & (most > ABSORBING))
        return torch.where(most == -torch.inf, self.empty, unknown)


def softmax_with_sink(logits: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension and the sink [..., 1], without the sink's share.

    The result is zero for a query without a finite logit.
    """
    most = logits.amax(-1, keepdim=True).clamp_min(LOWEST)
    if sink_logit is not None:
        sink_logit = sink_logit.to(logits.dtype)
        most = torch.maximum(most, sink_logit)
    probs = torch.exp(logits - most)
    total = probs.sum(-1, keepdim=True)
    # The highest logit adds 1 to the sum, so a query with a smaller sum sees no key: its probabilities stay zero.
    return probs / (total.clamp_min(1) if sink_logit is None else total + torch.exp(sink_logit - most))


def query_key_logits(query: Tensor, key: EncodedVectors, *, scale: float, rotate: RotateKeys | None = None) -> Tensor:
    """Return the logits before mask and bias, [B, Hkv, G, q, C] in the dtype of `upcast`.

    The products are in the model's dtype.
    """
    shape = query.shape[:4]
    if rotate is None:
        # Products may exceed float16 where logits do not. A power of two changes no digit.
        first = 2.0 ** math.floor(math.log2(scale)) if query.dtype == torch.float16 and 0 < scale < 1 else 1.0
        products = key.format.products((query if first == 1 else query * first).flatten(2, 3), key.parts)
        return upcast(products.view(*shape, key.shape[2])) * (scale / first)
    sections = rotate(key.in_sections(query.dtype))
    query = materialize(upcast(query.flatten(2, 3)))  # otherwise the queries would be converted again for each key
    rows = query.shape[2]
    if isinstance(rows, int) and rows <= code_products.MAX_ROWS_IN_LOOP:  # a key is rotated once for all rows
        products = code_products.row_by_row(query, sections)
    else:
        products = code_products.multiply_sections(query[:, :, :, None], [section[:, :, None] for section in sections])
    return products.view(*shape, key.shape[2]) * scale
