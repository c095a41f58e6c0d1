"""Store cached tokens in slots: admit prompts and chunks, pin tokens, and weigh tokens by the output projection."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from kvpass.cache.admission import TokensToAdmit, admit, attention_of_chunk, split_by_class
from kvpass.cache.chunk_step import chunk_operands
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.layout import Layout
from kvpass.cache.slots import AnySlots, Slots, empty_slots
from kvpass.capture.canonical import SiteFacts
from kvpass.errors import CacheHandleError
from kvpass.lowering.attention_statistics import StatisticsOperands
from kvpass.policies.budgets import Plan
from kvpass.policies.pinned_tokens import PINNED, Pins, check_pinned
from kvpass.policies.types import Attention, Clock
from kvpass.runtime.cache_changes import admit_chunk, change_layout, mark_addresses_static
from kvpass.runtime.call_context import call_pins
from kvpass.runtime.clocks import clocks_after
from kvpass.runtime.cropping import AdmittedChunk


class KVStore:
    """Storage of tokens in slots; a class, so that tests can store tokens by other means."""

    def admit_prompt(
        self, layout: Layout, prompt: TokensToAdmit, plan: Plan
    ) -> tuple[AnySlots, tuple[int, ...], tuple[Clock, ...]]:
        """Return the storage of a prompt's tokens (`LayerCache.slots`), the rows' budgets, and their clocks."""
        row_budgets = plan.budgets_of_rows(layout.batch)
        slots = admit(layout, None, prompt, row_budgets)
        mark_addresses_static(slots)
        row_budgets = prompt.raised_budgets(layout.policy, row_budgets)
        return slots, row_budgets, clocks_after(layout, itertools.repeat(()), prompt.valid, row_budgets)

    def make_room_for_pins(self, cache: LayerCache, pins: Pins) -> None:
        """Prepare a cache for a call that pins tokens, or raise BudgetError if they leave too little of the budget."""
        layout, slots = cache.layout, cache.slots
        assert isinstance(slots, Slots)  # policies with classes of heads take no pins
        policy, capacity = layout.policy, layout.capacity
        new = torch.full_like(pins.later, pins.mask.shape[1]) if policy.keep_prompt else pins.mask.sum(-1) + pins.later
        if pins.on_top:
            most = max(limit + more for limit, more in zip(cache.row_budgets, new.tolist(), strict=True))
            capacity = max(capacity, policy.capacity(layout.budget + pinned_headroom(most - layout.budget)))
        elif PINNED in slots.state or bool(new.any()):
            pinned_before = (
                (slots.state[PINNED] & (slots.position >= 0)).sum(-1).amax(-1) if PINNED in slots.state else 0
            )
            counts = (pinned_before + new).tolist()
            rest, pinned = min((limit - count, count) for limit, count in zip(cache.row_budgets, counts, strict=True))
            check_pinned(policy, pinned, rest)
        pinned_layout = layout.with_pins(pins.on_top)
        change_layout(cache, pins=pinned_layout.pins, row_budgets=pinned_layout.row_budgets, capacity=capacity)

    def pin(self, cache: LayerCache, pins: Pins) -> None:
        """Pin the token of a decode step, before the step writes it to the free slot."""
        assert isinstance(cache.slots, Slots)
        cache.slots.pin_next(pins)
        if pins.on_top:
            pinned = pins.mask[:, 0].tolist()
            cache.row_budgets = tuple(limit + more for limit, more in zip(cache.row_budgets, pinned, strict=True))

    def admit_step(self, cache: LayerCache, site: SiteFacts, results: list[Tensor]) -> AdmittedChunk | None:
        """Admit the chunk that a step graph returned; None for a single token, which the graph itself has written."""
        if not results:
            return None
        layout, policy = cache.layout, cache.layout.policy
        key, value, valid, *others = results
        by_class, statistics_operands = split_by_class(layout, others), list[StatisticsOperands]()
        for class_layout, class_results in zip(layout.by_class, by_class, strict=True):
            operands = class_results[len(policy.statistics) :]
            if operands:  # query, keys, mask and sink, see `cache.chunk_step.chunk_step`
                statistics_operands.append(chunk_operands(class_layout, site.scale, site.cap, *operands))
        attention = attention_of_chunk(layout, by_class, valid)
        pins = call_pins() if policy is cache.backend.policy else None
        chunk = TokensToAdmit(
            key, value, valid, attention, pins, output_projection_of(cache), tuple(statistics_operands)
        )
        admit_chunk(cache, chunk, _spare_slots(cache) if cache.backend.crop else None)
        return AdmittedChunk(dataclasses.replace(chunk, attention=Attention()), cache.slots)


def _spare_slots(cache: LayerCache) -> AnySlots:
    """Return slots for a chunk: the slots of the undo record that this chunk replaces, or new ones."""
    earlier_slots = [each.snapshot.slots for each in cache.undo_records if each.snapshot and not each.snapshot.saved]
    form = (cache.slots.names, cache.layout.capacity)
    fitting = (slots for slots in earlier_slots if slots is not cache.slots and (slots.names, slots.capacity) == form)
    return next(fitting, None) or empty_slots(cache.layout)


def pinned_headroom(tokens: int) -> int:
    """Return the slots for `tokens` pinned tokens above the budget: a power of two, so that prompts share graphs."""
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0


def output_weight_by_head(weight: Tensor, heads: int, dim: int) -> Tensor:
    """Return the weight [E, Hq Dv] of an output projection as `TokensToAdmit.output_projection`, [1, Hkv, G, Dv, E]."""
    return torch.unflatten(weight.T, 0, (1, heads, -1, dim))


def output_projection_of(cache: LayerCache) -> Tensor | None:
    """Return `TokensToAdmit.output_projection` for a chunk of a layer; None for a policy that does not read it."""
    if not cache.layout.policy.projects:
        return None
    weight = None if cache.output_projection is None else cache.output_projection()
    if weight is None:
        raise CacheHandleError(
            f"{cache.layout.policy.name!r} weighs the tokens of a turn by the model's output projection, which a cache "
            "from a file, or of a model that was deleted, does not have: start again with the whole conversation"
        )
    return output_weight_by_head(weight.detach(), cache.layout.heads, cache.layout.value_dim)
