"""Define the slots of one attention layer: fixed buffers for keys and values, and the metadata that policies read.

Keys and values never move while a model decodes; a policy only decides which slot is free next.  All tensors are
batch-first, so one index over rows reorders a conversation.
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
from kvpass.policies.base import Policy
from kvpass.policies.heads import HeadSharding
from kvpass.policies.periodic import PeriodicEviction
from kvpass.policies.pinned_tokens import PINNED, PinnedTokens, Pins
from kvpass.policies.protocols import Aligning, Merging, Rescoring
from kvpass.policies.ranking import rank_of, rows_in_order
from kvpass.policies.types import Attention, Merge, State, Tokens

FREE = -1
ROW_BUDGET = "row_budget"
"""The entry of the state that holds each row's budget, int64 [B, H', 1], if rows have different budgets."""
STEADY = (ROW_BUDGET, PINNED)
"""The entries of the state that decode steps only read."""
MERGE_BLOCK = 1024  # evicted rows that are merged at a time


@dataclasses.dataclass(frozen=True)
class Layout:
    """All that a compiled decode graph depends on; a different layout needs another graph.

    Attributes:
        policy: the eviction policy.
        budget: tokens kept between steps.
        row_budgets: whether each row has its own budget, which the slots' state holds for the steps.
        pins: whether a caller has marked tokens that stay, so that the state has `PINNED` without `keep_prompt` too.
        capacity: the number of slots, including the one for the token that is written next.
        batch, heads, key_dim, value_dim: B, Hkv, D and Dv.
        dtype, device: of keys and values.
        ranked: keys are stored before their rotary embedding and rotated by rank (positions="cache").
        layer: the layer's index, for policies that read it; else 0, so that equal layers have equal layouts.
        kv_dtype: the storage format of keys and values; None for `dtype`.
        spread: how the layer's heads are sharded over processes; `heads` counts those of this process.
        crops: whether a chunk also returns the inputs of its statistics, so that its last tokens can be cropped.
        exact_capacity: the capacity fits this prompt and layer; others need other capacities.
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
    pins: bool = False

    @property
    def groups(self) -> int:
        """H', the number of sets of metadata of the layer."""
        return 1 if self.policy.heads == "shared" else self.heads

    def __post_init__(self) -> None:
        _ = self.key_format, self.value_format  # raises for rows that cannot be stored

    @property
    def eviction(self) -> Policy | PinnedTokens | PeriodicEviction:
        """The hooks by which tokens are evicted."""
        hooks = self.pinned_tokens or self.policy
        return PeriodicEviction(hooks, self.policy) if self.policy.interval > 1 else hooks

    @property
    def pinned_tokens(self) -> PinnedTokens | None:
        """The hooks around the policy's that keep pinned tokens, None if no tokens can be pinned."""
        return PinnedTokens(self.policy) if self.pins or self.policy.keep_prompt else None

    def with_pins(self, on_top: bool = False) -> Layout:
        """Return the layout for caches with pinned tokens; `on_top` if they count beside the budget."""
        return dataclasses.replace(self, pins=not self.policy.keep_prompt, row_budgets=self.row_budgets or on_top)

    @property
    def key_format(self) -> Format:
        return format_of(self.kv_dtype, self.key_dim, self.dtype, rotated=self.ranked)

    @property
    def value_format(self) -> Format:
        return format_of(self.kv_dtype, self.value_dim, self.dtype, keys=False)

    def row_state(self) -> dict[str, int | float]:
        """Return names and initial values of the state per row and head: the policy's, and the row's budget."""
        return {**self.policy.row_state(), **({ROW_BUDGET: 0} if self.row_budgets else {})}

    def budget_in(self, state: State) -> int | Tensor:
        """Return the budget of slots with this state, a number or int64 [B, H', 1]."""
        return state[ROW_BUDGET] if self.row_budgets else self.budget

    @property
    def tracks_rank(self) -> bool:
        """Whether decode steps maintain `Slots.rank`."""
        return self.ranked or self.policy.ranks


