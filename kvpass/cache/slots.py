"""The slots of one attention layer: fixed buffers for keys and values, and the metadata that policies work on.

Keys and values never move while a model decodes: a policy only decides which slot is free next.
Everything is batch-first, so that one index over rows reorders a conversation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvpass.fx.precision import upcast
from kvpass.lowering.formats import Format, KVDtype, Rows, format_of
from kvpass.lowering.formats.base import SlotIndices
from kvpass.policies.base import ROW_BUDGET, Attention, Merge, Policy, State, Tokens, rank_of, rows_in_order
from kvpass.policies.heads import HeadSharding

FREE = -1
BLOCK = 1024  # evicted rows that are merged at a time


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a compiled decode graph depends on; it is compiled again only if this differs.

    Attributes:
        policy: decides what stays.
        budget: tokens kept between steps.
        row_budgets: each row has a budget of its own, an entry of the slots' state that steps read instead.
        capacity: slots, the one for the token being written included.
        batch, heads, key_dim, value_dim: B, Hkv, D and Dv.
        dtype, device: of keys and values.
        ranked: keys are stored before their rotary embedding and numbered by rank (positions="cache").
        layer: the number of the layer, for policies whose `align` asks for it; else 0, so that layers are alike.
        kv_dtype: how keys and values are stored; None for `dtype`.
        spread: where the other heads of the layer are, if other processes have some; `heads` are those that are here.
        crops: whether a chunk leaves what its statistics are made of, as its last tokens may be taken back.
        exact_capacity: the capacity is what this prompt needs of this layer, and another prompt or layer needs another.
    """

    policy: Policy
    budget: int
    capacity: int
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    ranked: bool
    layer: int = 0
    kv_dtype: KVDtype | None = None
    spread: HeadSharding | None = None
    crops: bool = False
    exact_capacity: bool = False
    row_budgets: bool = False

    @property
    def groups(self) -> int:
        """H': how many sets of metadata the layer has."""
        return 1 if self.policy.heads == "shared" else self.heads

    def __post_init__(self) -> None:
        _ = self.key_format, self.value_format  # refuses rows that it cannot store

    @property
    def key_format(self) -> Format:
        return format_of(self.kv_dtype, self.key_dim, self.dtype, rotated=self.ranked)

    @property
    def value_format(self) -> Format:
        return format_of(self.kv_dtype, self.value_dim, self.dtype, keys=False)

    def row_state(self) -> dict[str, int | float]:
        """Names and first values of what is remembered for each row and head: the policy's, and the row's budget."""
        return {**self.policy.row_state(), **({ROW_BUDGET: 0} if self.row_budgets else {})}

    def budget_in(self, state: State) -> int | Tensor:
        """Tokens kept between steps, a number or int64 [B, H', 1], for slots with that state."""
        return state[ROW_BUDGET] if self.row_budgets else self.budget

    @property
    def tracks_rank(self) -> bool:
        """Whether decode steps keep `Slots.rank` up."""
        return self.ranked or self.policy.ranks


