"""Define the slots of one attention layer: fixed buffers for keys and values, and the metadata that policies read.

Keys and values never move while a model decodes; a policy only decides which slot is free next.  All tensors are
batch-first, so one index over rows reorders a conversation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpass.cache.layout import ROW_BUDGET, Layout
from kvpass.errors import PolicyError
from kvpass.lowering.formats import EncodedVectors
from kvpass.lowering.formats.base import SlotIndices, StoredTensors
from kvpass.policies.pinned_tokens import PINNED, Pins
from kvpass.policies.ranking import slots_by_position
from kvpass.policies.types import State, Tokens

FREE = -1
READ_ONLY_STATE = (ROW_BUDGET, PINNED)
"""The entries of the state that decode steps only read."""


@dataclasses.dataclass
class Slots:
    """The tensors of one layer.

    Attributes:
        key, value: vectors [B, Hkv, C, D] and [B, Hkv, C, Dv].
        position: int64 [B, H', C], the token's position among the real tokens of its row; -1 marks a free slot.
        index: int64 [B, H', C], its index in the padded sequence, which the model's masks count by.
        free: int64 [B, H'], the slot that the next token is written to.
        seen: int64 [B], real tokens seen.
        length: int64 [B], tokens seen, padding included.
        rank: int64 [B, H', C], the number among the cached tokens by position, if the layout tracks it.
        state: the policy's values by name, each [B, H', C], or [B, H', 1] for its `row_state`.
    """

    key: EncodedVectors
    value: EncodedVectors
    position: Tensor
    index: Tensor
    free: Tensor
    seen: Tensor
    length: Tensor
    rank: Tensor
    state: dict[str, Tensor]

    @staticmethod
    @torch.inference_mode(False)  # steps outside of inference mode also write to them
    def empty(layout: Layout) -> Slots:
        """Return slots without tokens."""
        rows, heads, capacity = layout.batch, layout.metadata_heads, layout.capacity
        meta = (rows, heads, capacity)

        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=layout.device)

        return Slots(
            key=EncodedVectors.empty(layout.key_format, (rows, layout.heads, capacity), layout.device),
            value=EncodedVectors.empty(layout.value_format, (rows, layout.heads, capacity), layout.device),
            position=integers(*meta, fill=FREE),
            index=integers(*meta, fill=FREE),
            free=integers(rows, heads),
            seen=integers(rows),
            length=integers(rows),
            rank=integers(*meta),
            state=empty_state(layout),
        )

    def on_meta(self, layout: Layout) -> Slots:
        """Return these slots with vectors in a layout's formats on the meta device."""
        shape, meta = (*self.key.shape[:2], self.capacity), torch.device("meta")
        key, value = (EncodedVectors.empty(each, shape, meta) for each in (layout.key_format, layout.value_format))
        return dataclasses.replace(self, key=key, value=value)

    def tokens(self, layout: Layout) -> Tokens:
        """Return the metadata that the policy reads."""
        rank = self.rank if layout.tracks_rank else None
        seen = self.seen[:, None, None]
        budget = layout.budget_in(self.state)
        return Tokens(self.position, seen, self.state, budget, self.capacity, rank, layout.sharding)

    @property
    def capacity(self) -> int:
        return self.position.shape[-1]

    @property
    def metadata(self) -> list[Tensor]:
        """All tensors except keys' and values', in the order of `names`."""
        return [self.position, self.index, self.free, self.seen, self.length, self.rank, *self.state.values()]

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the order of `names`; `with_tensors` is the inverse."""
        scales = [*self.key.parts[1:], *self.value.parts[1:]]
        return [self.key.codes, self.value.codes, *self.metadata, *scales]

    @property
    def names(self) -> list[str]:
        """The names of the tensors: `NAMES`, the policy's state, then the scales of keys and of values."""
        return [*NAMES, *self.state, *self.kv_names[2:]]

    @property
    def kv_names(self) -> list[str]:
        """The names of the tensors that store the vectors of K and V."""
        named = (("key", self.key), ("value", self.value))
        return ["key", "value", *(f"{name}_{part}" for name, vectors in named for part in vectors.format.names)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Slots:
        """Return slots like these with the tensors that `tensors` returned."""
        key, value, position, index, free, seen, length, rank, *rest = tensors
        state = dict(zip(self.state, rest[: len(self.state)], strict=True))
        scales = iter(rest[len(state) :])
        keys = EncodedVectors(self.key.format, (key, *itertools.islice(scales, len(self.key.parts) - 1)))
        return Slots(
            keys, EncodedVectors(self.value.format, (value, *scales)), position, index, free, seen, length, rank, state
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Slots:
        """Return slots with a batch-first function applied to each tensor."""
        mapped = self.with_tensors([function(tensor) for tensor in self.tensors()])
        if mapped.key.device.type == self.key.device.type:
            return mapped
        return dataclasses.replace(mapped, key=self.key.to_device(function), value=self.value.to_device(function))

    def cached_indices(self, layout: Layout, pinned: bool = False) -> Tensor:
        """Return the sorted indices of cached tokens, or of pinned ones: int64 [B, Hkv, n], filled up with -1."""
        position = self.position
        if pinned:
            position = torch.where(self.state.get(PINNED, torch.zeros_like(position, dtype=torch.bool)), position, FREE)
        index = torch.where(position >= 0, self.index, FREE)
        ordered = index.gather(-1, slots_by_position(position))
        count = int((position >= 0).sum(-1).max())
        return ordered[..., :count].expand(-1, layout.heads, -1).clone()

    @torch.no_grad()
    def pin_next(self, pins: Pins) -> None:
        """Pin the token that a decode step is about to write to the free slot."""
        mask = pins.mask[:, :, None].to(self.free.device)  # [B, 1, 1]
        self.state[PINNED].scatter_(-1, self.free[..., None], mask.expand(*self.free.shape, 1))
        if pins.on_top:
            self.state[ROW_BUDGET].add_(mask)

    def snapshot(self, layout: Layout, chunk: bool) -> SlotSnapshot:
        """Return the record that restores these slots after the next call, a decode step or a chunk."""
        return SlotSnapshot(self, () if chunk else (SavedContent.of(layout, self),))

    @property
    def by_class(self) -> tuple[Slots, ...]:
        """The slots of each class of heads; these slots have one class."""
        return (self,)

    def joined_classes(self, layout: Layout) -> Slots:
        """Return these slots, which have all heads in one rectangle."""
        return self

    def with_state_of(self, layout: Layout, budgets: Sequence[int]) -> Slots:
        """Return these slots with the entries of a layout's state; new row budgets are `budgets`."""
        fresh = empty_state(dataclasses.replace(layout, capacity=self.capacity))
        if ROW_BUDGET in fresh:
            fresh[ROW_BUDGET].copy_(torch.tensor(budgets).view(-1, 1, 1))
        return dataclasses.replace(self, state={name: self.state.get(name, new) for name, new in fresh.items()})

    def enlarge(self, layout: Layout) -> Slots:
        """Return larger slots of a layout with the same tokens."""
        slots, count = Slots.empty(layout), self.capacity
        slots.key.fill(self.key)
        slots.value.fill(self.value)
        for name in ("position", "index", "rank"):
            getattr(slots, name)[..., :count] = getattr(self, name)
        for name in layout.state():
            slots.state[name][..., :count] = self.state[name]
        for name in layout.row_state():
            slots.state[name].copy_(self.state[name])
        slots.seen.copy_(self.seen)
        slots.length.copy_(self.length)
        slots.free.copy_(next_free(layout, slots))
        return slots

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


NAMES = ("key", "value", "position", "index", "free", "seen", "length", "rank")


def select_heads(x: Tensor, heads: Tensor) -> Tensor:
    """Select the heads `heads`, int64 [B, h], of each row of a tensor [B, H, ...]."""
    return x[torch.arange(heads.shape[0], device=heads.device)[:, None], heads]


@dataclasses.dataclass
class ClassedSlots:
    """The slots of a layer whose KV heads have different budgets, one rectangle for each class of heads.

    The order of heads is a tensor: each row of a batch has its own, and one graph serves all orders.

    Attributes:
        by_class: the slots of each class, see `Layout.by_class`.
        order: int64 [B, Hkv], the KV heads in the order of the classes.
        inverse: int64 [B, Hkv], the index of each KV head in `order`.
    """

    by_class: tuple[Slots, ...]
    order: Tensor
    inverse: Tensor

    @staticmethod
    @torch.inference_mode(False)
    def empty(layout: Layout, order: Tensor | None = None) -> ClassedSlots:
        """Return slots without tokens, by default with the heads in their own order."""
        if order is None:
            order = torch.arange(layout.heads, device=layout.device).expand(layout.batch, -1)
        return ClassedSlots(tuple(map(Slots.empty, layout.by_class)), order.clone(), order.argsort(-1))

    @property
    def capacity(self) -> int:
        """The number of slots of the head with the most."""
        return max(each.capacity for each in self.by_class)

    @property
    def length(self) -> Tensor:
        """int64 [B], tokens seen, padding included."""
        return self.by_class[0].length

    @property
    def seen(self) -> Tensor:
        """int64 [B], real tokens seen."""
        return self.by_class[0].seen

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the order of `names`; `with_tensors` is the inverse."""
        return [*(tensor for each in self.by_class for tensor in each.tensors()), self.order, self.inverse]

    def with_tensors(self, tensors: Sequence[Tensor]) -> ClassedSlots:
        """Return slots like these with the tensors that `tensors` returned."""
        *rest, order, inverse = tensors
        remaining = iter(rest)
        parts = [each.with_tensors(list(itertools.islice(remaining, len(each.names)))) for each in self.by_class]
        return ClassedSlots(tuple(parts), order, inverse)

    @property
    def names(self) -> list[str]:
        """The names of the tensors: class 0's, the other classes' with a prefix, `order` and `inverse`."""
        return [*_prefix_names([each.names for each in self.by_class]), "order", "inverse"]

    @property
    def kv_names(self) -> list[str]:
        """The names of the tensors that store the vectors of K and V."""
        return _prefix_names([each.kv_names for each in self.by_class])

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> ClassedSlots:
        """Return slots with a batch-first function applied to each tensor."""
        parts = tuple(each.map_tensors(function) for each in self.by_class)
        with torch.inference_mode(False), torch.no_grad():
            return ClassedSlots(parts, function(self.order), function(self.inverse))

    def on_meta(self, layout: Layout) -> ClassedSlots:
        """Return these slots with vectors in a layout's formats on the meta device."""
        parts = zip(self.by_class, layout.by_class, strict=True)
        return dataclasses.replace(self, by_class=tuple(class_slots.on_meta(each) for class_slots, each in parts))

    def joined_classes(self, layout: Layout) -> Slots:
        """Return copies of the slots of all heads in one rectangle, the heads in the model's order."""
        rectangle = dataclasses.replace(layout, classes=(), capacity=self.capacity)
        slots = Slots.empty(rectangle)
        tensors_by_name = zip(*(each.tensors() for each in self.by_class), strict=True)
        joined = [self._join_classes(each, like) for each, like in zip(tensors_by_name, slots.tensors(), strict=True)]
        return slots.with_tensors(joined)

    def _join_classes(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Pad the tensors of all classes with the values of `like`, and concatenate them along the heads."""
        if like.ndim == 1:
            return parts[0].clone()
        padded = []
        for part in parts:
            widened = like[:, : part.shape[1]].clone()
            (widened[:, :, : part.shape[2]] if like.ndim > 2 else widened).copy_(part)
            padded.append(widened)
        return select_heads(torch.cat(padded, 1), self.inverse)

    def snapshot(self, layout: Layout, chunk: bool) -> SlotSnapshot:
        """Return the record that restores these slots after the next call."""
        return SlotSnapshot(self, () if chunk else tuple(map(SavedContent.of, layout.by_class, self.by_class)))

    def cached_indices(self, layout: Layout, pinned: bool = False) -> Tensor:
        """Return the indices of cached tokens as `Slots.cached_indices` does."""
        return self.joined_classes(layout).cached_indices(dataclasses.replace(layout, classes=()), pinned)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


AnySlots = Slots | ClassedSlots


@dataclasses.dataclass(frozen=True)
class SavedContent:
    """A copy of the content that a decode step overwrites in the slots of a layer."""

    slot_index: SlotIndices | None  # of each head's vector; None if all slots are saved
    key: StoredTensors
    value: StoredTensors
    others: tuple[Tensor, ...]  # all metadata, in the order of `Slots.metadata`

    @staticmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def of(layout: Layout, slots: Slots) -> SavedContent:
        """Save the vectors in the free slot of each head; all slots if the policy merges or aligns."""
        rewrites = layout.policy.merges or layout.policy.aligns in ("step", "compact")
        slot_index = None if rewrites else row_indices(slots.free.clone(), layout.heads)
        others = tuple(tensor.clone() for tensor in slots.metadata)
        return SavedContent(
            slot_index, _clone_vectors(slots.key, slot_index), _clone_vectors(slots.value, slot_index), others
        )

    def write_to(self, slots: Slots) -> None:
        for vectors, parts in ((slots.key, self.key), (slots.value, self.value)):
            for buffer, part in zip(vectors.parts, parts, strict=True):
                buffer[slice(None) if self.slot_index is None else self.slot_index] = part
        for buffer, other in zip(slots.metadata, self.others, strict=True):
            buffer.copy_(other)


def _clone_vectors(vectors: EncodedVectors, slot_index: SlotIndices | None) -> StoredTensors:
    return tuple(part.clone() if slot_index is None else part[slot_index] for part in vectors.parts)


@dataclasses.dataclass(frozen=True)
class SlotSnapshot:
    """The slots of a layer before a call.

    Attributes:
        slots: the buffers.
        saved: for each class of heads the content that a decode step overwrites; () for a chunk, which overwrites none.
    """

    slots: AnySlots
    saved: tuple[SavedContent, ...] = ()

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> AnySlots:
        """Restore the content and return the slots."""
        for saved, slots in zip(self.saved, self.slots.by_class if self.saved else (), strict=True):
            saved.write_to(slots)
        return self.slots


def _prefix_names(names: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of all classes; names after the first class's have a prefix."""
    return [f"class_{i}_{name}" if i else name for i, each in enumerate(names) for name in each]


def empty_slots(layout: Layout) -> AnySlots:
    """Return slots of a layout without tokens."""
    return ClassedSlots.empty(layout) if layout.classes else Slots.empty(layout)


def empty_state(layout: Layout) -> State:
    """Return the policy's state for slots without tokens; refuse entries with the names of other tensors."""
    own, taken = {**layout.policy.state(), **layout.policy.row_state()}, {*READ_ONLY_STATE, *Slots.__annotations__}
    formats = {"key": layout.key_format, "value": layout.value_format}
    taken |= {f"{name}_{part}" for name, each in formats.items() for part in each.names}
    if used := sorted(own.keys() & taken):
        owner = type(layout.policy).__qualname__
        raise PolicyError(f"{owner}: its state cannot have an entry {used[0]!r}, a tensor of the slots: rename it")
    shape, device = (layout.batch, layout.metadata_heads), layout.device
    state = {
        name: torch.zeros(*shape, layout.capacity, dtype=dtype, device=device) for name, dtype in layout.state().items()
    }
    for name, initial in layout.row_state().items():
        dtype = torch.float32 if isinstance(initial, float) else None
        state[name] = torch.full((*shape, 1), initial, dtype=dtype, device=device)
    return state


def row_indices(slot: Tensor, heads: int) -> SlotIndices:
    """Return the indices of one slot per head [B, Hkv], at `slot` [B, H']."""
    row = torch.arange(slot.shape[0], device=slot.device)[:, None]
    head = torch.arange(heads, device=slot.device)[None]
    return row, head, slot.expand(-1, heads)


def next_free(layout: Layout, slots: Slots) -> Tensor:
    """Return the slot [B, H'] that the next token is written to: a free one, unless the policy overwrites."""
    if layout.policy.overwrites:
        return layout.eviction.victim(slots.tokens(layout))
    return (slots.position < 0).int().argmax(-1)


def next_rank(position: Tensor, free: Tensor, decodes: bool) -> Tensor:
    """Return int64 [B], the rank of the first new token when it attends, from tensors of `Slots`.

    A chunk attends to all cached tokens.  A decode step does not attend to the token that it overwrites.
    """
    live = position[:, 0] >= 0  # [B, C]
    overwritten = live.gather(-1, free[:, :1])[:, 0].long()  # [B], 1 if the new token overwrites a token
    return live.sum(-1) - overwritten if decodes else live.sum(-1)
