"""Define what one attention layer does with a chunk: attend to the slots and itself, and compute its statistics.

The slots stay unchanged; `kvpass.cache.admission.admit` then admits the chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpass.cache.cached_attention import AttentionOutput, CachedAttention, NewTokens, class_by_class
from kvpass.cache.layout import Layout
from kvpass.cache.slots import Slots
from kvpass.cache.step import add_biases, log_sum_exp, logit_bias, stored_vectors, with_logit_scale, with_mask
from kvpass.lowering.attend import attend, by_kernel
from kvpass.lowering.attention_blocks import by_group
from kvpass.lowering.attention_statistics import StatisticsOperands, fuses_attention, statistics
from kvpass.lowering.formats import Sections, plain


@class_by_class
def chunk_step(layout: Layout, attention: CachedAttention, slots: Slots, new: NewTokens) -> AttentionOutput:
    """Attend with a chunk of queries to [slots, chunk], under the model's own mask.

    Args:
        slots: the slots, which stay unchanged.
        new: the chunk.

    Returns:
        The results of attention, and the statistics of the chunk over the keys of [slots, chunk], without the policy's
        bias.  If the layout crops, the query, keys, mask and sink of a `StatisticsOperands` follow the statistics.
        Slots in classes have these results for each class.
    """
    policy, (query, key, value, valid) = layout.policy, new
    chunk = query.shape[2]
    tokens, rotate = slots.tokens(layout), attention.rotate
    query = with_logit_scale(policy, query, tokens.live.sum(-1)[:, :1] + valid.sum(-1, keepdim=True))
    stored, cached_values = (part.read_as(layout.dtype) for part in stored_vectors(layout, attention, slots, tokens))
    rotated = stored if rotate is None else torch.cat(rotate(Sections((stored,)), slots.rank), -1)
    keys = torch.cat([rotated, key.to(rotated.dtype)], 2)
    values, key_features = torch.cat([cached_values, value.to(cached_values.dtype)], 2), list[Tensor]()
    if attention.compute_keys is not None:
        keys, values, key_features = attention.compute_keys(keys, values)
    mask, bias = _chunk_mask(layout, attention, slots, valid, key_features)
    dtype = query.dtype
    if dtype == torch.float16 and bias is not None and (attention.decomposed or bias.dtype != dtype):
        dtype = torch.float32  # float16 cannot hold the values that mask tokens
    full_mask = _per_head(_combined_mask(mask, bias, dtype), query, keys, layout.heads)
    operands = chunk_operands(layout, attention.scale, attention.cap, query, keys, full_mask, attention.sink_logit)
    policy_bias = logit_bias(policy, tokens, query.shape[1] // layout.heads)
    lse, computed = None, None
    if policy_bias is None and _by_library(attention) and fuses_attention(policy, query, keys, values, full_mask):
        output, *computed = statistics(policy, operands, valid, tokens.budget, values)
    else:
        attention_mask = full_mask
        if policy_bias is not None:
            policy_bias = torch.nn.functional.pad(policy_bias, (0, chunk))[..., None, :]  # [B, ., ., 1, C + q]
            both = add_biases(bias, policy_bias)
            attention_mask = _per_head(_combined_mask(mask, both, dtype), query, keys, layout.heads)
        output, lse = _attend_chunk(attention, query, keys, values, attention_mask)
    output = _with_unknown_outputs(attention, slots, output, (full_mask, bias), valid)
    if computed is None:
        computed = statistics(policy, operands, valid, tokens.budget) if policy.statistics else []
    keeps_operands = layout.crops and bool(policy.statistics)
    inputs = (operands.query, operands.key, operands.mask, operands.sink_logit) if keeps_operands else ()
    return AttentionOutput(output, ((mask, bias),), lse, (*computed, *(x for x in inputs if x is not None)))


def chunk_operands(layout: Layout, scale: float, cap: float | None, *operands: Any) -> StatisticsOperands:
    """Return a chunk's attention to [slots, chunk] from its query, keys, mask and optional sink."""
    named = dict(zip(("query", "key", "mask", "sink_logit"), operands, strict=False))
    return StatisticsOperands(**named, causal=False, scale=scale, cap=cap, heads=layout.heads, sharding=layout.sharding)


def _by_library(attention: CachedAttention) -> bool:
    """Return whether scaled_dot_product_attention computes all that the model reads."""
    return attention.cap is None and attention.sink_logit is None and not attention.lse


