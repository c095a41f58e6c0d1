"""Define the canonical operators, to which capture converts every cache update and attention call.

    grown = kvpass::append(past, new)
    output = kvpass::attention(query, key, value, mask, sink_logit, scale, cap, causal, hidden_logit, dtypes)

They are composite operators that run on any tensors and that compilers decompose, so a canonical graph is a program
that gives the results of the model's own graph.  All other nodes, masks among them, stay the model's own.

With g = Hq / H, query head i attends to KV head i // g.  The scores are scale * query key^T, capped to cap *
tanh(scores / cap) if there is a cap, and then masked.  The softmax also runs over the sink, which has no value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.fx.shapes import expr
from kvpass.fx.walk import example_value
from kvpass.policies.heads import HeadSharding

torch.library.define("kvpass::append", "(Tensor? past, Tensor new) -> Tensor")
torch.library.define(
    "kvpass::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sink_logit, float scale, float? cap=None, "
    "bool causal=False, float? hidden_logit=None, ScalarType? product_dtype=None, "
    "ScalarType? logit_dtype=None, ScalarType? output_dtype=None) -> Tensor",
)
torch.library.define(
    "kvpass::log_sum_exp",
    "(Tensor query, Tensor key, Tensor? mask, float scale, float? cap, float? hidden_logit, "
    "ScalarType product_dtype, ScalarType logit_dtype) -> Tensor",
)


@torch.library.impl("kvpass::append", "CompositeImplicitAutograd")
def append(past: Tensor | None, new: Tensor) -> Tensor:
    """Concatenate past and new tokens in new memory.

    Args:
        past: [B, H, S, D], or None for an empty past.
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
    hidden_logit: float | None = None,
    product_dtype: torch.dtype | None = None,
    logit_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute attention of queries to keys and values.

    Args:
        query: [B, Hq, q, D].
        key, value: [B, H, S, D] and [B, H, S, Dv], where H divides Hq.
        mask: bool or additive, [B or 1, Hq or 1, q or 1, S], or None.
        sink_logit: the logits of the attention sink, [B or 1, Hq, q or 1, 1], or None.
        causal: query i attends to keys 0 .. i only.
        hidden_logit: the logit of keys that a bool mask hides; None for scaled_dot_product_attention's.
        product_dtype, logit_dtype, output_dtype: in decomposed attention the dtypes of the products of query and key,
            of logits and softmax, and of the result; None for scaled_dot_product_attention on the dtype of `query`.

    Returns:
        [B, Hq, q, Dv].
    """
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    if product_dtype is None or logit_dtype is None or output_dtype is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), attn_mask=mask, is_causal=causal, scale=scale
        )
    logits = _logits(query, key, mask, scale, cap, hidden_logit, (product_dtype, logit_dtype))  # [B, Hq, q, S]
    if sink_logit is not None:
        logits = torch.cat([logits, sink_logit.expand(*logits.shape[:3], 1).to(logits.dtype)], -1)
    probs = torch.softmax(logits, -1)[..., : key.shape[2]].to(output_dtype)
    return torch.matmul(probs, value.to(output_dtype))


@torch.library.impl("kvpass::log_sum_exp", "CompositeImplicitAutograd")
def log_sum_exp(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    hidden_logit: float | None,
    product_dtype: torch.dtype,
    logit_dtype: torch.dtype,
) -> Tensor:
    """Return the log-sum-exp [B, Hq, q] of the logits of `attention`, for models that use it."""
    dtypes = (product_dtype, logit_dtype)
    return torch.logsumexp(_logits(query, _repeat_heads(key, query), mask, scale, cap, hidden_logit, dtypes), -1)


def _repeat_heads(rows: Tensor, query: Tensor) -> Tensor:
    """Repeat the keys or values of each KV head for every query head of its group: [B, Hq, S, D]."""
    groups = query.shape[1] // rows.shape[1]
    return rows if groups == 1 else rows[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _logits(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    hidden_logit: float | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Tensor:
    """Return the logits [B, Hq, q, S], with products in the first dtype and the rest in the second."""
    product_dtype, logit_dtype = dtypes
    logits = torch.matmul(query.to(product_dtype), key.to(product_dtype).transpose(2, 3)).to(logit_dtype) * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    if mask is None:
        return logits
    if mask.dtype == torch.bool:
        return torch.where(mask, logits, -torch.inf if hidden_logit is None else hidden_logit)  # in any logit dtype
    return logits + mask


APPEND = torch.ops.kvpass.append.default
ATTENTION = torch.ops.kvpass.attention.default
LOG_SUM_EXP = torch.ops.kvpass.log_sum_exp.default


def is_attention(node: fx.Node) -> bool:
    """Return whether a node is a canonical operator of an attention call."""
    return node.target in (ATTENTION, LOG_SUM_EXP)


@dataclasses.dataclass(frozen=True)
class SiteFacts:
    """The facts about an `AttentionSite` without its nodes, which would keep its whole graph alive.

    Attributes:
        keys_out, values_out: the indices of the outputs by which the graph returns the cache.
        computed: whether the keys and values that attention reads, or the mask, are computed from the cached ones.
        causal: the call's own `is_causal`.
        scale: the factor on the products of query and key.
        cap: see `kvpass.capture.canonical.attention`.
        window: the number of last tokens that the model stores, None for all.
        sharding: how the heads are sharded over processes, None if all are in this process.
        token_dims: the dimensions of the tokens in the model's own cache of keys and of values, 2 or 1.
    """

    keys_out: int
    values_out: int
    computed: bool
    causal: bool = False
    scale: float = 1.0
    cap: float | None = None
    window: int | None = None
    sharding: HeadSharding | None = None
    token_dims: tuple[int, int] = (2, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSite(SiteFacts):
    """One attention call and its cache update.

    Attributes:
        call: the node of `kvpass::attention`.
        query: [B, Hq, q, D].
        key, value: the keys and values of the new tokens, [B, Hkv, q, D] and [B, Hkv, q, Dv].
        past_key, past_value: the placeholders of the past, None without a past (a prompt).
        grown_key, grown_value: the nodes of `kvpass::append`, which join past and new tokens.
        attended: the keys and values that attention reads, [B, Ha or Hkv, past + q, D]: the grown ones, or computed.
        mask: the node of the mask, or None.
        sink_logit: see `kvpass.capture.canonical.attention`.
        lse: the node of `kvpass::log_sum_exp` of the same logits, or None.
        hidden_logit: the logit of keys that a bool mask hides, if attention is decomposed.
        decomposed: whether attention is written as a product, a softmax and a product, without a call of
            scaled_dot_product_attention.
        shared_by: later attention calls on the same cache, such as the calls of layers that share it.
    """

    call: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    past_key: fx.Node | None
    past_value: fx.Node | None
    grown_key: fx.Node
    grown_value: fx.Node
    attended: tuple[fx.Node, fx.Node]
    mask: fx.Node | None
    sink_logit: fx.Node | None = None
    lse: fx.Node | None = None
    hidden_logit: float | None = None
    decomposed: bool = False
    shared_by: tuple[AttentionSite, ...] = ()

    @property
    def attention_calls(self) -> tuple[AttentionSite, ...]:
        """This site and the sites that share its cache."""
        return (self, *self.shared_by)

    @property
    def pasts(self) -> tuple[fx.Node, ...]:
        """The placeholders of the past: a key and a value, or none."""
        return tuple(past for past in (self.past_key, self.past_value) if past is not None)

    @property
    def length_symbols(self) -> set[sympy.Symbol]:
        """The symbols in the number of past tokens."""
        return {symbol for past in self.pasts for symbol in expr(example_value(past).shape[2]).free_symbols}

    @property
    def results(self) -> list[fx.Node]:
        """The nodes of its results: `call`, and `lse` if there is one."""
        return [self.call] if self.lse is None else [self.call, self.lse]

    @property
    def query_len(self) -> Any:
        """The number q of queries, possibly symbolic."""
        return example_value(self.query).shape[2]

    @property
    def facts(self) -> SiteFacts:
        """The facts about this site that a prompt reads after its graph is rewritten."""
        return SiteFacts(**{field.name: getattr(self, field.name) for field in dataclasses.fields(SiteFacts)})

    def in_copy(self, copy_of: dict[fx.Node, fx.Node]) -> AttentionSite:
        """Return this site in a copy of the graph, by the copy of each node."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        copied: dict[str, Any] = {name: copy_of[v] if isinstance(v, fx.Node) else v for name, v in fields.items()}
        copied["attended"] = tuple(copy_of[node] for node in self.attended)
        copied["shared_by"] = tuple(site.in_copy(copy_of) for site in self.shared_by)
        return AttentionSite(**copied)


def attention_calls(sites: Iterable[AttentionSite]) -> list[AttentionSite]:
    """Return the attention calls of all sites, see `AttentionSite.attention_calls`."""
    return [each for site in sites for each in site.attention_calls]