@dataclasses.dataclass
class Slots:
    """The tensors of one layer.

    Attributes:
        key, value: rows [B, Hkv, C, D] and [B, Hkv, C, Dv].
        position: int64 [B, H', C], the token's position among the real tokens of its row; -1 marks a free slot.
        index: int64 [B, H', C], its index in the padded sequence, which the model's masks count by.
        free: int64 [B, H'], the slot that the next token is written to.
        seen: int64 [B], real tokens seen.
        length: int64 [B], tokens seen, padding included.
        rank: int64 [B, H', C], the index among the cached tokens by position, if the layout tracks it.
        state: the policy's values by name, each [B, H', C], or [B, H', 1] for its `row_state`.
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
    @torch.inference_mode(False)  # steps outside of inference mode also write to them
    def empty(layout: Layout) -> Slots:
        """Return slots without tokens."""
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

    def on_meta(self, layout: Layout) -> Slots:
        """Return these slots with rows of a layout's formats on the meta device."""
        shape, meta = (*self.key.shape[:2], self.capacity), torch.device("meta")
        key, value = (Rows.empty(row_format, shape, meta) for row_format in (layout.key_format, layout.value_format))
        return dataclasses.replace(self, key=key, value=value)

    def tokens(self, layout: Layout) -> Tokens:
        """Return the metadata that the policy reads."""
        rank = self.rank if layout.tracks_rank else None
        seen = self.seen[:, None, None]
        budget = layout.budget_in(self.state)
        return Tokens(self.position, seen, self.state, budget, self.capacity, rank, layout.spread)

    @property
    def capacity(self) -> int:
        return self.position.shape[-1]

    def next_rank(self, count: int = 1) -> Tensor:
        """Return int64 [B, 1, 1], the rank of the first of `count` new tokens when it attends.

        A chunk attends to all cached tokens; a single token not to the one that it overwrites, if any.
        """
        live = self.position >= 0
        held = live.sum(-1, keepdim=True)
        return (held - live.gather(-1, self.free[..., None]).long() if count == 1 else held)[:, :1]

    @property
    def metadata(self) -> list[Tensor]:
        """All tensors except those of rows, in the order of `names`."""
        return [self.position, self.index, self.free, self.seen, self.length, self.rank, *self.state.values()]

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the order of `names`; `of` is the inverse."""
        scales = [*self.key.parts[1:], *self.value.parts[1:]]
        return [self.key.codes, self.value.codes, *self.metadata, *scales]

    @property
    def names(self) -> list[str]:
        """The names of the tensors: `NAMES`, the policy's state, then the scales of keys and of values."""
        return [*NAMES, *self.state, *self.stored[2:]]

    @property
    def stored(self) -> list[str]:
        """The names of the tensors that store the rows of K and V."""
        key, value = ([f"{name}_{part}" for part in rows.format.names] for name, rows in _named_rows(self))
        return ["key", "value", *key, *value]

    @staticmethod
    def of(tensors: Sequence[Tensor], like: Slots) -> Slots:
        """Return slots like `like` from the tensors that `tensors` returned."""
        key, value, position, index, free, seen, length, rank, *rest = tensors
        state = dict(zip(like.state, rest, strict=False))
        scales = iter(rest[len(state) :])
        keys = Rows(like.key.format, (key, *itertools.islice(scales, len(like.key.parts) - 1)))
        return Slots(keys, Rows(like.value.format, (value, *scales)), position, index, free, seen, length, rank, state)

    @torch.inference_mode(False)
    @torch.no_grad()
    def map(self, function: Callable[[Tensor], Tensor]) -> Slots:
        """Return slots with a batch-first function applied to each tensor."""
        mapped = Slots.of([function(tensor) for tensor in self.tensors()], self)
        if mapped.key.device.type == self.key.device.type:
            return mapped
        return dataclasses.replace(mapped, key=self.key.to_device(function), value=self.value.to_device(function))

    def held(self, layout: Layout, pinned: bool = False) -> Tensor:
        """Return int64 [B, Hkv, n], the sorted indices of cached tokens in the padded sequence, filled up with -1.

        Args:
            pinned: leave out tokens that are not pinned.
        """
        position = self.position
        if pinned:
            position = torch.where(self.state.get(PINNED, torch.zeros_like(position, dtype=torch.bool)), position, FREE)
        index = torch.where(position >= 0, self.index, FREE)
        ordered = index.gather(-1, rows_in_order(position))
        count = int((position >= 0).sum(-1).max())
        return ordered[..., :count].expand(-1, layout.heads, -1).clone()

    @torch.no_grad()
    def pin_next(self, pins: Pins) -> None:
        """Pin the token that a decode step is about to write to the free slot."""
        mask = pins.mask[:, :, None].to(self.free.device)  # [B, 1, 1]
        self.state[PINNED].scatter_(-1, self.free[..., None], mask.expand(*self.free.shape, 1))
        if pins.on_top:
            self.state[ROW_BUDGET].add_(mask)

    def with_state_of(self, layout: Layout, budgets: Sequence[int]) -> Slots:
        """Return these slots with the entries of a layout's state; the budgets of rows begin at `budgets`."""
        fresh = first_state(dataclasses.replace(layout, capacity=self.capacity))
        if ROW_BUDGET in fresh:
            fresh[ROW_BUDGET].copy_(torch.tensor(budgets).view(-1, 1, 1))
        return dataclasses.replace(self, state={name: self.state.get(name, new) for name, new in fresh.items()})

    def grown(self, layout: Layout) -> Slots:
        """Return larger slots of a layout with the same tokens."""
        slots, count = Slots.empty(layout), self.capacity
        slots.key.fill(self.key)
        slots.value.fill(self.value)
        for name in ("position", "index", "rank"):
            getattr(slots, name)[..., :count] = getattr(self, name)
        for name in layout.eviction.state():
            slots.state[name][..., :count] = self.state[name]
        for name in layout.row_state():
            slots.state[name].copy_(self.state[name])
        slots.seen.copy_(self.seen)
        slots.length.copy_(self.length)
        slots.free.copy_(_next_free(layout, slots))
        return slots

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


