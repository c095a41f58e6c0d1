"""Run a model's attention layers on the eager reference: `backend(..., inner="reference")`.

The graph is rewritten as for slots, so masks, positions and rotary embeddings are the model's own.  A Python call on
lists of tokens replaces every attention call.  This is slow and serves as the standard for compiled steps.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.fx as fx
from torch import Tensor

import kvpass
from kvpass.backend import Backend
from kvpass.cache.admission import TokensToAdmit
from kvpass.cache.cached_attention import NewTokens
from kvpass.cache.layout import Layout
from kvpass.cache.slots import FREE, NAMES, SlotSnapshot
from kvpass.cache.step import with_mask
from kvpass.capture.canonical import AttentionSite, SiteFacts
from kvpass.fx import walk
from kvpass.fx.walk import example_value
from kvpass.lowering.formats import Sections
from kvpass.policies import Policy
from kvpass.policies.budgets import Plan
from kvpass.policies.pinned_tokens import Pins, check_pinned
from kvpass.policies.types import Attention, Clock
from kvpass.reference import ReferenceLayer, reference_of
from kvpass.reference.layer import attend
from kvpass.rewrite.computed_keys import ComputedKeys, cut_computed_keys
from kvpass.rewrite.context import AttentionResults, Pass, PassRecord, StepContext
from kvpass.rewrite.masks import MaskOnSlots, Masks
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.rewrite.passes.attention import as_cached, attend_on_slots, replace_outputs, splice_point
from kvpass.rewrite.pipeline import HostValues, StepRewrite, StepSignature, new_columns, rewrite_step
from kvpass.rewrite.rotary_subgraph import RotarySubgraph
from kvpass.rewrite.step_graph import StepRewriteInput
from kvpass.runtime.calling.in_place import compile_in_place
from kvpass.runtime.kv_store import KVStore
from kvpass.runtime.padding_tracker import padding_from_columns


def backend(policy: str | Policy = "full", *, inner: Any = "inductor", **settings: Any) -> Backend:
    """Return a backend as `kvpass.backend` does; "reference" for `inner` runs the policy's eager reference."""
    if inner != "reference":
        return kvpass.backend(policy, inner=inner, **settings)
    plain = kvpass.backend(policy, inner="eager", **settings)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return ReferenceBackend(**fields | {"validate": False})


def compile(model: Any, policy: str | Policy = "full", **settings: Any) -> Any:
    """Compile a model in place as `kvpass.compile` does, by the backend of these settings, see `backend`."""
    chosen = backend(policy, **settings)
    compile_in_place(model, chosen, chosen.strict)
    return model


