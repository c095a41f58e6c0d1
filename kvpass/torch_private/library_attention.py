"""Attention of torch's own CPU kernel, with the log-sum-exp that it computes on the way."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Call the kernel that `scaled_dot_product_attention` calls on a CPU, on the same arguments.

    Args:
        query: [B, Hq, q, D]; key, value: [B, Hkv, S, D]; all in one dtype.
        mask: bool or additive, [B or 1, Hq, Hkv or 1, q or 1, S], or None.
        causal: query i sees the keys 0 .. i.

    Returns:
        The output [B, Hq, q, D], and the log-sum-exp of the logits, [B, Hq, q] in float32, or float64 for float64.
        For a query that sees no key, the log-sum-exp is not finite.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if mask is not None and 1 < mask.shape[1] < query.shape[1]:
        mask = mask.repeat_interleave(groups, 1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_sum_exp = attend(*rows, 0.0, causal, attn_mask=mask, scale=scale)
    return output, log_sum_exp
