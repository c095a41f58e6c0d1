"""Store the tokens of a prompt: plan the layers' budgets, and admit the prompt to their caches."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.admission import TokensToAdmit
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.cache.undo_records import UndoRecord
from kvpass.capture.canonical import SiteFacts
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies.base import Policy
from kvpass.policies.budgets import Plan, by_rows
from kvpass.policies.types import Attention
from kvpass.policies.window import policy_beside_window
from kvpass.runtime import model_identity
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.kv_store import pinned_headroom
from kvpass.runtime.padding_tracker import true_indices
from kvpass.user_budget import Budget, slots_for, slots_of_rows

MIXED = (
    "budget={budget!r} gives the rows {shares} tokens, and a layer has a sliding window of {window} tokens: the window "
    "must fit the budget of every row, or of none; give a number of slots, or rows of one length"
)


@dataclasses.dataclass(frozen=True)
class PromptLayer:
    """The result of a prompt in one layer.

    Attributes:
        heads: the KV heads of the model's cache.
        tokens: all tokens of the prompt.
        key_projections, output_projection: see `LayerCache`.
    """

    policy: Policy
    heads: int
    site: SiteFacts
    tokens: TokensToAdmit
    key_projections: model_identity.WeightRefs
    output_projection: weakref.ref[Any] | None

    def crop(self, cropped: int, budget: Budget) -> PromptLayer:
        """Return the layer of the prompt without its last `cropped` tokens; `budget` is as the user gave it."""
        tokens = self.tokens.first_tokens(self.tokens.valid.shape[1] - cropped)
        for each in tokens.operands:  # at most one, as a prompt has no classes of heads yet
            new = tokens.valid[:, -each.query.shape[2] :]
            tokens = dataclasses.replace(tokens, attention=each.attention(self.policy, new, budget))
        return dataclasses.replace(self, tokens=tokens)


@dataclasses.dataclass(frozen=True)
class PendingPrompt:
    """A prompt that has run and is not yet admitted to caches.

    Attributes:
        stores_unrotated_keys: whether keys are stored before their rotary embedding.
        notes, first_ids, rotated_key, model_tensors: see `LayerCache`.
        layers: the results of the prompt in each layer; the list is emptied as they are admitted, unless the cache can
            be cropped.
        new: the number of tokens, without an adopted past's.
    """

    backend: BackendBase
    stores_unrotated_keys: bool
    notes: tuple[str, ...]
    first_ids: Tensor | None
    rotated_key: Tensor | None
    model_tensors: model_identity.WeightRefs
    layers: list[PromptLayer]
    new: int
    _shorter: dict[int, list[LayerCache]] = dataclasses.field(default_factory=dict, init=False)

    def admit_layers(self) -> Iterator[LayerCache]:
        """Admit the prompt layer by layer, and yield the cache of each."""
        crop = self.backend.crop
        layers = list(self.layers) if crop else self.layers
        for index, cache in enumerate(self._plan_and_admit(layers)):
            if crop:
                cache.undo_records = (
                    UndoRecord.on(cache, self.new, None, functools.partial(self._caches_of_first, index)),
                )
            yield cache

    @torch.no_grad()
    def _caches_of_first(self, layer: int, _: LayerCache, count: int) -> LayerCache:
        """Return a layer's cache of the first `count` tokens; admits all layers, as a policy may plan them together."""
        if count not in self._shorter:
            layers = [each.crop(self.new - count, self.backend.budget) for each in self.layers]
            self._shorter[count] = list(dataclasses.replace(self, layers=layers, new=count).admit_layers())
        return self._shorter[count][layer]

    def _plan_and_admit(self, layers: list[PromptLayer]) -> Iterator[LayerCache]:
        """Plan all layers, then admit each: yield its cache, and release its keys and values."""
        valid = layers[0].tokens.valid
        prompt, shares = valid.shape[1], slots_of_rows(self.backend.policy, self.backend.budget, valid)
        budget, policy = max(shares), self.backend.policy
        self._check_windows(layers, shares)
        layers[:] = [_with_window_policy(layer, budget) for layer in layers]
        plans = self._plan_layers(layers, shares, prompt)
        by_row = any(
            plan.differs(budget) for layer, (_, plan) in zip(layers, plans, strict=True) if layer.policy is policy
        )
        for i, plan in enumerate(plans):
            yield self._admit_layer(i, layers[i], plan, by_row)
            layers[i] = None  # type: ignore[call-overload]

    def _plan_layers(self, layers: list[PromptLayer], shares: list[int], prompt: int) -> list[tuple[int, Plan]]:
        """Return for each layer the largest of the rows' budgets from the user, and the policy's plan."""
        governed, budget = [layer for layer in layers if layer.policy is self.backend.policy], max(shares)
        if not self.backend.policy.evicts and prompt > budget:
            raise BudgetError(
                f"policy {self.backend.policy.name!r} keeps every token: "
                f"a prompt of {prompt} exceeds its budget of {budget}"
            )
        rows = len(layers[0].tokens.valid)
        result = self._policy_plans(governed, shares)
        if self.stores_unrotated_keys and (
            len(governed) < len(layers) or len({plan.budgets_of_rows(rows) for plan in result}) > 1
        ):
            raise PolicyError(
                f"positions='cache': {self.backend.policy} gives the layers different budgets, and a query has one "
                "position among the cached tokens; use positions='absolute'"
            )
        policy_plans = iter(result)
        all_tokens = slots_for(self.backend.policy, None, prompt)
        planned = []
        for layer in layers:
            if layer.policy is self.backend.policy:
                planned.append((budget, next(policy_plans)))
            else:  # the layer keeps its window, or every token
                tokens = all_tokens if layer.site.window is None else layer.site.window
                planned.append((tokens, Plan(tokens, layer.policy.capacity(tokens))))
        return planned

    def _policy_plans(self, layers: list[PromptLayer], shares: list[int]) -> list[Plan]:
        """Return the plans of the layers that the backend's policy governs."""
        if not layers:
            return []
        attention = [layer.tokens.attention for layer in layers if isinstance(layer.tokens.attention, Attention)]
        valid = layers[0].tokens.valid
        plans = {share: self.backend.policy.plan(attention, valid, share) for share in sorted(set(shares))}
        result = [by_rows(dict(zip(plans, each, strict=True)), shares) for each in zip(*plans.values(), strict=True)]
        has_dynamic_sizes = self.backend.has_dynamic_sizes(layers[0].tokens.key.device)
        return result if has_dynamic_sizes else [plan.with_max_capacity for plan in result]

    def _check_windows(self, layers: list[PromptLayer], shares: list[int]) -> None:
        """Raise BudgetError if a layer's own window fits the budget of some rows only; see `_with_window_policy`."""
        for window in {each.site.window for each in layers if each.site.window is not None and each.policy.evicts}:
            if min(shares) < window <= max(shares):
                raise BudgetError(MIXED.format(budget=self.backend.budget, shares=shares, window=window))

    def _admit_layer(self, number: int, layer: PromptLayer, planned: tuple[int, Plan], by_row: bool) -> LayerCache:
        budget, plan = planned
        tokens, governed = layer.tokens, layer.policy is self.backend.policy
        if not governed:
            tokens = dataclasses.replace(tokens, pins=None)
        on_top = max(tokens.raised_budgets(layer.policy, (0,) * len(tokens.valid)))
        rows, heads, count, dim = tokens.key.shape
        layout = Layout(
            policy=layer.policy,
            budget=budget,
            capacity=plan.capacity + pinned_headroom(on_top),
            batch=rows,
            heads=heads,
            key_dim=dim,
            value_dim=tokens.value.shape[-1],
            dtype=tokens.key.dtype,
            device=tokens.key.device,
            stores_unrotated_keys=self.stores_unrotated_keys,
            layer=number if layer.policy.reads_layer else 0,
            kv_dtype=self.backend.kv_dtype,
            sharding=layer.site.sharding,
            crops=self.backend.crop > 0,
            exact_capacity=plan.max_capacity > 0 and self.backend.has_dynamic_sizes(tokens.key.device),
            row_budgets=by_row and governed,
        )
        layout = layout.with_head_classes()
        if tokens.pins is not None:
            layout = layout.with_pins(tokens.pins.on_top)
        absent = true_indices(~tokens.valid)
        kv_store = self.backend.kv_store
        slots, row_budgets, clocks = kv_store.admit_prompt(layout, tokens, plan)
        return LayerCache(
            self.backend,
            next(self.backend.cache_numbers),
            layout,
            slots,
            length=count,
            model_heads=layer.heads,
            window=layer.site.window,
            row_budgets=row_budgets,
            clocks=clocks,
            notes=self.notes,
            absent=absent,
            first_ids=self.first_ids,
            rotated_key=self.rotated_key,
            key_projections=layer.key_projections,
            output_projection=layer.output_projection,
            model_tensors=self.model_tensors,
        )


def _with_window_policy(layer: PromptLayer, budget: int) -> PromptLayer:
    """Return the layer, with the policy `Window` if the layer's own window fits into the budget."""
    return dataclasses.replace(layer, policy=policy_beside_window(layer.policy, budget, layer.site.window))
