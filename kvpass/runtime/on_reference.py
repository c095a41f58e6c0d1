"""Run a model's attention layers on the eager reference: `inner="reference"`.

The graph is rewritten as for slots, so masks, positions and rotary embeddings are the model's own.  A Python call on
lists of tokens replaces every attention call.  This is slow and serves as the standard for compiled steps.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.admission import TokensToAdmit
from kvpass.cache.cached_attention import NewTokens
from kvpass.cache.layout import Layout
from kvpass.cache.past_calls import SlotSnapshot
from kvpass.cache.step import with_mask
from kvpass.capture.canonical import AttentionSite, SiteFacts
from kvpass.fx.walk import value
from kvpass.lowering.attention_statistics import StatisticsOperands
from kvpass.lowering.formats import Sections
from kvpass.policies.budgets import Plan
from kvpass.policies.pinned_tokens import Pins
from kvpass.policies.types import Attention, Clock
from kvpass.reference import reference_of
from kvpass.reference.layer import ReferenceLayer, TakenTokens, attention_logits, attention_output
from kvpass.rewrite.computed_keys import ComputedKeys, cut_computed_keys
from kvpass.rewrite.context import AttentionResults, Pass, PassRecord, StepContext
from kvpass.rewrite.masks import MaskOnSlots, Masks
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.rewrite.passes.attention import as_cached, attend_on_slots, replace_outputs, splice_point
from kvpass.rewrite.rotary_slice import RotarySlice
from kvpass.runtime.kv_store import KVStore


def prefill_reference(
    layout: Layout, prompt: TokensToAdmit, spec: StatisticsOperands, site: SiteFacts, row_budgets: Sequence[int]
) -> ReferenceLayer:
    """Return the reference's layer after a prompt, from its keys, values and operands of attention."""
    query, keys, mask, sink_logit = spec.query, spec.key, spec.mask, spec.sink_logit
    queries, keys_count = query.shape[2], keys.shape[2]
    visible = torch.ones(queries, keys_count, dtype=torch.bool, device=query.device)
    if site.causal:
        visible = visible.tril(keys_count - queries)
    allowed = visible.expand(query.shape[0], 1, -1, -1) & prompt.valid[:, None, None]
    bias = None
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        bias = mask.expand(query.shape[0], -1, queries, -1)
    store = ReferenceLayer(layout, reference_of(layout.policy), row_budgets)
    logits = attention_logits(query * store.logit_scale(prompt.valid), keys, allowed, bias, site.scale, site.cap)
    padded = torch.nn.functional.pad(logits, (0, 0, keys_count - queries, 0), value=-torch.inf)
    probabilities = _softmax(logits, sink_logit)
    store.take(prompt, torch.nn.functional.pad(probabilities, (0, 0, keys_count - queries, 0)), padded)
    return store


def attend_on_reference(step: StepContext) -> PassRecord:
    """Replace every attention call by a call on the reference, which also stores the new tokens."""
    masks, replaced = Masks(step), dict[str, fx.Node]()
    for layer, site in enumerate(step.sites):
        key, new_value = (as_cached(step.graph, site, node) for node in (site.key, site.value))
        stored_key = step.rotations.raw_keys[layer] if step.stores_raw_keys else key
        for site_call in site.attention_calls:
            replaced |= _replace(step, masks, layer, site_call, (key, stored_key, new_value))
    step.attention = AttentionResults(replaced, {}, [[] for _ in step.sites], masks.dropped_outputs)
    return PassRecord([site_call.call.name for site in step.sites for site_call in site.attention_calls])


REFERENCE_PASSES: tuple[Pass, ...] = tuple(
    attend_on_reference if each is attend_on_slots else each for each in STEP_PASSES
)


