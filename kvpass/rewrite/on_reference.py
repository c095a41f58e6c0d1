"""A model's attention layers on the eager reference: `inner="reference"`.

The graph is rewritten as for slots, so masks, positions and rotary embeddings are the model's own, but
every attention call becomes a Python call that works on lists of tokens.  Slow, and right.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import Chunk, Layout
from kvpass.cache.statistics import StatisticsSpec
from kvpass.cache.step import with_mask
from kvpass.capture.sites import AttentionSite
from kvpass.fx.walk import value
from kvpass.lowering.formats import Sections
from kvpass.policies.base import Attention
from kvpass.reference import ReferenceLayer, reference_of
from kvpass.reference.base import attention_logits
from kvpass.rewrite.computed_keys import ComputedKeys, cut_computed_keys
from kvpass.rewrite.context import Pass, StepContext
from kvpass.rewrite.masks import MaskOnSlots, Masks
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.rewrite.passes.attention import as_cached, attend_on_slots, early_enough, put_in_place
from kvpass.rewrite.record import Record
from kvpass.rewrite.rotary_slice import RotarySlice


def take_prompt(
    layout: Layout, chunk: Chunk, spec: StatisticsSpec, site: AttentionSite, row_budgets: Sequence[int]
) -> ReferenceLayer:
    """The reference's layer after a prompt."""
    query, keys, mask, sink_logit = spec.query, spec.key, spec.mask, spec.sink_logit
    new, total = query.shape[2], keys.shape[2]
    seen = torch.ones(new, total, dtype=torch.bool, device=query.device)
    if site.causal:
        seen = seen.tril(total - new)
    allowed = seen.expand(query.shape[0], 1, -1, -1) & chunk.valid[:, None, None]
    bias = None
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        bias = mask.expand(query.shape[0], -1, new, -1)
    store = ReferenceLayer(layout, reference_of(layout.policy), row_budgets)
    logits = attention_logits(query * store.logit_scale(chunk.valid), keys, allowed, bias, site.scale, site.cap)
    padded = torch.nn.functional.pad(logits, (0, 0, total - new, 0), value=-torch.inf)
    probabilities = _softmax(logits, sink_logit)
    store.take(chunk, torch.nn.functional.pad(probabilities, (0, 0, total - new, 0)), padded)
    return store


def attend_on_reference(step: StepContext) -> Record:
    """Put a call on the reference in place of every attention call; it takes chunks in itself."""
    masks = Masks(step)
    for number, site in enumerate(step.sites):
        key, new_value = (as_cached(step.graph, site, node) for node in (site.key, site.value))
        stored = step.raw_keys[number] if step.ranked else key  # where that is not as it is attended to
        for each in site.all:
            _replace(step, masks, number, each, (key, stored, new_value))
        step.chunks.append([])
    return Record([each.call.name for site in step.sites for each in site.all])


REFERENCE_PASSES: tuple[Pass, ...] = tuple(
    attend_on_reference if each is attend_on_slots else each for each in STEP_PASSES
)


def _replace(
    step: StepContext, masks: Masks, number: int, site: AttentionSite, new: tuple[fx.Node, fx.Node, fx.Node]
) -> None:
    """One attention call on the cache of a layer; `new` are the key as attended to and as stored, and the value."""
    mask, _ = masks.of(site, number)
    rotary = step.rotaries[number] if step.rotaries else None
    computed = cut_computed_keys(step.gm, site, step.sizes, mask.facts if mask else ())
    bound = {
        "mask": mask.nodes if mask else [],
        "angles": list(rotary.angles.bound) if rotary else [],
        "rotate": list(rotary.rotate.bound) if rotary else [],
        "computed": list(computed.slice.bound) if computed else [],
    }
    wide_lse = site.lse is not None and value(site.lse).ndim == 4
    call = _ReferenceCall(site, step.layouts[number], mask, rotary, computed, site is step.sites[number], wide_lse)
    arguments = (step.slot_inputs[number][0], site.query, *new, step.inputs.valid(number), bound, site.sink_logit)
    with step.graph.inserting_before(site.call):
        both = step.graph.call_function(call, arguments)
    early_enough(site, both.all_input_nodes).prepend(both)
    with step.graph.inserting_after(both):
        made = [step.graph.call_function(operator.getitem, (both, index)) for index in (0, 1)]
    put_in_place(step, site, made)


@dataclasses.dataclass(frozen=True)
class ReferenceView:
    """What attention sees of a layer: the held tokens and the new ones.

    Attributes:
        keys, values: [B, Hkv, N + q, D] and [B, Hkv, N + q, Dv], the keys rotated.
        places, position: int64 [B, H', N + q], in the padded sequence and among the real tokens.
        factor: on the logits, float32 [B, 1, 1, 1].
        bias: the policy's own, float32 [B, Hq, 1, N], or None.
    """

    keys: Tensor
    values: Tensor
    places: Tensor
    position: Tensor
    factor: Tensor
    bias: Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)  # a node's target is looked up by identity
