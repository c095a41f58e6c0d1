"""The slots of one attention layer: fixed buffers for keys and values, and the metadata that policies work on.

Keys and values never move while a model decodes: a policy only decides which slot is free next.
Everything is batch-first, so that one index over rows reorders a conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvpass.policies.base import LATE, Attention, Merge, Policy, State, Tokens, rank_of
from kvpass.precision import wide

FREE = -1
PIECE = 1024  # evicted rows that are merged at a time


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a compiled decode graph depends on; it is compiled again only if this differs.

    Attributes:
        policy: decides what stays.
        budget: tokens kept between steps.
        capacity: slots, the one for the token being written included.
        rows, heads, key_dim, value_dim: B, Hkv, D and Dv.
        dtype, device: of keys and values.
        ranked: keys are stored before their rotary embedding and numbered by rank (positions="cache").
        layer: the number of the layer, for policies whose `align` asks for it; else 0, so that layers are alike.
    """

    policy: Policy
    budget: int
    capacity: int
    rows: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    ranked: bool
    layer: int = 0

    @property
    def groups(self) -> int:
        """H': how many sets of metadata the layer has."""
        return 1 if self.policy.heads == "shared" else self.heads

    @property
    def tracks_rank(self) -> bool:
        """Whether decode steps keep `Slots.rank` up."""
        return self.ranked or self.policy.ranks