class ReferenceSlots:
    """A `ReferenceLayer` in the place of a layer's slots.

    Attributes:
        layer: the tokens.
        view: keys and values that the last tokens attended to, for layers that share the cache.
        taken: the last tokens.
        pins: those of the next call of `take`.
    """

    names = NAMES

    def __init__(self, layer: ReferenceLayer) -> None:
        self.layer = layer
        self.view: ReferenceView | None = None
        self.taken: TakenTokens | None = None
        self.pins: Pins | None = None

    def copy(self) -> ReferenceSlots:
        """Return an independent copy with the same tokens."""
        layer = copy.copy(self.layer)
        layer.streams = copy.deepcopy(layer.streams)
        return ReferenceSlots(layer)

    def snapshot(self, layout: Layout, chunk: bool) -> SlotSnapshot:
        """Return a copy as a record of these tokens."""
        return SlotSnapshot(self.copy())  # type: ignore[arg-type]

    @property
    def capacity(self) -> int:
        return self.layer.layout.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values."""
        formats, streams = self.layer.layout, (stream for row in self.layer.streams for stream in row)
        sizes = (size for each in (formats.key_format, formats.value_format) for size in each.part_shapes())
        row = sum(count * dtype.itemsize for count, dtype in sizes)
        return sum(len(token.key) * row for stream in streams for token in stream.tokens)

    @property
    def index(self) -> Tensor:
        """The cached tokens' indices in the padded sequence, int64 [B, H', N], padded with -1."""
        return self.layer.index()

    @property
    def seen(self) -> Tensor:
        """The number of real tokens seen, int64 [B]."""
        return torch.tensor([row[0].seen for row in self.layer.streams], device=self.layer.layout.device)

    @property
    def length(self) -> Tensor:
        """The number of tokens seen, int64 [B]."""
        return torch.full((self.layer.layout.batch,), self.layer.length, device=self.layer.layout.device)

    def tensors(self) -> list[Any]:
        """Return the inputs of a rewritten graph in place of `Slots.tensors`.

        The first is the object itself; positions are computed from the others.
        """
        positions = torch.nn.functional.pad(self.layer.positions(), (0, 1), value=FREE)
        free = torch.full((len(positions), 1), positions.shape[-1] - 1, device=positions.device)
        return [self, None, positions, None, free, self.seen, self.length, None]

    def cached_indices(self, layout: Layout, pinned: bool = False) -> Tensor:
        """Return the cached tokens as `Slots.cached_indices` does."""
        return self.layer.index(pinned).expand(-1, layout.heads, -1)

    def expect_pins(self, pins: Pins) -> None:
        """Note the pins of the next tokens, and check that they leave the policy what it needs.

        Raises:
            BudgetError: they leave less of the budget.
        """
        self.pins = pins
        if pins.on_top:
            return
        for row, more in zip(self.layer.streams, (pins.mask.sum(-1) + pins.later).tolist(), strict=True):
            for stream in row:
                pinned = sum(token.pinned for token in stream.tokens) + more
                check_pinned(self.layer.layout.policy, pinned, stream.budget - pinned)

    def take(self, tokens: TokensToAdmit, probabilities: Tensor, logits: Tensor, part: bool = False) -> None:
        """Add new tokens and evict, see `ReferenceLayer.take`."""
        self.taken, self.pins = TakenTokens(tokens, probabilities, logits), None
        self.layer.take(tokens, probabilities, logits, part)


@dataclasses.dataclass(frozen=True)
class TakenTokens:
    """The last tokens that a layer received, in place of an `AdmittedChunk`; see `ReferenceLayer.take`."""

    tokens: TokensToAdmit
    probabilities: Tensor
    logits: Tensor

    def first_tokens(self, count: int) -> TakenTokens:
        """Return the first `count` tokens."""
        total = self.probabilities.shape[-1] - self.probabilities.shape[2] + count
        probabilities, logits = (part[:, :, :count, :total] for part in (self.probabilities, self.logits))
        return TakenTokens(self.tokens.first_tokens(count), probabilities, logits)

    def admit_again(self, cache: Any) -> None:
        """Add the tokens again to a cache in its earlier state."""
        cache.slots.take(self.tokens, self.probabilities, self.logits, part=True)


def prefill_reference(layout: Layout, prompt: TokensToAdmit, row_budgets: Sequence[int]) -> ReferenceSlots:
    """Return the reference's tokens after a prompt, from its keys, values and operands of attention."""
    (spec,) = prompt.operands  # see `ReferenceBackend.keeps_operands`
    query, keys, mask, sink_logit = spec.query, spec.key, spec.mask, spec.sink_logit
    queries, keys_count = query.shape[2], keys.shape[2]
    visible = torch.ones(queries, keys_count, dtype=torch.bool, device=query.device)
    if spec.causal:
        visible = visible.tril(keys_count - queries)
    allowed = visible.expand(query.shape[0], 1, -1, -1) & prompt.valid[:, None, None]
    bias = None
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        bias = mask.expand(query.shape[0], -1, queries, -1)
    store = ReferenceSlots(ReferenceLayer(layout, reference_of(layout.policy), row_budgets))
    query = query * store.layer.logit_scale(prompt.valid)
    how: dict[str, Any] = dict(bias=bias, cap=spec.cap, sink_logit=sink_logit)
    attended = attend(query, keys, prompt.value, allowed, spec.scale, **how)
    rows = (0, 0, keys_count - queries, 0)  # of tokens without a query
    logits = torch.nn.functional.pad(attended.logits, rows, value=-torch.inf)
    store.take(prompt, torch.nn.functional.pad(attended.probabilities, rows), logits)
    return store


