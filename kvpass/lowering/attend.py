"""Attention of a few queries over slots, with the probabilities that policies live on.

On a CPU it is two grouped matrix products and a softmax as `upcast` has it: the query heads of a KV head are rows of
one product, so K and V are read once and never repeated.  On a GPU it is the kernels of `attend_kernel`,
which the compiler schedules like its own, and torch's operations around them.

With a rotary embedding applied at read, on a GPU the kernels rotate the keys that they load, where the embedding mixes
pairs as `rope` knows them.  Else the first product is spelled out as multiply and sum: the compiler then fuses the
rotation into the reduction and no rotated copy of the keys is ever written.  The rotated keys come in sections of D for
the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.fx.precision import ABSORBING, HIDDEN, upcast
from kvpass.lowering.formats import Rows, Sections, grid
from kvpass.lowering.rope import Rope
from kvpass.torch_private.inductor import materialized

Rotation = Callable[[Sections], list[Tensor]]
"""Rotates keys [B, Hkv, N, D], each by the position of its slot; gives sections [B, Hkv, N, d] of D."""

LOWEST = torch.finfo(torch.float32).min
WIDEST_ROTATED = 512  # bytes of a key that the kernels can rotate; wider ones would spill
MOST_ROWS = 64  # query heads of a KV head times queries in one program; the accumulators of more would spill


def attend(
    query: Tensor,
    key: Rows,
    value: Rows,
    *,
    scale: float,
    mask: Tensor,
    bias: Tensor | None = None,
    rotate: Rotation | None = None,
    cap: float | None = None,
    sink_logit: Tensor | None = None,
    with_logits: bool = True,
    rope: Rope | None = None,
    blank: UnknownQueries | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend to the slots that `mask` allows.

    Args:
        query: [B, Hkv, G, q, D].
        key, value: rows [B, Hkv, C, D] and [B, Hkv, C, Dv].
        scale: multiplies the logits.
        mask: bool, broadcastable to [B, Hkv, G, q, C].
        bias: added to the logits, broadcastable likewise.
        rotate: applied to the keys at read, pointwise in the slots.
        cap: bounds the logits before bias and mask, as cap * tanh(logits / cap).
        sink_logit: further logits [B or 1, Hkv, G, q or 1, 1] in the softmax, to which no value belongs.
        with_logits: whether probabilities and logits are wanted.
        rope: the same as `rotate`, for the kernels.
        blank: for which queries the answer is unknown.

    Returns:
        output [B, Hkv, G, q, Dv] in the dtype of `query`, and if wanted the probabilities and the masked
        logits, [B, Hkv, G, q, C] as `upcast` has them.  A query that may attend to nothing gets zeros.
    """
    if key.format.transforms or query.shape[-1] * query.element_size() > WIDEST_ROTATED:
        rope = None
    if by_kernel(query) and (rotate is None or rope is not None):
        from kvpass.lowering.attend_kernel import attended  # needs triton, which not every machine has

        asked = key.format.prepared_query(query).to(query.dtype)
        return attended(
            asked,
            key,
            value,
            scale=scale,
            mask=mask,
            bias=bias,
            cap=cap,
            sink_logit=sink_logit,
            with_logits=with_logits,
            rope=rope,
            blank=blank,
        )
    logits = capped(scores(query, key, scale=scale, rotate=rotate), cap)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    logits = torch.where(mask, logits, -torch.inf)
    probabilities = softmax_beside(logits, sink_logit)
    output = value.format.weighted_sum(probabilities.flatten(2, 3), value.parts, query.dtype)  # [B, Hkv, G*q, Dv]
    output = output.view(*query.shape[:4], -1)
    if blank is not None:  # of the output alone: a policy would sum up NaN in its scores, and keep it
        output = torch.where(blank.of(logits.amax(-1, keepdim=True)), torch.nan, output)
    return output, probabilities if with_logits else None, logits if with_logits else None


def by_kernel(query: Tensor) -> bool:
    """Whether `attend` of a query [B, Hkv, G, q, D] is of few rows and on a GPU; kernels sum in float32."""
    return query.device.type == "cuda" and query.dtype != torch.float64 and query.shape[2] * query.shape[3] <= MOST_ROWS


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap)."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


class UnknownQueries(NamedTuple):
    """Queries whose answer is unknown, which NaN says; both bool, broadcastable to [B, Hkv, G, q, 1].

    Attributes:
        empty: those that get it if no key has a finite logit, as in a softmax that is spelled out.
        padded: those that get it if every key is hidden by a finite logit: the model then attends to padding as well,
            which is not held.
        rounded: those that get it if every key is hidden by a number that absorbs logits in the model's half precision
            and not here; None for no query.
    """

    empty: Tensor
    padded: Tensor
    rounded: Tensor | None = None

    def of(self, most: Tensor) -> Tensor:
        """Which queries of these highest logits are such."""
        unknown = self.padded & (most <= HIDDEN)
        if self.rounded is not None:
            unknown = unknown | (self.rounded & (most <= HIDDEN) & (most > ABSORBING))
        return torch.where(most == -torch.inf, self.empty, unknown)


def softmax_beside(logits: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension and the sink [..., 1], without the sink's share.

    The result is zero for a query without a finite logit.
    """
    most = logits.amax(-1, keepdim=True).clamp_min(LOWEST)
    if sink_logit is not None:
        sink_logit = sink_logit.to(logits.dtype)
        most = torch.maximum(most, sink_logit)
    probs = torch.exp(logits - most)
    total = probs.sum(-1, keepdim=True)
    return probs / (total.clamp_min(1) if sink_logit is None else total + torch.exp(sink_logit - most))


def scores(query: Tensor, key: Rows, *, scale: float, rotate: Rotation | None = None) -> Tensor:
    """The logits before mask and bias, [B, Hkv, G, q, C] as `upcast` has them; the products in the model's dtype."""
    shape = query.shape[:4]
    if rotate is None:
        products = key.format.products(query.flatten(2, 3), key.parts)
        return upcast(products.view(*shape, key.shape[2])) * scale
    sections = rotate(key.in_sections(query.dtype))
    query = materialized(upcast(query.flatten(2, 3)))  # else each key would convert the queries anew
    rows = query.shape[2]
    if isinstance(rows, int) and rows <= grid.MOST_ROWS:  # a key is rotated once for all of them
        made = grid.row_by_row(query, sections)
    else:
        made = grid.over_sections(query[:, :, :, None], [section[:, :, None] for section in sections])
    return made.view(*shape, key.shape[2]) * scale