NAMES = ("key", "value", "position", "index", "free", "seen", "length", "rank")


def _named_rows(slots: Slots) -> Iterator[tuple[str, Rows]]:
    yield "key", slots.key
    yield "value", slots.value


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of a prompt or of a later turn.

    Attributes:
        key, value: [B, Hkv, q, D] and [B, Hkv, q, Dv]; the keys as they are stored.
        valid: bool [B, q], false for padding.
        attention: statistics of the chunk's queries over [slots, chunk], N = C + q (N = q for a prompt).
        pins: the tokens to pin, None for none beside those of `keep_prompt`.
    """

    key: Tensor
    value: Tensor
    valid: Tensor
    attention: Attention
    pins: Pins | None = None

    def first(self, count: int) -> Chunk:
        """Return the first tokens of the chunk, without statistics."""
        key, value, valid = self.key[:, :, :count], self.value[:, :, :count], self.valid[:, :count]
        return Chunk(key, value, valid, Attention(), self.pins and self.pins.first(count))

    def pinned(self, policy: Policy) -> Tensor:
        """Return bool [B, q]: the tokens to pin."""
        if policy.keep_prompt:
            return self.valid
        return torch.zeros_like(self.valid) if self.pins is None else self.pins.mask & self.valid

    def on_top(self, policy: Policy) -> Tensor:
        """Return int64 [B]: the pinned tokens that count beside the budget."""
        counted = self.pins is not None and self.pins.on_top
        return self.pinned(policy).sum(-1) * counted

    def raised(self, policy: Policy, budgets: Sequence[int]) -> tuple[int, ...]:
        """Return the budgets of the rows after the chunk."""
        if self.pins is None or not self.pins.on_top:
            return tuple(budgets)
        return tuple(budget + more for budget, more in zip(budgets, self.on_top(policy).tolist(), strict=False))


def first_state(layout: Layout) -> State:
    """Return the policy's state for slots without tokens."""
    shape, device = (layout.batch, layout.groups), layout.device
    tokens = {
        name: torch.zeros(*shape, layout.capacity, dtype=dtype, device=device)
        for name, dtype in layout.eviction.state().items()
    }
    rows = {
        name: torch.full(
            (*shape, 1), initial, dtype=torch.float32 if isinstance(initial, float) else None, device=device
        )
        for name, initial in layout.row_state().items()
    }
    return {**tokens, **rows}


def first_values(policy: Policy, key: Rows, value: Rows) -> State:
    """Return the policy's initial state of new tokens, each [B, H', n], from their stored rows."""
    return policy.init_token_state(key.read(), value.read()) if policy.sees_rows else {}


def rescored(layout: Layout, tokens: Tokens, key: Rows, value: Rows, weights: Sequence[Tensor] = ()) -> Tokens:
    """Return the tokens with the policy's `rescore` of rows [B, Hkv, N, D] and [B, Hkv, N, Dv], if it has one.

    Args:
        weights: the policy's weights for the layer; if there are none, they are read from the policy.
    """
    policy = layout.policy
    if not policy.rescores:
        return tokens
    assert isinstance(policy, Rescoring)
    weights = weights or [tensor.to(layout.device) for tensor in policy.layer_weights(layout.layer)]
    return tokens.updated(policy.rescore(tokens, key.read(), value.read(), weights))


