"""Make synthetic slots with the tokens of a conversation: arguments of a rewritten step graph.

Each head of each row stores the tokens in other slots, and free slots contain other tokens' keys and values.  Slots are
copied on demand, and equal layers share them, or at least their keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.layout import Layout
from kvpass.cache.slots import FREE, AnySlots, ClassedSlots, Slots, empty_state, select_heads
from kvpass.lowering.formats import EncodedVectors
from kvpass.policies.ranking import rank_of
from kvpass.rewrite.validation.conversation import Conversation


class SyntheticSlots:
    """The slots of every layer in a conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation, self.case = conversation, conversation.case
        self._slots: dict[Any, AnySlots] = {}

    def argument_factory(self) -> Callable[[int], Any]:
        """Return a function that creates an argument of the rewritten graph: slots are copied on demand."""
        conversation = self.conversation
        arguments = tuple(map(conversation.plain_argument, range(len(conversation.arguments_without_past))))
        slots = [self.for_layer(layer) for layer in range(len(self.case.given.layouts))]
        host_values = conversation.signature.run_host_graph(arguments)
        others = conversation.signature.call_arguments(arguments, host_values, slots, conversation.count)
        shared = [set() if self._rewrites_vectors(layer) else set(x.kv_names) for layer, x in enumerate(slots)]
        of_slots = [
            (tensor, name in unchanged)
            for each, unchanged in zip(slots, shared, strict=True)
            for name, tensor in zip(each.names, each.tensors(), strict=True)
        ]
        rest = [*conversation.signature.policy_weights, *others]

        def argument(index: int) -> Any:
            if index >= len(of_slots):
                return rest[index - len(of_slots)]
            tensor, is_unchanged = of_slots[index]
            return tensor if is_unchanged else tensor.clone()

        return argument

    def _rewrites_vectors(self, layer: int) -> bool:
        """Return whether a step reads a layer's slots after a write, or writes to more than the free slot."""
        policy = self.case.given.layouts[layer].policy
        return bool(self.case.given.sites[layer].shared_by) or policy.merges or policy.aligns != "never"

    def for_layer(self, layer: int) -> AnySlots:
        """Return the slots of a layer; equal layers share them."""
        layout, original = self.case.given.layouts[layer], self.case.given.slots[layer]
        kind = (dataclasses.replace(layout, layer=0), original.capacity, self.conversation.stored[layer])
        if kind not in self._slots:
            self._slots[kind] = self._make_slots(layer, layout, original)
        return self._slots[kind]

    def _make_slots(self, layer: int, layout: Layout, original: AnySlots) -> AnySlots:
        if isinstance(original, Slots):
            return self._fill_slots(layer, layout, original, self.conversation.vectors(layer))
        order = _shuffled(original.order.shape).to(original.order)
        by_class, classes = [], zip(layout.by_class, original.by_class, layout.head_slices, strict=True)
        for class_layout, class_slots, heads in classes:
            chosen = order[:, heads]
            select = functools.partial(select_heads, heads=chosen)
            pair = [x.map_tensors(select) for x in self.conversation.vectors(layer)]
            by_class.append(self._fill_slots(layer, class_layout, class_slots, (pair[0], pair[1])))
        return ClassedSlots(tuple(by_class), order, order.argsort(-1))

    def _fill_slots(
        self, layer: int, layout: Layout, original: Slots, vectors: tuple[EncodedVectors, EncodedVectors]
    ) -> Slots:
        conversation, shape, kept = self.conversation, original.position.shape, self.conversation.kept[layer]
        number = _shuffled(shape)
        is_used, token = number < len(kept), kept[number.clamp(max=len(kept) - 1)]
        valid = conversation.valid[:, None].expand(-1, shape[1], -1).gather(-1, token) & is_used
        positions = (conversation.valid.cumsum(-1) - 1)[:, None].expand(-1, shape[1], -1).gather(-1, token)
        position = torch.where(valid, positions, FREE).to(layout.device)
        indices = torch.where(
            is_used, token - conversation.count + conversation.stored[layer], number % conversation.stored[layer]
        )
        key, value = (x.gather(indices.to(layout.device)) for x in vectors)
        return Slots(
            key=key,
            value=value,
            position=position,
            index=torch.where(valid, token, FREE).to(layout.device),
            free=self._next_slot(layer, original).to(original.free),
            seen=conversation.valid.sum(-1).to(original.seen),
            length=torch.full_like(original.length, conversation.count),
            rank=torch.where(position >= 0, rank_of(position), 0),
            state=empty_state(dataclasses.replace(layout, capacity=original.capacity)),
        )

    def _next_slot(self, layer: int, original: Slots) -> Tensor:
        """Return the slot of the next token, int64 [B, H']."""
        shape = original.position.shape
        return _shuffled(shape).argsort(-1)[..., min(len(self.conversation.kept[layer]), shape[-1] - 1)]

    def heads(self, layer: int, head_class: int) -> Tensor | None:
        """Return the KV heads in a class of a layer's heads, int64 [B, h]; None if there are no classes."""
        slots = self.for_layer(layer)
        return (
            None if isinstance(slots, Slots) else slots.order[:, self.case.given.layouts[layer].head_slices[head_class]]
        )

    def key_index_of_slots(self, layer: int, head_class: int = 0) -> Tensor:
        """Return the index of each slot's token among cached and new tokens, int64 [B, H', N]; -1 if free."""
        conversation, new, kept = self.conversation, self.case.query_len, self.conversation.kept[layer]
        tokens = self.for_layer(layer).by_class[head_class].index
        if self.case.context.decodes:
            free = self._next_slot(layer, self.case.given.slots[layer].by_class[head_class])
            tokens = tokens.scatter(-1, free.to(tokens.device)[..., None], conversation.count)
        else:
            chunk = torch.arange(conversation.count, conversation.count + new, device=tokens.device)
            tokens = torch.cat([tokens, chunk.expand(*tokens.shape[:2], -1)], -1)
        column_of = torch.full((conversation.count + new + 1,), -1)
        column_of[kept] = torch.arange(len(kept))
        column_of[conversation.count : -1] = torch.arange(new) + len(kept)
        return column_of.to(tokens.device)[tokens]  # FREE is the last


def _shuffled(shape: torch.Size) -> Tensor:
    """Return random numbers of the slots' tokens, int64 [B, H', C]; the highest ones are for free slots."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(shape[-1])).argsort(-1)
