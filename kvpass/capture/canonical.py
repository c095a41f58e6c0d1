"""The canonical form: two operators, and what they mean.

A model's graph says in its own words that a cache grows and that queries attend to it.  Capture says it in these:

    grown = kvpass::append(past, new)
    output = kvpass::attention(query, key, value, mask, sink_logit, scale, cap, causal, hidden, dtypes)

They are ordinary operators that run on any tensors and that compilers take apart like others, so that a canonical
graph is a program: it gives what the model's own graph gives.  What is computed beside them, as masks, stays as the
model has it.

With g = Hq / H, query head i attends to key head i // g.  The scores are scale * query key^T, capped to
cap * tanh(scores / cap) if there is a cap, and masked after that; the softmax also runs over the sink, to which no
value belongs.
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import Tensor

torch.library.define("kvpass::append", "(Tensor? past, Tensor new) -> Tensor")
torch.library.define(
    "kvpass::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sink_logit, float scale, float? cap=None, "
    "bool causal=False, float? hidden=None, ScalarType? scores=None, ScalarType? weights=None, "
    "ScalarType? output=None) -> Tensor",
)
torch.library.define(
    "kvpass::log_sum_exp",
    "(Tensor query, Tensor key, Tensor? mask, float scale, float? cap, float? hidden, ScalarType scores, "
    "ScalarType weights) -> Tensor",
)


@torch.library.impl("kvpass::append", "CompositeImplicitAutograd")
def append(past: Tensor | None, new: Tensor) -> Tensor:
    """The past and the new tokens in memory of their own.

    Args:
        past: [B, H, S, D], or None where there is none.
        new: [B, H, q, D].

    Returns:
        [B, H, S + q, D].
    """
    return torch.cat([new] if past is None else [past, new], 2)


@torch.library.impl("kvpass::attention", "CompositeImplicitAutograd")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sink_logit: Tensor | None,
    scale: float,
    cap: float | None = None,
    causal: bool = False,
    hidden: float | None = None,
    scores: torch.dtype | None = None,
    weights: torch.dtype | None = None,
    output: torch.dtype | None = None,
) -> Tensor:
    """Attention of queries to keys.

    Args:
        query: [B, Hq, q, D].
        key, value: [B, H, S, D] and [B, H, S, Dv], where H divides Hq.
        mask: bool or additive, [B or 1, Hq or 1, q or 1, S], or None.
        sink_logit: the logits of what is attended to beside the keys, [B or 1, Hq, q or 1, 1], or None.
        causal: query i sees the keys 0 .. i.
        hidden: the logit of what a bool mask hides; None is as scaled_dot_product_attention has it.
        scores, weights, output: where attention is spelled out, the dtypes of the products of query and key, of the
            logits and the softmax, and of the result; None for what scaled_dot_product_attention makes of the query's.

    Returns:
        [B, Hq, q, Dv].
    """
    key, value = _for_heads(key, query), _for_heads(value, query)
    if scores is None or weights is None or output is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), attn_mask=mask, is_causal=causal, scale=scale
        )
    logits = _logits(query, key, mask, scale, cap, hidden, (scores, weights))  # [B, Hq, q, S]
    if sink_logit is not None:
        logits = torch.cat([logits, sink_logit.expand(*logits.shape[:3], 1).to(logits.dtype)], -1)
    probs = torch.softmax(logits, -1)[..., : key.shape[2]].to(output)
    return torch.matmul(probs, value.to(output))


@torch.library.impl("kvpass::log_sum_exp", "CompositeImplicitAutograd")
def log_sum_exp(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    hidden: float | None,
    scores: torch.dtype,
    weights: torch.dtype,
) -> Tensor:
    """The log-sum-exp [B, Hq, q] of the logits of `attention`, for models that ask for it."""
    return torch.logsumexp(_logits(query, _for_heads(key, query), mask, scale, cap, hidden, (scores, weights)), -1)


def _for_heads(rows: Tensor, query: Tensor) -> Tensor:
    """Each head's rows once for every query head of its group."""
    groups = query.shape[1] // rows.shape[1]
    return rows if groups == 1 else rows[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _logits(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    hidden: float | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Tensor:
    """[B, Hq, q, S], multiplied in the first dtype and held in the second."""
    products, wide = dtypes
    logits = torch.matmul(query.to(products), key.to(products).transpose(2, 3)).to(wide) * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    if mask is None:
        return logits
    if mask.dtype == torch.bool:
        return torch.where(mask, logits, -torch.inf if hidden is None else hidden)  # whatever the dtype of logits
    return logits + mask


APPEND = torch.ops.kvpass.append.default
ATTENTION = torch.ops.kvpass.attention.default
LOG_SUM_EXP = torch.ops.kvpass.log_sum_exp.default


def is_attention(node: fx.Node) -> bool:
    """Whether a node is part of an attention call on a cache."""
    return node.target in (ATTENTION, LOG_SUM_EXP)