def admit(
    layout: Layout, held: Slots | None, chunk: Chunk, budgets: Sequence[int] = (), into: Slots | None = None
) -> Slots:
    """Admit a chunk: the policy selects which cached and new tokens stay.

    Survivors are written to slots 0, 1, ... in the order of their positions.  `held` is overwritten in place if it has
    the layout's capacity and `into` is None.  Runs once per prompt or turn, uncompiled.

    Args:
        held: the slots before the chunk, None for a prompt.
        budgets: for a prompt, the budget of each row, if it differs from the layout's, without pinned tokens that
            count beside it.  The slots store them if the layout has `row_budgets`.
        into: slots of the layout's capacity to write to; `held` then stays unchanged.

    Returns:
        Slots of the layout's capacity; more after a prompt if the policy defers.

    Raises:
        BudgetError: pinned tokens leave less of the budget than the policy needs.
    """
    budgets = tuple(budgets) or (layout.budget,) * layout.batch
    least = min(chunk.raised(layout.policy, budgets))
    past = Slots.empty(_prompt_layout(layout, chunk, least)) if held is None else held
    if held is None and layout.row_budgets:
        past.state[ROW_BUDGET].copy_(torch.tensor(budgets).view(-1, 1, 1))
    key, value = Rows.of(layout.key_format, chunk.key), Rows.of(layout.value_format, chunk.value)
    tokens, index = _candidates(layout, past, chunk, key, value, held is None)
    if not layout.row_budgets:
        tokens = dataclasses.replace(tokens, budget=max(budgets))
    if layout.pinned_tokens is not None:
        layout.pinned_tokens.check(tokens)
    tokens = tokens.updated(layout.policy.observe_chunk(tokens, chunk.attention))
    if held is not None:
        key, value = held.key.concatenated(key), held.value.concatenated(value)
    tokens = rescored(layout, tokens, key, value)
    keep, changes = layout.eviction.compact(tokens)
    tokens = tokens.updated(changes)
    in_place = held is None or held.capacity == layout.capacity
    slots = into or (past if in_place else Slots.empty(layout))
    _fill(layout, slots, tokens, keep, index, key, value)
    slots.seen.copy_(tokens.seen[:, 0, 0])
    slots.length.copy_(index[:, 0, -1] + 1)
    if layout.policy.merges:
        _merge_evicted(layout, slots, tokens, tokens.live & ~keep, key, value)
    slots.free.copy_(_next_free(layout, slots))
    if held is not None and layout.policy.aligns in ("step", "compact"):
        _align(layout, slots, chunk.valid.shape[1])
    return slots


def _align(layout: Layout, slots: Slots, evicted: int) -> None:
    weights = [tensor.to(layout.device) for tensor in layout.policy.weights()]
    for name, changed in align(layout, slots, slots.tokens(layout), weights, evicted).items():
        slots.state[name].copy_(changed)


def align(layout: Layout, slots: Slots, tokens: Tokens, weights: Sequence[Tensor], evicted: int) -> State:
    """Store the rows that the policy aligns, in place, and return the changes to its state."""
    key, value = slots.key.read_as(layout.dtype), slots.value.read_as(layout.dtype)
    assert isinstance(layout.policy, Aligning)
    new_key, new_value, changes = layout.policy.align(tokens, key, value, layout.layer, weights, evicted)
    slots.key.replace(new_key, (new_key != key).any(-1))
    slots.value.replace(new_value, (new_value != value).any(-1))
    return changes


def _next_free(layout: Layout, slots: Slots) -> Tensor:
    """Return the slot [B, H'] that the next token is written to: a free one, unless the policy overwrites."""
    if layout.policy.overwrites:
        return layout.eviction.victim(slots.tokens(layout))
    return (slots.position < 0).int().argmax(-1)


def _prompt_layout(layout: Layout, chunk: Chunk, budget: int) -> Layout:
    """Return the layout for a prompt, which a policy that defers caches whole, with one spare slot.

    A prompt that exceeds the budget, the least of any row, gets more slots than the layout has, even if it would fit.
    The next step recognises by them that all surplus tokens are due, and not one token per new one.
    """
    prompt, capacity = chunk.valid.shape[1], layout.capacity
    whole = layout.policy.defers and prompt > budget
    return dataclasses.replace(layout, capacity=max(capacity, prompt) + 1 if whole else capacity)