def _attend_chunk(
    attention: CachedAttention, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the output under a mask [B, Hq, Ha or 1, q, N], and the log-sum-exp if it is read."""
    heads = keys.shape[1]
    grouped = torch.unflatten(query, 1, (heads, -1))
    if _by_library(attention) and not by_kernel(grouped):
        return _library_attention(attention.scale, grouped, keys, values, mask), None
    heads_mask = by_group(mask, heads)
    allowed, bias = (heads_mask, None) if heads_mask.dtype == torch.bool else (heads_mask != -torch.inf, heads_mask)
    options: dict[str, Any] = dict(scale=attention.scale, cap=attention.cap, sink_logit=attention.sink_logits(heads))
    options |= dict(mask=allowed, bias=bias, with_logits=attention.lse)
    output, _, logits = attend(grouped, plain(keys), plain(values), **options)
    return output.flatten(1, 2), log_sum_exp(attention, logits)


def _library_attention(scale: float, grouped: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend with queries [B, Ha, G, q, D] by scaled_dot_product_attention; returns [B, Hq, q, Dv].

    A mask per KV head is not repeated for its query heads; each KV head becomes a row of the batch instead.
    """
    function, query = torch.nn.functional.scaled_dot_product_attention, grouped.flatten(1, 2)
    options: dict[str, Any] = dict(scale=scale, enable_gqa=True)
    mask = mask.to(query.dtype) if mask.dtype == torch.bfloat16 else mask
    if mask.shape[1] in (1, query.shape[1]):
        return function(query, keys, values, attn_mask=mask, **options)
    keys, values, mask = (x.flatten(0, 1)[:, None] for x in (keys, values, mask.expand(keys.shape[0], -1, -1, -1)))
    return function(grouped.flatten(0, 1), keys, values, attn_mask=mask, **options).reshape(*query.shape[:3], -1)


def _chunk_mask(
    layout: Layout, attention: CachedAttention, slots: Slots, valid: Tensor, key_features: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return mask [B, H', 1 or G, q, C + q] and bias of a chunk on [slots, chunk]."""
    count = valid.shape[1]
    new = valid[:, None, None, None].expand(-1, layout.metadata_heads, -1, -1, -1)  # [B, H', 1, 1, q]
    new_index = slots.length[:, None] + torch.arange(count, device=valid.device)
    index = torch.cat([slots.index, new_index[:, None].expand(-1, layout.metadata_heads, -1)], -1)
    mask = torch.cat([(slots.position >= 0)[:, :, None, None], new], -1)  # the same for all queries
    new_position = slots.seen[:, None] + valid.cumsum(-1) - 1
    position = torch.cat([slots.position, new_position[:, None].expand(-1, layout.metadata_heads, -1)], -1)
    own_mask = attention.mask(index, position, key_features) if attention.mask else None
    mask, bias = with_mask(mask, own_mask, attention.hidden_logit)
    return mask.expand(-1, -1, -1, count, -1), bias


def _combined_mask(mask: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Combine a mask and a bias to one mask.

    On a CPU it is additive: there Inductor writes a vector of bool one entry at a time, and torch's attention copies it
    to numbers.
    """
    if bias is not None:
        return torch.where(mask, bias.to(dtype), -torch.inf)
    return torch.where(mask, 0.0, -torch.inf).to(torch.bfloat16) if mask.device.type == "cpu" else mask


def _with_unknown_outputs(
    attention: CachedAttention, slots: Slots, output: Tensor, masks: tuple[Tensor, Tensor | None], valid: Tensor
) -> Tensor:
    """Return a chunk's output [B, Hq, q, Dv] with NaN for the queries whose output is unknown.

    Args:
        masks: the mask with all biases, and the model's own bias.
    """
    mask, bias = masks
    unknown_queries = attention.unknown_queries(slots, valid, None if bias is None else bias.dtype)
    if unknown_queries is None:
        return output
    highest = torch.where(mask.any(-1), 0.0, -torch.inf) if mask.dtype == torch.bool else mask.amax(-1)
    unknown = unknown_queries.mask(highest[:, :, None, :, None]).flatten(1, 2)  # [B, 1, Ha or Hq, q, 1]
    return torch.where(unknown.repeat_interleave(output.shape[1] // unknown.shape[1], 1), torch.nan, output)


def _per_head(mask: Tensor, query: Tensor, keys: Tensor, heads: int) -> Tensor:
    """Expand a mask [B, H', 1 or G, q, N] to the query heads.

    The result is [B, Hq, Ha or 1, q, N], or for GPU kernels [B, Hq or 1, q, N].
    """
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask[:, 0]
    if mask.shape[2] == 1 and keys.shape[1] == heads and query.device.type == "cpu":
        return mask.expand(-1, heads, -1, -1, -1)[:, :, 0]
    return mask.expand(-1, heads, query.shape[1] // heads, -1, -1).flatten(1, 2)
