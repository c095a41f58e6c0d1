"""The slots of one attention layer: fixed buffers for keys and values, and the metadata that policies work on.

Keys and values never move while a model decodes: a policy only decides which slot is free next.
Everything is batch-first, so that one index over rows reorders a conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from kvpass.policies.base import Attention, Policy, Tokens

FREE = -1


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

    @property
    def groups(self) -> int:
        """H': how many sets of metadata the layer has."""
        return 1 if self.policy.heads == "shared" else self.heads


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
        rank: int64 [B, H', C], the place among the held tokens; only read when the layout is ranked.
        state: what the policy remembers, each [B, H', C].
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
            state={
                name: torch.zeros(meta, dtype=dtype, device=layout.device)
                for name, dtype in layout.policy.state().items()
            },
        )

    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order; `rebuild` is the inverse."""
        fixed = [self.key, self.value, self.position, self.index, self.free, self.seen, self.length, self.rank]
        return [*fixed, *self.state.values()]

    def rebuild(self, tensors: list[Tensor]) -> Slots:
        """The same structure over other tensors."""
        return Slots(*tensors[:8], dict(zip(self.state, tensors[8:], strict=True)))

    def map(self, function: Callable[[Tensor], Tensor]) -> Slots:
        return self.rebuild([function(tensor) for tensor in self.tensors()])

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


def admit(layout: Layout, held: Slots | None, chunk: Chunk) -> Slots:
    """Take in a chunk: of the held tokens and the chunk's, the `layout.budget` worth most stay.

    The survivors are written to slots 0, 1, ... in the order of their positions; `held` is overwritten in
    place when given.  Runs once per prompt or turn, uncompiled.
    """
    slots = held if held is not None else Slots.empty(layout)
    count = chunk.real.cumsum(-1)  # [B, q]
    fresh = slots.seen[:, None] + count - 1
    position = _joined(layout, held and held.position, fresh.masked_fill(~chunk.real, FREE))
    running = slots.length[:, None] + torch.arange(chunk.real.shape[1], device=layout.device)
    index = _joined(layout, held and held.index, running)
    seen = slots.seen + count[:, -1]
    state = {
        name: _joined(layout, held and held.state[name], torch.zeros_like(fresh, dtype=tensor.dtype))
        for name, tensor in slots.state.items()
    }
    tokens = Tokens(position, seen[:, None, None], state, layout.budget)
    tokens = dataclasses.replace(tokens, state=layout.policy.observe(tokens, chunk.attention))
    kept = best(layout.policy.worth(tokens), position, layout.budget)  # [B, H', n]
    length = slots.length + chunk.real.shape[1]
    key = chunk.key if held is None else torch.cat([held.key, chunk.key], 2)
    value = chunk.value if held is None else torch.cat([held.value, chunk.value], 2)
    _fill(slots, kept, key, value, position, index, tokens.state)
    slots.seen.copy_(seen)
    slots.length.copy_(length)
    return slots


def best(worth: Tensor, position: Tensor, count: int) -> Tensor:
    """The places [B, H', min(count, N)] of the live tokens worth most, in the order of their positions.

    Of two tokens of equal worth the earlier one stays.  Places that hold no token come last.
    """
    by_position = torch.where(position < 0, torch.iinfo(torch.int64).max, position).argsort(-1)
    worth = torch.where(position < 0, _lowest(worth), worth).gather(-1, by_position)
    dead = (position < 0).gather(-1, by_position)
    order = worth.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, dead.gather(-1, order).int().argsort(dim=-1, stable=True))[..., :count]
    kept = by_position.gather(-1, order.sort(-1).values)
    return kept


def _lowest(worth: Tensor) -> Tensor:
    lowest = -torch.inf if worth.is_floating_point() else torch.iinfo(worth.dtype).min
    return torch.full_like(worth, lowest)


def _joined(layout: Layout, held: Tensor | None, fresh: Tensor) -> Tensor:
    """Metadata of [held slots, chunk], [B, H', C + q], from that of the chunk, [B, q]."""
    new = fresh[:, None].expand(-1, layout.groups, -1)
    return new if held is None else torch.cat([held, new], -1)


def _fill(
    slots: Slots, kept: Tensor, key: Tensor, value: Tensor, position: Tensor, index: Tensor, state: dict[str, Tensor]
) -> None:
    """Write the kept tokens to the first slots and free the others."""
    count = kept.shape[-1]
    for buffer, rows in ((slots.key, key), (slots.value, value)):
        chosen = kept.expand(-1, rows.shape[1], -1)[..., None].expand(-1, -1, -1, rows.shape[-1])
        buffer[:, :, :count] = rows.gather(2, chosen)
    for buffer, values in ((slots.position, position), (slots.index, index.masked_fill(position < 0, FREE))):
        gathered = values.gather(-1, kept)
        buffer.fill_(FREE)
        buffer[..., :count] = gathered
    for name, buffer in slots.state.items():
        gathered = state[name].gather(-1, kept)
        buffer.zero_()
        buffer[..., :count] = gathered
    live = slots.position >= 0
    slots.rank.copy_(live.cumsum(-1) - 1)
    slots.free.copy_(live.sum(-1).clamp(max=slots.position.shape[-1] - 1))