@dataclasses.dataclass
class Slots:
    """The tensors of one layer.

    Attributes:
        key, value: [B, Hkv, C, D] and [B, Hkv, C, Dv].
        position: int64 [B, H', C], the token's place among the real tokens of its row; -1 is free.
        index: int64 [B, H', C], its place in the padded sequence, which is what the model's masks count.
        free: int64 [B, H'], the slot that the next token is written to.
        seen: int64 [B], real tokens seen.
        length: int64 [B], tokens seen, padding included.
        rank: int64 [B, H', C], the place among the held tokens, if the layout tracks it.
        state: what the policy remembers, each [B, H', C], or [B, H', 1] for its `row_state`.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    index: Tensor
    free: Tensor
    seen: Tensor
    length: Tensor
    rank: Tensor
    state: dict[str, Tensor]

    @staticmethod
    @torch.inference_mode(False)  # steps outside of inference mode write to them, too
    def empty(layout: Layout) -> Slots:
        """Slots that hold nothing."""
        rows, groups, capacity = layout.rows, layout.groups, layout.capacity
        meta = (rows, groups, capacity)

        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=layout.device)

        def floats(dim: int) -> Tensor:
            return torch.zeros(rows, layout.heads, capacity, dim, dtype=layout.dtype, device=layout.device)

        return Slots(
            key=floats(layout.key_dim),
            value=floats(layout.value_dim),
            position=integers(*meta, fill=FREE),
            index=integers(*meta, fill=FREE),
            free=integers(rows, groups),
            seen=integers(rows),
            length=integers(rows),
            rank=integers(*meta),
            state=first_state(layout),
        )

    def tokens(self, layout: Layout) -> Tokens:
        """What the policy sees of the slots."""
        rank = self.rank if layout.tracks_rank else None
        return Tokens(self.position, self.seen[:, None, None], self.state, layout.budget, self.capacity, rank)

    @property
    def capacity(self) -> int:
        return self.position.shape[-1]

    def next_rank(self, count: int = 1) -> Tensor:
        """int64 [B, 1, 1]: the place among the held tokens of the first of `count` new ones, when it attends.

        A chunk attends to all held tokens; a single one no longer to the token that it overwrites, if any.
        """
        live = self.position >= 0
        held = live.sum(-1, keepdim=True)
        return (held - live.gather(-1, self.free[..., None]).long() if count == 1 else held)[:, :1]

    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order; `of` is the inverse."""
        fixed = [self.key, self.value, self.position, self.index, self.free, self.seen, self.length, self.rank]
        return [*fixed, *self.state.values()]

    @staticmethod
    def of(tensors: list[Tensor], state: Iterable[str]) -> Slots:
        """From what `tensors` returned and the names of the state."""
        key, value, position, index, free, seen, length, rank, *remembered = tensors
        named = dict(zip(state, remembered, strict=True))
        return Slots(key, value, position, index, free, seen, length, rank, named)

    @torch.inference_mode(False)
    @torch.no_grad()
    def map(self, function: Callable[[Tensor], Tensor]) -> Slots:
        return Slots.of([function(tensor) for tensor in self.tensors()], self.state)

    def held(self, layout: Layout) -> Tensor:
        """int64 [B, Hkv, n]: places of the held tokens in the padded sequence, sorted, -1 after the last."""
        ordered = self.index.gather(-1, rows_in_order(self.position))
        count = int((self.position >= 0).sum(-1).max())
        return ordered[..., :count].expand(-1, layout.heads, -1).clone()

    def grown(self, layout: Layout) -> Slots:
        """The same tokens in more slots."""
        slots, count = Slots.empty(layout), self.capacity
        slots.key[:, :, :count], slots.value[:, :, :count] = self.key, self.value
        for name in ("position", "index", "rank"):
            getattr(slots, name)[..., :count] = getattr(self, name)
        for name in layout.policy.state():
            slots.state[name][..., :count] = self.state[name]
        for name in layout.policy.row_state():
            slots.state[name].copy_(self.state[name])
        slots.seen.copy_(self.seen)
        slots.length.copy_(self.length)
        slots.free.copy_(layout.policy.victim(slots.tokens(layout)))
        return slots

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of a prompt or of a later turn.

    Attributes:
        key, value: [B, Hkv, q, D] and [B, Hkv, q, Dv]; the keys as they are to be stored.
        real: bool [B, q], false for padding.
        attention: what the chunk's queries paid to [held slots, chunk], N = C + q (N = q for a prompt).
    """

    key: Tensor
    value: Tensor
    real: Tensor
    attention: Attention


def first_state(layout: Layout) -> State:
    """What the policy remembers of slots that hold nothing."""
    shape, device = (layout.rows, layout.groups), layout.device
    tokens = {
        name: torch.zeros(*shape, layout.capacity, dtype=dtype, device=device)
        for name, dtype in layout.policy.state().items()
    }
    rows = {
        name: torch.full((*shape, 1), first, dtype=torch.float32 if isinstance(first, float) else None, device=device)
        for name, first in layout.policy.row_state().items()
    }
    return {**tokens, **rows}


def admit(layout: Layout, held: Slots | None, chunk: Chunk, limit: int | None = None) -> Slots:
    """Take in a chunk: the policy says which of the held tokens and the chunk's stay.

    The survivors are written to slots 0, 1, ... in the order of their positions.  `held` is overwritten in
    place if it has the layout's capacity.  Runs once per prompt or turn, uncompiled.

    Args:
        limit: the layer's own budget, if the policy's plan gives layers different ones; else the layout's.

    Returns:
        Slots of the layout's capacity; of more when the policy defers and this is the prompt.
    """
    past = Slots.empty(_roomy(layout, chunk)) if held is None else held
    tokens, index = _candidates(layout, past, chunk, held is None)
    tokens = dataclasses.replace(tokens, budget=layout.budget if limit is None else limit)
    tokens = tokens.updated(layout.policy.absorb(tokens, chunk.attention))
    stays, changes = layout.policy.sweep(tokens)
    tokens = tokens.updated(changes)
    key = chunk.key if held is None else torch.cat([held.key, chunk.key], 2)
    value = chunk.value if held is None else torch.cat([held.value, chunk.value], 2)
    slots = past if held is None or held.capacity == layout.capacity else Slots.empty(layout)
    _fill(layout, slots, tokens, stays, index, key, value)
    slots.seen.copy_(tokens.seen[:, 0, 0])
    slots.length.copy_(index[:, 0, -1] + 1)
    if layout.policy.merges:
        _merge_gone(layout, slots, tokens, tokens.live & ~stays, key, value)
    slots.free.copy_(_next_slot(layout, slots))
    if held is not None and layout.policy.aligns in ("step", "sweep"):
        _align(layout, slots, chunk.real.shape[1])
    return slots


def _align(layout: Layout, slots: Slots, gone: int) -> None:
    """Let the policy rewrite the rows, as it does after steps."""
    weights = [tensor.to(layout.device) for tensor in layout.policy.weights()]
    key, value, changes = layout.policy.align(slots.tokens(layout), slots.key, slots.value, layout.layer, weights, gone)
    slots.key.copy_(key)
    slots.value.copy_(value)
    for name, changed in changes.items():
        slots.state[name].copy_(changed)


def _next_slot(layout: Layout, slots: Slots) -> Tensor:
    """The slot [B, H'] that the next token is written to: a free one, unless the policy overwrites."""
    if layout.policy.overwrites:
        return layout.policy.victim(slots.tokens(layout))
    return (slots.position < 0).int().argmax(-1)


def _roomy(layout: Layout, chunk: Chunk) -> Layout:
    """The layout for a prompt, which a policy that defers holds whole, with one slot to spare."""
    prompt = chunk.real.shape[1] + 1 if layout.policy.defers else 0
    return dataclasses.replace(layout, capacity=max(layout.capacity, prompt))


def _candidates(layout: Layout, past: Slots, chunk: Chunk, prompt: bool) -> tuple[Tokens, Tensor]:
    """The tokens of [held slots, chunk], N = C + q, and their places in the padded sequence [B, H', N]."""
    policy, count = layout.policy, chunk.real.cumsum(-1)  # [B, q]
    fresh = past.seen[:, None] + count - 1
    running = past.length[:, None] + torch.arange(chunk.real.shape[1], device=layout.device)

    def joined(old: Tensor, new: Tensor) -> Tensor:
        new = new.expand(-1, layout.groups, -1)
        return new if prompt else torch.cat([old, new], -1)

    arriving, state = policy.arrive(chunk.key), dict(past.state)
    for name, dtype in policy.state().items():
        state[name] = joined(past.state[name], arriving.get(name, torch.zeros_like(fresh, dtype=dtype)[:, None]))
    position = joined(past.position, fresh.masked_fill(~chunk.real, FREE)[:, None])
    tokens = Tokens(
        position=position,
        seen=(past.seen + count[:, -1])[:, None, None],
        state=state,
        budget=layout.budget,
        held=0 if prompt else past.capacity,
        rank=rank_of(position) if policy.ranks else None,
    )
    return tokens, joined(past.index, running[:, None])


def _fill(
    layout: Layout, slots: Slots, tokens: Tokens, stays: Tensor, index: Tensor, key: Tensor, value: Tensor
) -> None:
    """Write the tokens that stay to the first slots and free the others."""
    position = torch.where(stays, tokens.position, FREE)
    kept = rows_in_order(position)[..., : slots.capacity]  # [B, H', n]
    count = kept.shape[-1]
    for buffer, rows in ((slots.key, key), (slots.value, value)):
        buffer[:, :, :count] = gathered_rows(rows, kept)
    for buffer, values in ((slots.position, position), (slots.index, index.masked_fill(~stays, FREE))):
        chosen = values.gather(-1, kept)
        buffer.fill_(FREE)
        buffer[..., :count] = chosen
    for name in layout.policy.state():
        chosen = tokens.state[name].gather(-1, kept)
        slots.state[name].zero_()
        slots.state[name][..., :count] = chosen
    for name in layout.policy.row_state():
        slots.state[name].copy_(tokens.state[name])
    slots.rank.copy_((slots.position >= 0).cumsum(-1) - 1)


def rows_in_order(position: Tensor) -> Tensor:
    """The places of the tokens sorted by position, free ones last."""
    return torch.where(position < 0, LATE, position).argsort(-1)


def gathered_rows(rows: Tensor, chosen: Tensor) -> Tensor:
    """Keys or values [B, Hkv, N, D] at places [B, H', n]: [B, Hkv, n, D]."""
    places = chosen.expand(-1, rows.shape[1], -1)[..., None].expand(-1, -1, -1, rows.shape[-1])
    return rows.gather(2, places)


def _merge_gone(layout: Layout, slots: Slots, tokens: Tokens, gone: Tensor, key: Tensor, value: Tensor) -> None:
    """Let the policy merge the tokens that go into the filled slots."""
    count = int(gone.sum(-1).max())
    places = rows_in_order(torch.where(gone, tokens.position, FREE))[..., :count]  # [B, H', E]
    merge = layout.policy.fold(slots.tokens(layout), slots.key, gathered_rows(key, places), gone.gather(-1, places))
    for buffer, rows in ((slots.key, key), (slots.value, value)):
        _mix(buffer, rows, places, merge)
    for name, changed in merge.state.items():
        slots.state[name].copy_(changed)


def _mix(buffer: Tensor, rows: Tensor, places: Tensor, merge: Merge) -> None:
    """buffer [B, Hkv, C, D] with the rows [B, Hkv, N, D] at `places` [B, H', E] merged into it, a piece at a time."""
    heads = buffer.shape[1]
    into = merge.into.expand(-1, heads, -1)
    share = torch.zeros(buffer.shape[:3], device=buffer.device)
    share = share.scatter_add(-1, into, merge.share.expand(-1, heads, -1))[..., None]
    total = merge.own * wide(buffer)
    for start in range(0, places.shape[-1], PIECE):
        piece = slice(start, start + PIECE)
        weighted = wide(gathered_rows(rows, places[..., piece])) * merge.weight[..., piece, None]
        total.scatter_add_(2, into[..., piece, None].expand_as(weighted), weighted)
    buffer.copy_(torch.where(share > 0, total / (merge.own + share), wide(buffer)))