def _candidates(
    layout: Layout, past: Slots, chunk: Chunk, key: Rows, value: Rows, prompt: bool
) -> tuple[Tokens, Tensor]:
    """Return the tokens of [slots, chunk], N = C + q, and their indices in the padded sequence.

    `key` and `value` are the chunk's rows as stored.
    """
    policy, valid = layout.policy, chunk.valid
    count = valid.cumsum(-1)  # [B, q]
    new_position = past.seen[:, None] + count - 1
    new_index = past.length[:, None] + torch.arange(valid.shape[1], device=layout.device)

    def joined(cached: Tensor, new: Tensor) -> Tensor:
        new = new.expand(-1, layout.groups, -1)
        return new if prompt else torch.cat([cached, new], -1)

    initial, state = first_values(policy, key, value), dict(past.state)
    initial[PINNED] = chunk.pinned(policy)[:, None]
    if layout.row_budgets:
        state[ROW_BUDGET] = state[ROW_BUDGET] + chunk.on_top(policy)[:, None, None]
    for name, dtype in layout.eviction.state().items():
        state[name] = joined(past.state[name], initial.get(name, torch.zeros_like(new_position, dtype=dtype)[:, None]))
    position = joined(past.position, new_position.masked_fill(~valid, FREE)[:, None])
    tokens = Tokens(
        position=position,
        seen=(past.seen + count[:, -1])[:, None, None],
        state=state,
        budget=layout.budget_in(state),
        held=0 if prompt else past.capacity,
        rank=rank_of(position) if policy.ranks else None,
        spread=layout.spread,
    )
    return tokens, joined(past.index, new_index[:, None])


def _fill(layout: Layout, slots: Slots, tokens: Tokens, keep: Tensor, index: Tensor, key: Rows, value: Rows) -> None:
    """Write the tokens that stay to the first slots, and free the others."""
    position = torch.where(keep, tokens.position, FREE)
    kept = rows_in_order(position)[..., : slots.capacity]  # [B, H', n]
    count = kept.shape[-1]
    slots.key.fill(key.gathered(kept))
    slots.value.fill(value.gathered(kept))
    for buffer, values in ((slots.position, position), (slots.index, index.masked_fill(~keep, FREE))):
        compacted = values.gather(-1, kept)
        buffer.fill_(FREE)
        buffer[..., :count] = compacted
    for name in layout.eviction.state():
        compacted = tokens.state[name].gather(-1, kept)
        slots.state[name].zero_()
        slots.state[name][..., :count] = compacted
    for name in layout.row_state():
        slots.state[name].copy_(tokens.state[name])
    slots.rank.copy_((slots.position >= 0).cumsum(-1) - 1)


def rows_at(slot: Tensor, heads: int) -> SlotIndices:
    """Return the indices of one row per head [B, Hkv], at `slot` [B, H']."""
    row = torch.arange(slot.shape[0], device=slot.device)[:, None]
    head = torch.arange(heads, device=slot.device)[None]
    return row, head, slot.expand(-1, heads)


def _merge_evicted(layout: Layout, slots: Slots, tokens: Tokens, evicted: Tensor, key: Rows, value: Rows) -> None:
    """Let the policy merge evicted tokens into the filled slots."""
    count = int(evicted.sum(-1).max())
    indices = rows_in_order(torch.where(evicted, tokens.position, FREE))[..., :count]  # [B, H', E]
    held, evicted_keys, eviction = slots.key.read(), key.gathered(indices).read(), layout.eviction
    assert isinstance(eviction, Merging)
    merge = eviction.merge_evicted(slots.tokens(layout), held, evicted_keys, evicted.gather(-1, indices))
    for buffer, rows in ((slots.key, key), (slots.value, value)):
        _merge_into(buffer, rows, indices, merge)
    for name, changed in merge.state.items():
        slots.state[name].copy_(changed)


def _merge_into(buffer: Rows, rows: Rows, indices: Tensor, merge: Merge) -> None:
    """Merge rows [B, Hkv, N, D] at `indices` [B, H', E] into a buffer [B, Hkv, C, D]."""
    heads, held = buffer.shape[1], upcast(buffer.read())
    into = merge.into.expand(-1, heads, -1)
    share = torch.zeros(buffer.shape[:3], device=buffer.device)
    share = share.scatter_add(-1, into, merge.share.expand(-1, heads, -1))[..., None]
    total = merge.own * held
    for start in range(0, indices.shape[-1], MERGE_BLOCK):
        block = slice(start, start + MERGE_BLOCK)
        weighted = upcast(rows.gathered(indices[..., block]).read()) * merge.weight[..., block, None]
        total.scatter_add_(2, into[..., block, None].expand_as(weighted), weighted)
    buffer.replace(torch.where(share > 0, total / (merge.own + share), held), share[..., 0] > 0)