def _replace(
    step: StepContext, masks: Masks, layer: int, site: AttentionSite, new: tuple[fx.Node, fx.Node, fx.Node]
) -> dict[str, fx.Node]:
    """Replace one attention call, see `replace_outputs`; `new` are the rotated key, the stored key, and the value."""
    mask, _ = masks.of(site, layer)
    rotary = step.rotations.slices[layer] if step.rotations.slices else None
    computed = cut_computed_keys(step.step_gm, site, step.sizes, mask.key_features if mask else ())
    bound = {
        "mask": mask.nodes if mask else [],
        "angles": list(rotary.angles.bound) if rotary else [],
        "rotate": list(rotary.rotate.bound) if rotary else [],
        "computed": list(computed.slice.bound) if computed else [],
    }
    lse_has_dim = site.lse is not None and value(site.lse).ndim == 4
    call = _ReferenceCall(site, step.layouts[layer], mask, rotary, computed, site is step.sites[layer], lse_has_dim)
    arguments = (step.slot_inputs[layer][0], site.query, *new, step.inputs.valid(layer), bound, site.sink_logit)
    with step.graph.inserting_before(site.call):
        result = step.graph.call_function(call, arguments)
    splice_point(site, result.all_input_nodes).prepend(result)
    with step.graph.inserting_after(result):
        outputs = [step.graph.call_function(operator.getitem, (result, index)) for index in (0, 1)]
    return replace_outputs(site, outputs)


@dataclasses.dataclass(frozen=True)
class ReferenceView:
    """The cached and the new tokens of a layer, as attention sees them.

    Attributes:
        keys, values: [B, Hkv, N + q, D] and [B, Hkv, N + q, Dv], the keys rotated.
        index, position: int64 [B, H', N + q], in the padded sequence and among the real tokens.
        factor: the factor of the logits, float32 [B, 1, 1, 1].
        bias: the policy's bias, float32 [B, Hq, 1, N], or None.
    """

    keys: Tensor
    values: Tensor
    index: Tensor
    position: Tensor
    factor: Tensor
    bias: Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)  # a node's target is looked up by identity
