"""Define the operands and results of one layer's step, and run a step for each class of heads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvpass.cache.layout import Layout
from kvpass.cache.slots import AnySlots, ClassedSlots, Slots, select_heads
from kvpass.lowering.attend import Rope, UnknownQueries
from kvpass.lowering.formats import Sections


class Mask(Protocol):
    """The model's own mask as a function of the keys' indices."""

    def __call__(self, index: Tensor, position: Tensor, key_features: list[Tensor]) -> Tensor:
        """Return the mask, bool or additive, [B, Hkv or 1, G or 1, q, N].

        Args:
            index, position: int64 [B, H', N], the keys' indices in the padded sequence and positions among real tokens.
            key_features: tensors that the model computes from the stored vectors of each key.
        """


RotateToRanks = Callable[[Sections, Tensor], list[Tensor]]
"""The model's own rotary embedding: keys [B, Hkv, N, D] at positions int64 [B, H', N], in sections of D."""

ComputeKeys = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, list[Tensor]]]
"""The model's computation of keys and values from its cache.

It takes stored vectors [B, Hkv, N, D'] of K and of V, and returns keys and values [B, Ha, N, D] and features [N, ...]
for the mask.
"""


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """One attention call of the model, as a step on slots runs it.

    Attributes:
        scale: the factor on the products of queries and keys.
        mask: the model's mask on slots, or None.
        rotate: the model's rotary embedding, or None if keys are stored rotated or have none.
        rope: the same embedding for kernels, without ranks, if they can apply it.
        cap, sink_logit: see `kvpass.capture.canonical.attention`; the latter is [B or 1, Hq, q or 1, 1].
        policy_weights: the policy's weights as inputs of the graph; empty if they are read from the policy.
        compute_keys: computes keys and values from the stored vectors, or None if these are the keys and values.
        lse: whether the model also reads the log-sum-exp of the logits.
        write_slots: the slots to write to, [B, H']; None for `slots.free`.
        hidden_logit: the logit of keys that a bool mask hides; None if they are left out.
        decomposed: whether the model computes the softmax itself, which gives NaN for a query without keys.
        has_padding_inputs: whether inputs of the graph mark padding; marked tokens are not cached.
    """

    scale: float
    mask: Mask | None = None
    rotate: RotateToRanks | None = None
    rope: Rope | None = None
    policy_weights: tuple[Tensor, ...] = ()
    cap: float | None = None
    sink_logit: Tensor | None = None
    compute_keys: ComputeKeys | None = None
    lse: bool = False
    write_slots: Tensor | None = None
    hidden_logit: float | None = None
    decomposed: bool = False
    has_padding_inputs: bool = False

    def unknown_queries(self, slots: Slots, valid: Tensor, bias: torch.dtype | None) -> UnknownQueries | None:
        """Return the queries whose output may be unknown, or None if there are none.

        A model that adds its mask in half precision rounds the logits where the mask's number is large.  kvpass adds it
        in float32.  The results differ only for queries to which the mask hides every key.

        Args:
            valid: bool [B, q], false for padding.
            bias: the dtype of the mask's bias, None without one.
        """
        if (
            self.mask is None
            or self.sink_logit is not None
            or not (self.decomposed or (self.has_padding_inputs and bias is not None))
        ):
            return None
        real = valid[:, None, None, :, None]  # not padding: its output must be a number
        padded = real & (slots.length != slots.seen)[:, None, None, None, None]
        no_query = torch.zeros_like(real)
        rounded = self.decomposed and bias in (torch.float16, torch.bfloat16)
        return UnknownQueries(
            real if self.decomposed else no_query,
            padded if self.has_padding_inputs else no_query,
            real if rounded else None,
        )

    def sink_logits(self, heads: int) -> Tensor | None:
        """Return the sink's logits [B or 1, Hkv, G, q or 1, 1]."""
        return None if self.sink_logit is None else torch.unflatten(self.sink_logit, 1, (heads, -1))


class NewTokens(NamedTuple):
    """The new tokens of a step in one layer.

    Attributes:
        query: [B, Hq, q, D].
        key: [B, Hkv, q, D], for one token in its stored form, for a chunk as attention reads it.
        value: [B, Hkv, q, Dv].
        valid: false for padding, bool [B] for one token, [B, q] for a chunk.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor


class AttentionOutput(NamedTuple):
    """The results of attention, and the mask that it ran under.

    Attributes:
        output: [B, Hq, q, Dv].
        masks: for each class of heads, the visible keys and the model's bias, if any: [B, Ha or 1, ., q, N].
        lse: the log-sum-exp [B, Hq, q] in the dtype of `fx.precision.upcast`, if the model reads it.
        statistics: of a chunk, see `kvpass.cache.chunk_step.chunk_step`.
    """

    output: Tensor
    masks: tuple[tuple[Tensor, Tensor | None], ...]
    lse: Tensor | None = None
    statistics: tuple[Tensor, ...] = ()


Step = Callable[..., AttentionOutput]
"""A function of a layout, a `CachedAttention`, slots, the new tokens, and further arguments."""


def class_by_class(step: Step) -> Step:
    """Make a step run once for each class of heads, as if each class were a layer."""

    @functools.wraps(step)
    def divided(
        layout: Layout, attention: CachedAttention, slots: AnySlots, new: NewTokens, *further: Any
    ) -> AttentionOutput:
        if isinstance(slots, Slots):
            return step(layout, attention, slots, new, *further)
        attended = []
        classes = zip(layout.by_class, slots.by_class, layout.head_slices, strict=True)
        for class_layout, class_slots, head_slice in classes:
            heads, sink = slots.order[:, head_slice], attention.sink_logit
            if sink is not None:
                sink = _select_query_heads(sink.expand(heads.shape[0], -1, -1, -1), heads, layout.heads)
            vectors = select_heads(new.key, heads), select_heads(new.value, heads)
            class_tokens = NewTokens(_select_query_heads(new.query, heads, layout.heads), *vectors, new.valid)
            class_attention = dataclasses.replace(attention, sink_logit=sink)
            attended.append(step(class_layout, class_attention, class_slots, class_tokens, *further))
        return _join_classes(layout, slots, attended)

    return divided


def _select_query_heads(x: Tensor, heads: Tensor, count: int) -> Tensor:
    """Return the query heads [B, Hq, ...] of some KV heads, int64 [B, h] of `count`."""
    return select_heads(torch.unflatten(x, 1, (count, -1)), heads).flatten(1, 2)


def _join_classes(layout: Layout, slots: ClassedSlots, attended: list[AttentionOutput]) -> AttentionOutput:
    """Join the results of all classes, with the heads in the model's order."""

    def joined(results: list[Tensor]) -> Tensor:
        by_head = [torch.unflatten(x, 1, (each.heads, -1)) for x, each in zip(results, layout.by_class, strict=True)]
        return select_heads(torch.cat(by_head, 1), slots.inverse).flatten(1, 2)

    sums = [each.lse for each in attended if each.lse is not None]
    masks = tuple(mask for each in attended for mask in each.masks)
    statistics = tuple(x for each in attended for x in each.statistics)
    return AttentionOutput(
        joined([each.output for each in attended]), masks, joined(sums) if sums else None, statistics
    )