def attend_on_reference(step: StepContext) -> PassRecord:
    """Replace every attention call by a call on the reference, which also stores the new tokens."""
    masks, replaced = Masks(step), dict[str, fx.Node]()
    for layer, site in enumerate(step.sites):
        key, new_value = (as_cached(step.graph, site, node) for node in (site.key, site.value))
        stored_key = step.rotations.raw_keys[layer] if step.stores_unrotated_keys else key
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
    mask = masks.for_site(site, layer)
    rotary = step.rotations.subgraphs[layer] if step.rotations.subgraphs else None
    computed = cut_computed_keys(step.step_gm, site, step.sizes, mask.key_features if mask else ())
    bound = {
        "mask": mask.nodes if mask else [],
        "angles": list(rotary.angles.bound) if rotary else [],
        "rotate": list(rotary.rotate.bound) if rotary else [],
        "computed": list(computed.subgraph.bound) if computed else [],
    }
    lse_has_dim = site.lse is not None and example_value(site.lse).ndim == 4
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
    rotary: RotarySubgraph | None
    computed: ComputedKeys | None
    stores: bool
    lse_has_dim: bool

    @property
    def __name__(self) -> str:
        return "reference"

    def __call__(
        self,
        store: ReferenceSlots,
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
            stored_as_read = stored if store.layer.attends_to_stored(queries) else None
            store.view = self._view_of(store, NewTokens(query, key, value, valid), stored_as_read, bound)
        view = store.view
        assert view is not None  # the first call on the cache sets it
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
        how: dict[str, Any] = dict(policy_bias=view.bias, bias=bias, cap=site.cap, sink_logit=sink_logit)
        attended = attend(query * view.factor, keys, values, allowed, site.scale, **how)
        if self.stores:
            new = TokensToAdmit(stored, value, valid, Attention(), store.pins)
            store.take(new, attended.probabilities, attended.logits)
        lse = attended.biased.logsumexp(-1, keepdim=self.lse_has_dim)
        return attended.output.to(layout.dtype), lse.to(layout.dtype)

    def _view_of(
        self, store: ReferenceSlots, new: NewTokens, stored: Tensor | None, bound: dict[str, list[Any]]
    ) -> ReferenceView:
        """Return the cached and new tokens; `stored` is the key of a token that is read as stored, else None."""
        (query, key, value, valid), layer = new, store.layer
        groups, count, cached_values = self.layout.metadata_heads, query.shape[2], layer.cached_vectors("value")
        keys, ranks = layer.cached_vectors("key"), layer.ranks().clamp(min=0)
        if stored is not None:
            keys, value = torch.cat([keys, layer.stored(stored)], 2), layer.stored(value, key=False)
            ranks = torch.cat([ranks, (layer.positions() >= 0).sum(-1, keepdim=True)], -1)
        if self.rotary is not None and keys.shape[2]:
            keys = keys.to(self.layout.dtype)
            table = self.rotary.table(keys.shape[2], bound["angles"], keys.device)
            keys = torch.cat(self.rotary.on_slots(Sections((keys,)), ranks, table, bound["rotate"]), -1)
        if stored is None:
            keys = torch.cat([keys, key.to(keys.dtype)], 2)
        new_index = layer.length + torch.arange(count, device=query.device).expand(self.layout.batch, groups, -1)
        new_position = (store.seen[:, None] + valid.cumsum(-1) - 1)[:, None].expand(-1, groups, -1)
        return ReferenceView(
            keys=keys,
            values=torch.cat([cached_values, value.to(cached_values.dtype)], 2),
            index=torch.cat([store.index, new_index], -1),
            position=torch.cat([layer.positions(), new_position], -1),
            factor=layer.logit_scale(valid),
            bias=layer.bias(query.shape[1] // self.layout.heads),
        )


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


class ReferenceStore(KVStore):
    """Storage in `ReferenceSlots`, whose calls in a step graph admit and count tokens themselves."""

    def admit_prompt(
        self, layout: Layout, prompt: TokensToAdmit, plan: Plan
    ) -> tuple[Any, tuple[int, ...], tuple[Clock, ...]]:
        return prefill_reference(layout, prompt, plan.budgets_of_rows(layout.batch)), (), ()

    def make_room_for_pins(self, cache: Any, pins: Pins) -> None:
        cache.slots.expect_pins(pins)

    def pin(self, cache: Any, pins: Pins) -> None:
        """Do nothing: a step of the reference stores the pin together with the token."""

    def admit_step(self, cache: Any, site: SiteFacts, results: list[Tensor]) -> Any:
        return cache.slots.taken


@dataclasses.dataclass(frozen=True)
class ReferenceSignature(StepSignature):
    """The arguments of a step on references, which evict before a single token attends.

    Attributes:
        padding: for each layer, the indices of the arguments that mark padding.
    """

    padding: list[list[int]] = dataclasses.field(default_factory=list)

    def flat_arguments(
        self, slots: list[Any], arguments: tuple[Any, ...], host_values: HostValues, seen: int
    ) -> list[Any]:
        for own, indices in zip(slots, self.padding, strict=True):
            columns = [new_columns(arguments[index], seen, self.query_len) for index in indices]
            layout = own.layer.layout
            own.layer.evict_before_step(~padding_from_columns(columns, layout.batch, self.query_len, layout.device))
        return super().flat_arguments(slots, arguments, host_values, seen)


@dataclasses.dataclass(frozen=True)
class ReferenceBackend(Backend):
    """A backend that runs a model's attention layers on the policy's eager reference."""

    kv_store: ClassVar[KVStore] = ReferenceStore()

    @property
    def cache_settings(self) -> tuple[Any, ...]:
        return (*super().cache_settings, "reference")

    def keeps_operands(self, policies: Sequence[Policy]) -> bool:
        return True

    def has_dynamic_sizes(self, device: torch.device) -> bool:
        return False

    def rewrite(self, call: StepRewriteInput) -> tuple[StepContext, StepRewrite]:
        context, holders = StepContext(call), walk.placeholders(call.canonical_gm.graph)
        rewrite = rewrite_step(context, REFERENCE_PASSES, self.record_pass)
        padding = [[holders.index(node) for node in nodes] for nodes in call.padding_inputs.by_layer]
        signature = ReferenceSignature(**vars(rewrite.signature), padding=padding)
        return context, dataclasses.replace(rewrite, signature=signature)