@dataclasses.dataclass
class Slots:
    """The tensors of one layer.

    Attributes:
        key, value: rows [B, Hkv, C, D] and [B, Hkv, C, Dv].
        position: int64 [B, H', C], the token's place among the real tokens of its row; -1 is free.
        index: int64 [B, H', C], its place in the padded sequence, which is what the model's masks count.
        free: int64 [B, H'], the slot that the next token is written to.
        seen: int64 [B], real tokens seen.
        length: int64 [B], tokens seen, padding included.
        rank: int64 [B, H', C], the place among the held tokens, if the layout tracks it.
        state: what the policy remembers, each [B, H', C], or [B, H', 1] for its `row_state`.
    """

    key: Rows
    value: Rows
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
        rows, groups, capacity = layout.batch, layout.groups, layout.capacity
        meta = (rows, groups, capacity)

        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=layout.device)

        return Slots(
            key=Rows.empty(layout.key_format, (rows, layout.heads, capacity), layout.device),
            value=Rows.empty(layout.value_format, (rows, layout.heads, capacity), layout.device),
            position=integers(*meta, fill=FREE),
            index=integers(*meta, fill=FREE),
            free=integers(rows, groups),
            seen=integers(rows),
            length=integers(rows),
            rank=integers(*meta),
            state=first_state(layout),
        )

    def described(self, layout: Layout) -> Slots:
        """The same with rows of a layout's formats that hold no data."""
        shape, nowhere = (*self.key.shape[:2], self.capacity), torch.device("meta")
        key, value = (Rows.empty(each, shape, nowhere) for each in (layout.key_format, layout.value_format))
        return dataclasses.replace(self, key=key, value=value)

    def tokens(self, layout: Layout) -> Tokens:
        """What the policy sees of the slots."""
        rank = self.rank if layout.tracks_rank else None
        seen = self.seen[:, None, None]
        budget = layout.budget_in(self.state)
        return Tokens(self.position, seen, self.state, budget, self.capacity, rank, layout.spread)

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

    @property
    def metadata(self) -> list[Tensor]:
        """All tensors but those of rows, in the order of `names`."""
        return [self.position, self.index, self.free, self.seen, self.length, self.rank, *self.state.values()]

    def tensors(self) -> list[Tensor]:
        """All of them, in the order of `names`; `of` is the inverse."""
        beside = [*self.key.parts[1:], *self.value.parts[1:]]
        return [self.key.codes, self.value.codes, *self.metadata, *beside]

    @property
    def names(self) -> list[str]:
        """What the tensors are called: `NAMES`, the policy's state, then scales and the like of keys and of values."""
        return [*NAMES, *self.state, *self.stored[2:]]

    @property
    def stored(self) -> list[str]:
        """The names of the tensors that rows of K and V are made of."""
        key, value = ([f"{name}_{part}" for part in rows.format.names] for name, rows in _named(self))
        return ["key", "value", *key, *value]

    @staticmethod
    def of(tensors: Sequence[Tensor], like: Slots) -> Slots:
        """From what `tensors` returned of slots like those given."""
        key, value, position, index, free, seen, length, rank, *rest = tensors
        state = dict(zip(like.state, rest, strict=False))
        scales = iter(rest[len(state) :])
        keys = Rows(like.key.format, (key, *itertools.islice(scales, len(like.key.parts) - 1)))
        return Slots(keys, Rows(like.value.format, (value, *scales)), position, index, free, seen, length, rank, state)

    @torch.inference_mode(False)
    @torch.no_grad()
    def map(self, function: Callable[[Tensor], Tensor]) -> Slots:
        made = Slots.of([function(tensor) for tensor in self.tensors()], self)
        if made.key.device.type == self.key.device.type:
            return made
        return dataclasses.replace(made, key=self.key.elsewhere(function), value=self.value.elsewhere(function))

    def held(self, layout: Layout) -> Tensor:
        """int64 [B, Hkv, n]: places of the held tokens in the padded sequence, sorted, -1 after the last."""
        ordered = self.index.gather(-1, rows_in_order(self.position))
        count = int((self.position >= 0).sum(-1).max())
        return ordered[..., :count].expand(-1, layout.heads, -1).clone()

    def grown(self, layout: Layout) -> Slots:
        """The same tokens in more slots."""
        slots, count = Slots.empty(layout), self.capacity
        slots.key.fill(self.key)
        slots.value.fill(self.value)
        for name in ("position", "index", "rank"):
            getattr(slots, name)[..., :count] = getattr(self, name)
        for name in layout.policy.remembered():
            slots.state[name][..., :count] = self.state[name]
        for name in layout.row_state():
            slots.state[name].copy_(self.state[name])
        slots.seen.copy_(self.seen)
        slots.length.copy_(self.length)
        slots.free.copy_(_next_slot(layout, slots))
        return slots

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


NAMES = ("key", "value", "position", "index", "free", "seen", "length", "rank")