class _ReferenceCall:
    """The function that replaces one attention call; the first call on a cache stores the new tokens."""

    site: AttentionSite
    layout: Layout
    mask: MaskOnSlots | None
    rotary: RotarySlice | None
    computed: ComputedKeys | None
    stores: bool
    lse_has_dim: bool

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
        """Return the output [B, Hq, q, Dv] and the log-sum-exp of the logits."""
        layout, site, queries = self.layout, self.site, query.shape[2]
        if self.stores:
            stored_as_read = stored if store.attends_to_stored(queries) else None
            store.view = self._view_of(store, NewTokens(query, key, value, valid), stored_as_read, bound)
        view: ReferenceView = store.view
        keys, values = view.keys, view.values
        key_features: list[Tensor] = []
        if self.computed is not None:
            keys, values = keys.to(layout.dtype), values.to(layout.dtype)
            keys, values, key_features = self.computed.on_slots(keys, values, bound["computed"])
        model_mask = None
        if self.mask is not None:
            model_mask = self.mask.on_slots(view.index, view.position, layout.heads, bound["mask"], key_features)
        allowed, bias = _mask_and_bias(
            layout, view.position[..., :-queries] >= 0, valid, model_mask, query.shape[1], site.hidden_logit
        )
        logits = attention_logits(query * view.factor, keys, allowed, bias, site.scale, site.cap)
        biased = logits if view.bias is None else logits + torch.nn.functional.pad(view.bias, (0, queries))
        probabilities = _softmax(biased, sink_logit)  # [B, Hq, q, N + q]
        if self.stores:
            store.take(TokensToAdmit(stored, value, valid, Attention(), store.pins), probabilities, logits)
        lse = biased.logsumexp(-1, keepdim=self.lse_has_dim)
        return attention_output(probabilities, values).to(layout.dtype), lse.to(layout.dtype)

    def _view_of(
        self, store: ReferenceLayer, new: NewTokens, stored: Tensor | None, bound: dict[str, list[Any]]
    ) -> ReferenceView:
        """Return the cached and new tokens; `stored` is the key of a token that is read as stored, else None."""
        query, key, value, valid = new
        groups, count, cached_values = self.layout.metadata_heads, query.shape[2], store.cached_vectors("value")
        keys, ranks = store.cached_vectors("key"), store.ranks().clamp(min=0)
        if stored is not None:
            keys, value = torch.cat([keys, store.stored(stored)], 2), store.stored(value, key=False)
            ranks = torch.cat([ranks, (store.positions() >= 0).sum(-1, keepdim=True)], -1)
        if self.rotary is not None and keys.shape[2]:
            keys = keys.to(self.layout.dtype)
            table = self.rotary.table(keys.shape[2], bound["angles"], keys.device)
            keys = torch.cat(self.rotary.on_slots(Sections((keys,)), ranks, table, bound["rotate"]), -1)
        if stored is None:
            keys = torch.cat([keys, key.to(keys.dtype)], 2)
        new_index = store.length + torch.arange(count, device=query.device).expand(self.layout.batch, groups, -1)
        new_position = (store.seen[:, None] + valid.cumsum(-1) - 1)[:, None].expand(-1, groups, -1)
        return ReferenceView(
            keys=keys,
            values=torch.cat([cached_values, value.to(cached_values.dtype)], 2),
            index=torch.cat([store.index(), new_index], -1),
            position=torch.cat([store.positions(), new_position], -1),
            factor=store.logit_scale(valid),
            bias=store.bias(query.shape[1] // self.layout.heads),
        )


def _softmax(logits: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Return the probabilities of logits [B, Hq, q, N] and a sink; zero without visible keys."""
    if sink_logit is None:
        return torch.nan_to_num(logits.softmax(-1))
    sink = sink_logit.float().expand(*logits.shape[:3], 1)
    return torch.nan_to_num(torch.cat([logits, sink], -1).softmax(-1)[..., :-1])


def _mask_and_bias(
    layout: Layout, live: Tensor, valid: Tensor, model_mask: Tensor | None, query_heads: int, hidden_logit: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the mask, bool, and the model's bias, [B, Hq, q, N + q], of queries over [cached, new]."""
    count = valid.shape[1]
    groups = layout.metadata_heads
    cached = live[:, :, None].expand(-1, -1, count, -1)  # [B, H', q, N]
    visible = torch.cat([cached, valid[:, None, None].expand(-1, groups, count, -1)], -1)
    visible = visible.repeat_interleave(query_heads // groups, 1)
    if model_mask is None:
        return visible, None
    model_mask = model_mask.expand(layout.batch, layout.heads, query_heads // layout.heads, count, -1).flatten(1, 2)
    return with_mask(visible, model_mask, hidden_logit)


@dataclasses.dataclass(frozen=True)
class ReferenceStore(KVStore):
    """Storage in a `ReferenceLayer` per cache, whose calls in a step graph admit and count tokens themselves."""

    needs_operands = gathers_all_tokens = True
    can_validate = supports_shards = has_fast_steps = False

    @property
    def passes(self) -> Sequence[Pass]:
        return REFERENCE_PASSES

    def admit_prompt(
        self, layout: Layout, prompt: TokensToAdmit, spec: StatisticsOperands | None, site: SiteFacts, plan: Plan
    ) -> tuple[ReferenceLayer, tuple[int, ...], tuple[Clock, ...]]:
        assert spec is not None  # `needs_operands`
        return prefill_reference(layout, prompt, spec, site, plan.budgets_of_rows(layout.batch)), (), ()

    def make_room_for_pins(self, cache: Any, pins: Pins) -> None:
        cache.slots.expect_pins(pins)

    def pin(self, cache: Any, pins: Pins) -> None:
        """Do nothing: a step of the reference stores the pin together with the token."""

    def evict_before_step(self, cache: Any, valid: Callable[[], Tensor]) -> None:
        cache.slots.evict_before_step(valid())

    def snapshot(self, cache: Any, chunk: bool) -> SlotSnapshot:
        return SlotSnapshot(cache.slots.copy())

    def admit_step(self, cache: Any, site: AttentionSite, results: list[Tensor]) -> TakenTokens:
        taken: TakenTokens = cache.slots.taken
        return taken
