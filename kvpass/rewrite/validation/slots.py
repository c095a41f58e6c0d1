"""The slots that hold the tokens of a made-up conversation: arguments of a rewritten step graph.

In each head of each row the tokens lie in other slots, and free slots hold rows of other tokens.  Slots are copied when
they are asked for, and layers that are alike share them, or at least their rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.slots import FREE, Layout, Slots, first_state
from kvpass.policies.base import rank_of
from kvpass.rewrite.validation.conversation import Conversation
from kvpass.rewrite.validation.interpreter import copied


class MadeUpSlots:
    """The slots of every layer in a conversation."""

    def __init__(self, made: Conversation) -> None:
        self.made, self.step = made, made.step
        self._made: dict[Any, Slots] = {}

    def flat(self) -> FlatArguments:
        """The arguments of the rewritten graph."""
        made = self.made
        arguments = tuple(map(copied, made.plain))
        slots = [self.of(layer) for layer in range(len(self.step.layouts))]
        given = made.rewrite.call_arguments(arguments, made.rewrite.host_precomputed(arguments), slots, made.count)
        keeps = [not self._rewrites_rows(layer) for layer in range(len(slots))]
        return FlatArguments(slots, keeps, [*made.rewrite.weights, *given])

    def _rewrites_rows(self, layer: int) -> bool:
        """Whether a step reads a layer's rows again after it wrote to them, or writes to more than the free slot."""
        policy = self.step.layouts[layer].policy
        return bool(self.step.sites[layer].shared_by) or policy.merges or policy.aligns != "never"

    def of(self, layer: int) -> Slots:
        """The slots of a layer; the same for layers that are alike."""
        layout, given = self.step.layouts[layer], self.step.slots[layer]
        kind = (dataclasses.replace(layout, layer=0), given.capacity, self.made.stored[layer])
        if kind not in self._made:
            self._made[kind] = self._filled(layer, layout, given)
        return self._made[kind]

    def _filled(self, layer: int, layout: Layout, given: Slots) -> Slots:
        made, shape, kept = self.made, given.position.shape, self.made.kept[layer]
        order = _order(shape)
        holds, token = order < len(kept), kept[order.clamp(max=len(kept) - 1)]
        valid = made.valid[:, None].expand(-1, shape[1], -1).gather(-1, token) & holds
        ranks = (made.valid.cumsum(-1) - 1)[:, None].expand(-1, shape[1], -1).gather(-1, token)
        position = torch.where(valid, ranks, FREE).to(layout.device)
        rows = torch.where(holds, token - made.count + made.stored[layer], order % made.stored[layer])
        key, val = (x.gathered(rows.to(layout.device)) for x in made.rows(layer))
        return Slots(
            key=key,
            value=val,
            position=position,
            index=torch.where(valid, token, FREE).to(layout.device),
            free=self._free(layer).to(given.free),
            seen=made.valid.sum(-1).to(given.seen),
            length=torch.full_like(given.length, made.count),
            rank=torch.where(position >= 0, rank_of(position), 0),
            state=first_state(dataclasses.replace(layout, capacity=given.capacity)),
        )

    def _free(self, layer: int) -> Tensor:
        """int64 [B, H']: the slot that a new token is written to."""
        shape = self.step.slots[layer].position.shape
        return _order(shape).argsort(-1)[..., min(len(self.made.kept[layer]), shape[-1] - 1)]

    def columns(self, layer: int) -> Tensor:
        """int64 [B, H', N]: of each slot when queries attend, then of a chunk, the column of its token.

        Columns are counted among those that slots hold and those of the new tokens; -1 is a free slot.
        """
        made, new, kept = self.made, self.step.queries, self.made.kept[layer]
        tokens = self.of(layer).index
        if self.step.context.decodes:
            tokens = tokens.scatter(-1, self._free(layer).to(tokens.device)[..., None], made.count)
        else:
            chunk = torch.arange(made.count, made.count + new, device=tokens.device)
            tokens = torch.cat([tokens, chunk.expand(*tokens.shape[:2], -1)], -1)
        numbers = torch.full((made.count + new + 1,), -1)
        numbers[kept] = torch.arange(len(kept))
        numbers[made.count : -1] = torch.arange(new) + len(kept)
        return numbers.to(tokens.device)[tokens]  # FREE is the last


def _order(shape: torch.Size) -> Tensor:
    """int64 [B, H', C]: which of the tokens each slot holds, by number among them; higher for free slots."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(shape[-1])).argsort(-1)


@dataclasses.dataclass(frozen=True)
class FlatArguments:
    """The arguments of a rewritten graph: copies of the slots of each layer when they are asked for, then the others.

    Attributes:
        templates: slots of each layer; keeps: whether the rows of a layer need no copy.
    """

    templates: Sequence[Slots]
    keeps: Sequence[bool]
    others: Sequence[Any]

    def __call__(self, number: int) -> Any:
        for slots, keeps in zip(self.templates, self.keeps, strict=True):
            names = slots.names
            if number < len(names):
                tensor = slots.tensors()[number]
                return tensor if keeps and names[number] in slots.stored else tensor.clone()
            number -= len(names)
        return self.others[number]