def _named(slots: Slots) -> Iterator[tuple[str, Rows]]:
    yield "key", slots.key
    yield "value", slots.value


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of a prompt or of a later turn.

    Attributes:
        key, value: [B, Hkv, q, D] and [B, Hkv, q, Dv]; the keys as they are to be stored.
        valid: bool [B, q], false for padding.
        attention: what the chunk's queries paid to [held slots, chunk], N = C + q (N = q for a prompt).
    """

    key: Tensor
    value: Tensor
    valid: Tensor
    attention: Attention

    def first(self, count: int) -> Chunk:
        """Its first tokens, without what their queries paid."""
        return Chunk(self.key[:, :, :count], self.value[:, :, :count], self.valid[:, :count], Attention())


def first_state(layout: Layout) -> State:
    """What the policy remembers of slots that hold nothing."""
    shape, device = (layout.batch, layout.groups), layout.device
    tokens = {
        name: torch.zeros(*shape, layout.capacity, dtype=dtype, device=device)
        for name, dtype in layout.policy.remembered().items()
    }
    rows = {
        name: torch.full((*shape, 1), first, dtype=torch.float32 if isinstance(first, float) else None, device=device)
        for name, first in layout.row_state().items()
    }
    return {**tokens, **rows}


def first_values(policy: Policy, key: Rows, value: Rows) -> State:
    """What the policy remembers of new tokens from the first, [B, H', n]."""
    return policy.init_token_state(key.read(), value.read()) if policy.sees_rows else {}


def admit(
    layout: Layout, held: Slots | None, chunk: Chunk, budgets: Sequence[int] = (), into: Slots | None = None
) -> Slots:
    """Take in a chunk: the policy says which of the held tokens and the chunk's stay.

    The survivors are written to slots 0, 1, ... in the order of their positions.  `held` is overwritten in
    place if it has the layout's capacity and there is no `into`.  Runs once per prompt or turn, uncompiled.

    Args:
        budgets: for a prompt, the budget of each row, if it is not the layout's; slots remember them, if the layout has
            `row_budgets`.
        into: slots of the layout's capacity to write to; `held` is left as it is then.

    Returns:
        Slots of the layout's capacity; of more when the policy defers and this is the prompt.
    """
    budgets = tuple(budgets) or (layout.budget,) * layout.batch
    past = Slots.empty(_roomy(layout, chunk, min(budgets))) if held is None else held
    if held is None and layout.row_budgets:
        past.state[ROW_BUDGET].copy_(torch.tensor(budgets).view(-1, 1, 1))
    key, value = Rows.of(layout.key_format, chunk.key), Rows.of(layout.value_format, chunk.value)
    tokens, index = _candidates(layout, past, chunk.valid, key, value, held is None)
    if not layout.row_budgets:
        tokens = dataclasses.replace(tokens, budget=max(budgets))
    tokens = tokens.updated(layout.policy.observe_unpinned(tokens, chunk.attention))
    stays, changes = layout.policy.keep_mask(tokens)
    tokens = tokens.updated(changes)
    if held is not None:
        key, value = held.key.beside(key), held.value.beside(value)
    in_place = held is None or held.capacity == layout.capacity
    slots = into or (past if in_place else Slots.empty(layout))
    _fill(layout, slots, tokens, stays, index, key, value)
    slots.seen.copy_(tokens.seen[:, 0, 0])
    slots.length.copy_(index[:, 0, -1] + 1)
    if layout.policy.merges:
        _merge_gone(layout, slots, tokens, tokens.live & ~stays, key, value)
    slots.free.copy_(_next_slot(layout, slots))
    if held is not None and layout.policy.aligns in ("step", "compact"):
        _align(layout, slots, chunk.valid.shape[1])
    return slots


def _align(layout: Layout, slots: Slots, evicted: int) -> None:
    """Let the policy rewrite the rows, as it does after steps."""
    weights = [tensor.to(layout.device) for tensor in layout.policy.weights()]
    for name, changed in align(layout, slots, slots.tokens(layout), weights, evicted).items():
        slots.state[name].copy_(changed)


def align(layout: Layout, slots: Slots, tokens: Tokens, weights: Sequence[Tensor], evicted: int) -> State:
    """Store the rows that the policy aligns, in place; what changes in its state."""
    key, value = slots.key.read_as(layout.dtype), slots.value.read_as(layout.dtype)
    new_key, new_value, changes = layout.policy.align(tokens, key, value, layout.layer, weights, evicted)
    slots.key.replace(new_key, (new_key != key).any(-1))
    slots.value.replace(new_value, (new_value != value).any(-1))
    return changes


def _next_slot(layout: Layout, slots: Slots) -> Tensor:
    """The slot [B, H'] that the next token is written to: a free one, unless the policy overwrites."""
    if layout.policy.overwrites:
        return layout.policy.victim(slots.tokens(layout))
    return (slots.position < 0).int().argmax(-1)


def _roomy(layout: Layout, chunk: Chunk, budget: int) -> Layout:
    """The layout for a prompt, which a policy that defers holds whole, with one slot to spare.

    One that exceeds the budget, the least of any row, gets more slots than the layout has, even if it would fit
    there: that is how the next step knows that all that is too much has to go, and not one token for each that comes.
    """
    prompt, capacity = chunk.valid.shape[1], layout.capacity
    whole = layout.policy.defers and prompt > budget
    return dataclasses.replace(layout, capacity=max(capacity, prompt) + 1 if whole else capacity)


def _candidates(
    layout: Layout, past: Slots, valid: Tensor, key: Rows, value: Rows, prompt: bool
) -> tuple[Tokens, Tensor]:
    """The tokens of [held slots, chunk], N = C + q, and their places in the padded sequence [B, H', N].

    The rows are the chunk's, as they are stored.
    """
    policy, count = layout.policy, valid.cumsum(-1)  # [B, q]
    fresh = past.seen[:, None] + count - 1
    running = past.length[:, None] + torch.arange(valid.shape[1], device=layout.device)

    def joined(old: Tensor, new: Tensor) -> Tensor:
        new = new.expand(-1, layout.groups, -1)
        return new if prompt else torch.cat([old, new], -1)

    arriving, state = first_values(policy, key, value), dict(past.state)
    for name, dtype in policy.remembered().items():
        state[name] = joined(past.state[name], arriving.get(name, torch.zeros_like(fresh, dtype=dtype)[:, None]))
    position = joined(past.position, fresh.masked_fill(~valid, FREE)[:, None])
    tokens = Tokens(
        position=position,
        seen=(past.seen + count[:, -1])[:, None, None],
        state=state,
        budget=layout.budget_in(state),
        held=0 if prompt else past.capacity,
        rank=rank_of(position) if policy.ranks else None,
        spread=layout.spread,
    )
    return tokens, joined(past.index, running[:, None])


def _fill(layout: Layout, slots: Slots, tokens: Tokens, stays: Tensor, index: Tensor, key: Rows, value: Rows) -> None:
    """Write the tokens that stay to the first slots and free the others."""
    position = torch.where(stays, tokens.position, FREE)
    kept = rows_in_order(position)[..., : slots.capacity]  # [B, H', n]
    count = kept.shape[-1]
    slots.key.fill(key.gathered(kept))
    slots.value.fill(value.gathered(kept))
    for buffer, values in ((slots.position, position), (slots.index, index.masked_fill(~stays, FREE))):
        chosen = values.gather(-1, kept)
        buffer.fill_(FREE)
        buffer[..., :count] = chosen
    for name in layout.policy.remembered():
        chosen = tokens.state[name].gather(-1, kept)
        slots.state[name].zero_()
        slots.state[name][..., :count] = chosen
    for name in layout.row_state():
        slots.state[name].copy_(tokens.state[name])
    slots.rank.copy_((slots.position >= 0).cumsum(-1) - 1)


def rows_at(slot: Tensor, heads: int) -> SlotIndices:
    """Indices of one row for each head: `slot` [B, H'] of every head [B, Hkv]."""
    row = torch.arange(slot.shape[0], device=slot.device)[:, None]
    head = torch.arange(heads, device=slot.device)[None]
    return row, head, slot.expand(-1, heads)


def _merge_gone(layout: Layout, slots: Slots, tokens: Tokens, evicted: Tensor, key: Rows, value: Rows) -> None:
    """Let the policy merge the tokens that go into the filled slots."""
    count = int(evicted.sum(-1).max())
    indices = rows_in_order(torch.where(evicted, tokens.position, FREE))[..., :count]  # [B, H', E]
    held, going = slots.key.read(), key.gathered(indices).read()
    merge = layout.policy.merge_unpinned(slots.tokens(layout), held, going, evicted.gather(-1, indices))
    for buffer, rows in ((slots.key, key), (slots.value, value)):
        _mix(buffer, rows, indices, merge)
    for name, changed in merge.state.items():
        slots.state[name].copy_(changed)


def _mix(buffer: Rows, rows: Rows, indices: Tensor, merge: Merge) -> None:
    """buffer [B, Hkv, C, D] with the rows [B, Hkv, N, D] at `places` [B, H', E] merged into it, a block at a time."""
    heads, held = buffer.shape[1], upcast(buffer.read())
    into = merge.into.expand(-1, heads, -1)
    share = torch.zeros(buffer.shape[:3], device=buffer.device)
    share = share.scatter_add(-1, into, merge.share.expand(-1, heads, -1))[..., None]
    total = merge.own * held
    for start in range(0, indices.shape[-1], BLOCK):
        block = slice(start, start + BLOCK)
        weighted = upcast(rows.gathered(indices[..., block]).read()) * merge.weight[..., block, None]
        total.scatter_add_(2, into[..., block, None].expand_as(weighted), weighted)
    buffer.replace(torch.where(share > 0, total / (merge.own + share), held), share[..., 0] > 0)