class _ReferenceCall:
    """What runs in place of one attention call; the first on a cache takes the new tokens in."""

    site: AttentionSite
    layout: Layout
    mask: MaskOnSlots | None
    rotary: RotarySlice | None
    computed: ComputedKeys | None
    first: bool
    wide_lse: bool

    @property
    def __name__(self) -> str:
        return "reference"

    def __call__(
        self,
        store: ReferenceLayer,
        query: Tensor,
        key: Tensor,
        stored: Tensor,
        value: Tensor,
        valid: Tensor,
        bound: dict[str, list[Any]],
        sink_logit: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The output [B, Hq, q, Dv] and the log-sum-exp of the logits, [B, Hq, q], or [B, Hq, q, 1] if wide."""
        layout, site, queries = self.layout, self.site, query.shape[2]
        if self.first:
            alone = stored if store.attends_to_stored(queries) else None
            store.view = self._view(store, query, key, alone, value, valid, bound)
        view: ReferenceView = store.view
        keys, values = view.keys, view.values
        facts: list[Tensor] = []
        if self.computed is not None:
            keys, values = keys.to(layout.dtype), values.to(layout.dtype)
            keys, values, facts = self.computed.on_slots(keys, values, bound["computed"])
        model_mask = None
        if self.mask is not None:
            model_mask = self.mask.on_slots(view.places, view.position, layout.heads, bound["mask"], facts)
        allowed, bias = _allowed(
            layout, view.position[..., :-queries] >= 0, valid, model_mask, query.shape[1], site.hidden
        )
        logits = attention_logits(query * view.factor, keys, allowed, bias, site.scale, site.cap)
        biased = _plus(logits, view.bias)
        probabilities = _softmax(biased, sink_logit)  # [B, Hq, q, N + q]
        if self.first:
            store.take(Chunk(stored, value, valid, Attention()), probabilities, logits)
        output: Tensor = probabilities.to(values.dtype) @ values.repeat_interleave(query.shape[1] // values.shape[1], 1)
        output, lse = output.to(layout.dtype), biased.logsumexp(-1).to(layout.dtype)
        return output, lse[..., None] if self.wide_lse else lse

    def _view(
        self,
        store: ReferenceLayer,
        query: Tensor,
        key: Tensor,
        stored: Tensor | None,
        value: Tensor,
        valid: Tensor,
        bound: dict[str, list[Any]],
    ) -> ReferenceView:
        """`stored` is the key of a token that is attended to as it is stored, else None."""
        groups, count = self.layout.groups, query.shape[2]
        keys, ranks = store.held_rows("key"), store.ranks().clamp(min=0)
        if stored is not None:
            keys, value = torch.cat([keys, store.stored(stored)], 2), store.stored(value, key=False)
            ranks = torch.cat([ranks, (store.positions() >= 0).sum(-1, keepdim=True)], -1)
        if self.rotary is not None and keys.shape[2]:
            keys = keys.to(self.layout.dtype)
            table = self.rotary.table(keys.shape[2], bound["angles"], keys.device)
            keys = torch.cat(self.rotary.on_slots(Sections((keys,)), ranks, table, bound["rotate"]), -1)
        if stored is None:
            keys = torch.cat([keys, key.to(keys.dtype)], 2)
        new = store.length + torch.arange(count, device=query.device).expand(self.layout.batch, groups, -1)
        arriving = (store.seen()[:, None] + valid.cumsum(-1) - 1)[:, None].expand(-1, groups, -1)
        return ReferenceView(
            keys=keys,
            values=_beside(store.held_rows("value"), value),
            places=torch.cat([store.index(), new], -1),
            position=torch.cat([store.positions(), arriving], -1),
            factor=store.logit_scale(valid),
            bias=store.bias(query.shape[1] // self.layout.heads),
        )


def _beside(held: Tensor, new: Tensor) -> Tensor:
    return torch.cat([held, new.to(held.dtype)], 2)


def _softmax(logits: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Probabilities of logits [B, Hq, q, N] beside a sink [B or 1, Hq, q or 1, 1]; zero where nothing may be seen."""
    if sink_logit is None:
        return torch.nan_to_num(logits.softmax(-1))
    beside = sink_logit.float().expand(*logits.shape[:3], 1)
    return torch.nan_to_num(torch.cat([logits, beside], -1).softmax(-1)[..., :-1])


def _allowed(
    layout: Layout,
    live: Tensor,
    valid: Tensor,
    model_mask: Tensor | None,
    query_heads: int,
    hidden: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Mask bool and the model's bias, [B, Hq, q, N + q], of queries over [held, new]."""
    count = valid.shape[1]
    groups = layout.groups
    held = live[:, :, None].expand(-1, -1, count, -1)  # [B, H', q, N]
    seen = torch.cat([held, valid[:, None, None].expand(-1, groups, count, -1)], -1)
    seen = seen.repeat_interleave(query_heads // groups, 1)
    if model_mask is None:
        return seen, None
    model_mask = model_mask.expand(layout.batch, layout.heads, query_heads // layout.heads, count, -1).flatten(1, 2)
    return with_mask(seen, model_mask, hidden)


def _plus(logits: Tensor, policy_bias: Tensor | None) -> Tensor:
    """Logits [B, Hq, q, N + q] with the policy's own bias on the held tokens [B, Hq, 1, N]."""
    return (
        logits
        if policy_bias is None
        else logits + torch.nn.functional.pad(policy_bias, (0, logits.shape[-1] - policy_bias.shape[-1]))
    )
