"""Test the slots of a layer: their order of tensors, copies, growth, joined classes, and restored content."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpass import policies
from kvpass.cache.admission import TokensToAdmit, admit
from kvpass.cache.cached_attention import CachedAttention, NewTokens
from kvpass.cache.layout import ROW_BUDGET, Layout
from kvpass.cache.slots import (
    FREE,
    NAMES,
    AnySlots,
    ClassedSlots,
    empty_slots,
    empty_state,
    next_free,
    next_rank,
    row_indices,
    select_heads,
)
from kvpass.cache.step import decode_step
from kvpass.errors import PolicyError
from kvpass.lowering.formats import KV_DTYPES
from kvpass.policies.base import Attention, Policy, Tokens
from kvpass.policies.budgets import HeadClass
from kvpass.policies.pinned_tokens import PINNED, Pins

ROWS, HEADS, DIM = 3, 2, 8


@dataclasses.dataclass(frozen=True)
class Stateful(Policy):
    """A policy with state of both kinds, whose heads keep tokens of their own."""

    name: ClassVar[str] = "stateful"
    heads: ClassVar[Any] = "kv"

    def state(self) -> dict[str, torch.dtype]:
        return {"mass": torch.float32, "count": torch.int64}

    def row_state(self) -> dict[str, int | float]:
        return {"rounds": 7, "mean": 0.5}

    def score(self, tokens: Tokens) -> Tensor:
        return tokens.position


@dataclasses.dataclass(frozen=True)
class Unequal(Stateful):
    """The same with budgets of its own for each of two heads."""

    name: ClassVar[str] = "unequal"

    def head_classes(self, heads: int, budget: int) -> tuple[HeadClass, ...]:
        return (HeadClass(1, budget + 2), HeadClass(1, budget - 2))

    def head_counts(self, tokens: Tokens, layer: int) -> Tensor:
        return tokens.live.sum(-1)


def layout(policy: Policy | None = None, budget: int = 6, **options: Any) -> Layout:
    policy = Stateful() if policy is None else policy
    capacity = options.pop("capacity", policy.capacity(budget))
    sizes = (policy, budget, capacity, ROWS, HEADS, DIM, DIM, torch.float32, torch.device("cpu"))
    return Layout(*sizes, stores_unrotated_keys=False, **options).with_head_classes()


LAYOUTS = {
    "heads": layout(),
    "shared": layout(policies.resolve("h2o", {})),
    "int8": layout(kv_dtype="int8"),
    "int4-hadamard": layout(kv_dtype="int4-hadamard"),
    "pins": layout(row_budgets=True, pins=True),
    "classes": layout(Unequal()),
    "classes in int4": layout(Unequal(), kv_dtype="int4"),
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def fill(made: Layout, seed: int = 0) -> AnySlots:
    """Return slots with random content, in which every head has free slots and tokens in random order."""
    slots, drawn = empty_slots(made), torch.Generator().manual_seed(seed)
    length = torch.randint(12, 20, (ROWS,), generator=drawn)
    for part, own in zip(slots.by_class, made.by_class, strict=True):
        vectors = torch.randn(2, ROWS, own.heads, own.capacity, DIM, generator=drawn)
        for stored, new, form in zip((part.key, part.value), vectors, (own.key_format, own.value_format), strict=True):
            stored.fill(type(stored).of(form, new))
        rows, groups, capacity = part.position.shape
        order = torch.rand(rows, groups, 12, generator=drawn).argsort(-1)[..., :capacity]
        free = torch.rand(rows, groups, capacity, generator=drawn).argsort(-1) >= capacity - 1
        part.position.copy_(order.masked_fill(free, FREE))
        part.index.copy_((order + 2).masked_fill(free, FREE))
        part.free.copy_(free.int().argmax(-1))
        part.seen.copy_(length - 2)
        part.length.copy_(length)
        part.rank.copy_(torch.where(free, 0, 1))
        for value in part.state.values():
            value.copy_(torch.randint(0, 2, value.shape, generator=drawn))
    if isinstance(slots, ClassedSlots):
        slots.order.copy_(torch.rand(ROWS, HEADS, generator=drawn).argsort(-1))
        slots.inverse.copy_(slots.order.argsort(-1))
    return slots


def equal(ours: AnySlots, theirs: AnySlots) -> bool:
    pairs = list(zip(ours.tensors(), theirs.tensors(), strict=True))
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


# -- the tensors and their names ---------------------------------------------------------------------------------------


@each_layout
def test_slots_without_tokens_are_free(name: str) -> None:
    slots = empty_slots(LAYOUTS[name])
    for part, own in zip(slots.by_class, LAYOUTS[name].by_class, strict=True):
        assert part.position.shape == (ROWS, own.metadata_heads, own.capacity)
        assert (part.position == FREE).all()
        assert (part.index == FREE).all()
        assert not part.seen.any()
        assert not part.length.any()
        assert list(part.state) == [*own.state(), *own.row_state()]
        for entry, initial in own.row_state().items():
            assert (part.state[entry] == initial).all()
            assert part.state[entry].shape == (ROWS, own.metadata_heads, 1)
    assert slots.capacity == LAYOUTS[name].capacity


@each_layout
def test_tensors_have_unique_names_in_their_order(name: str) -> None:
    slots = fill(LAYOUTS[name])
    assert len(slots.names) == len(set(slots.names)) == len(slots.tensors())
    assert slots.names[: len(NAMES)] == list(NAMES)
    assert set(slots.kv_names) < set(slots.names)
    by_name = dict(zip(slots.names, slots.tensors(), strict=True))
    for number, part in enumerate(slots.by_class):
        prefix = f"class_{number}_" if number else ""
        for own in NAMES[2:]:
            assert by_name[prefix + own] is getattr(part, own)
        for own, tensor in part.state.items():
            assert by_name[prefix + own] is tensor
        parts = (part.key.codes, part.value.codes, *part.key.parts[1:], *part.value.parts[1:])
        for own, tensor in zip(part.kv_names, parts, strict=True):
            assert by_name[prefix + own] is tensor


@each_layout
def test_slots_are_made_from_their_tensors(name: str) -> None:
    slots = fill(LAYOUTS[name])
    again = slots.with_tensors(slots.tensors())
    assert [id(x) for x in again.tensors()] == [id(x) for x in slots.tensors()]
    assert again.names == slots.names


@each_layout
@given(seed=st.integers(0, 50), rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5))
def test_one_index_reorders_all_tensors(name: str, seed: int, rows: list[int]) -> None:
    slots = fill(LAYOUTS[name], seed)
    picked = slots.map_tensors(lambda tensor: tensor[rows])
    for ours, theirs in zip(picked.tensors(), slots.tensors(), strict=True):
        assert torch.equal(ours, theirs[rows])


@each_layout
def test_vectors_on_meta_have_the_same_shapes(name: str) -> None:
    slots = fill(LAYOUTS[name])
    meta = slots.on_meta(LAYOUTS[name])
    kept = set(slots.names) - set(slots.kv_names)
    for each, ours, theirs in zip(slots.names, meta.tensors(), slots.tensors(), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert (ours is theirs) if each in kept else ours.is_meta


@each_layout
def test_bytes_are_those_of_all_tensors(name: str) -> None:
    slots = fill(LAYOUTS[name])
    assert slots.nbytes == sum(tensor.numel() * tensor.itemsize for tensor in slots.tensors())


@pytest.mark.parametrize("taken", ["position", "key", "free", ROW_BUDGET, PINNED, "key_scale"])
def test_a_state_with_the_name_of_another_tensor_is_refused(taken: str) -> None:
    class Named(Stateful):
        name: ClassVar[str] = "named"

        def state(self) -> dict[str, torch.dtype]:
            return {taken: torch.float32}

    with pytest.raises(
        PolicyError, match=f"its state cannot have an entry '{taken}', a tensor of the slots: rename it"
    ):
        empty_state(layout(Named(), kv_dtype="int8"))


# -- cached tokens -----------------------------------------------------------------------------------------------------


@each_layout
@given(seed=st.integers(0, 50))
def test_cached_indices_are_sorted_and_filled_up(name: str, seed: int) -> None:
    made = LAYOUTS[name]
    slots = fill(made, seed)
    joined = slots.joined_classes(made)
    none = torch.zeros_like(joined.position, dtype=torch.bool)
    for pinned in (False, True):
        live = (joined.position >= 0) & (joined.state.get(PINNED, none) if pinned else ~none)
        found, longest = slots.cached_indices(made, pinned), int(live.sum(-1).max())
        assert found.shape == (ROWS, HEADS, longest)
        for row, head in itertools.product(range(ROWS), range(HEADS)):
            group = row, head % live.shape[1]
            expected = sorted(joined.index[group][live[group]].tolist())
            assert found[row, head].tolist() == expected + [FREE] * (longest - len(expected))


@pytest.mark.parametrize("name", ["classes", "classes in int4"])
@given(seed=st.integers(0, 50))
def test_joined_classes_have_the_heads_in_the_models_order(name: str, seed: int) -> None:
    made = LAYOUTS[name]
    slots = fill(made, seed)
    joined = slots.joined_classes(made)
    assert isinstance(slots, ClassedSlots)
    assert joined.capacity == slots.capacity == max(part.capacity for part in slots.by_class)
    for row, where in itertools.product(range(ROWS), range(HEADS)):
        head, part = int(slots.order[row, where]), slots.by_class[where]  # each class has one head
        pairs = [(joined.position, part.position), (joined.key.read(), part.key.read())]
        pairs += [(joined.state[entry], part.state[entry]) for entry in ("mass", "rounds")]
        for ours, theirs in pairs:
            assert torch.equal(ours[row, head, : part.capacity], theirs[row, 0])
        assert (joined.position[row, head, part.capacity :] == FREE).all()
    assert torch.equal(joined.seen, slots.seen)


def test_slots_without_classes_are_joined_already() -> None:
    slots = fill(LAYOUTS["heads"])
    assert slots.joined_classes(LAYOUTS["heads"]) is slots
    assert slots.by_class == (slots,)


@given(seed=st.integers(0, 50), more=st.integers(0, 9))
def test_larger_slots_have_the_same_tokens(seed: int, more: int) -> None:
    for made in (LAYOUTS["heads"], LAYOUTS["int8"], LAYOUTS["pins"]):
        slots = fill(made, seed)
        larger = slots.enlarge(dataclasses.replace(made, capacity=made.capacity + more))
        assert larger.capacity == made.capacity + more
        for name, ours, theirs in zip(slots.names, larger.tensors(), slots.tensors(), strict=True):
            if name != "free":
                assert torch.equal(ours[:, :, : made.capacity] if ours.ndim > 2 else ours, theirs)
        assert (larger.position[..., made.capacity :] == FREE).all()
        assert (larger.position.gather(-1, larger.free[..., None]) == FREE).all()


def test_slots_get_the_state_of_another_layout() -> None:
    plain = fill(LAYOUTS["heads"])
    pinned = plain.with_state_of(LAYOUTS["pins"], (4, 5, 6))
    assert pinned.state["mass"] is plain.state["mass"]
    assert pinned.state[ROW_BUDGET][:, :, 0].tolist() == [[4, 4], [5, 5], [6, 6]]
    assert not pinned.state[PINNED].any()
    assert pinned.key is plain.key
    assert pinned.with_state_of(LAYOUTS["heads"], ()).names == plain.names


@pytest.mark.parametrize("on_top", [False, True])
def test_the_next_token_is_pinned_in_its_slot(on_top: bool) -> None:
    slots = fill(LAYOUTS["pins"])
    marks, budgets = slots.state[PINNED].clone(), slots.state[ROW_BUDGET].clone()
    slots.pin_next(Pins(torch.tensor([[True], [False], [True]]), on_top, torch.zeros(ROWS, dtype=torch.int64)))
    for row, pinned in enumerate((True, False, True)):
        for head in range(HEADS):
            slot = int(slots.free[row, head])
            marks[row, head, slot] = pinned
            budgets[row, head] += pinned and on_top
    assert torch.equal(slots.state[PINNED], marks)
    assert torch.equal(slots.state[ROW_BUDGET], budgets)


@given(seed=st.integers(0, 50))
def test_the_next_free_slot_has_no_token(seed: int) -> None:
    slots = fill(LAYOUTS["heads"], seed)
    free = next_free(LAYOUTS["heads"], slots)
    assert (slots.position.gather(-1, free[..., None]) == FREE).all()


def test_the_next_rank_counts_the_tokens_that_a_new_one_attends_to() -> None:
    position = torch.tensor([[[0, 1, FREE]], [[FREE, FREE, FREE]], [[3, 2, 1]]])
    free = torch.tensor([[2], [0], [1]])  # the last row overwrites a token
    assert next_rank(position, free, decodes=True).tolist() == [2, 0, 2]
    assert next_rank(position, free, decodes=False).tolist() == [2, 0, 3]


@pytest.mark.parametrize("groups", [1, HEADS])
def test_row_indices_select_one_slot_of_every_head(groups: int) -> None:
    slot = torch.randint(0, 5, (ROWS, groups))
    x = torch.randn(ROWS, HEADS, 5, DIM)
    found = x[row_indices(slot, HEADS)]
    for row in range(ROWS):
        for head in range(HEADS):
            assert torch.equal(found[row, head], x[row, head, slot[row, head % groups]])


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=ROWS, max_size=ROWS))
def test_selected_heads_are_those_of_each_row(heads: list[list[int]]) -> None:
    x = torch.randn(ROWS, 4, 2)
    for ours, row, own in zip(select_heads(x, torch.tensor(heads)), x, heads, strict=True):
        assert torch.equal(ours, row[own])


# -- content that a call overwrites ------------------------------------------------------------------------------------


def run_step(made: Layout, slots: AnySlots) -> None:
    new = [torch.randn(ROWS, heads, 1, DIM) for heads in (2 * HEADS, HEADS, HEADS)]
    decode_step(made, CachedAttention(0.3), slots, NewTokens(*new, torch.ones(ROWS, dtype=torch.bool)))


STEPPED = {
    **{name: made for name, made in LAYOUTS.items() if name != "pins"},
    "merges": layout(policies.resolve("d2o", {}), budget=12),
    "overwrites": layout(policies.resolve("buzz", {}), budget=20),
    **{kv_dtype: layout(kv_dtype=kv_dtype) for kv_dtype in KV_DTYPES},
}


@pytest.mark.parametrize("name", STEPPED)
def test_a_step_is_undone(name: str) -> None:
    made = STEPPED[name]
    valid = torch.ones(ROWS, 30, dtype=torch.bool)
    valid[1, :3] = False
    key, value = torch.randn(2, ROWS, HEADS, 30, DIM)
    sums = torch.rand(ROWS, HEADS, 2, 30)
    attention = Attention(sums, sums, sums, sums, sums, queries=valid.sum(-1)[:, None, None])
    slots = admit(made, None, TokensToAdmit(key, value, valid, attention))
    before = slots.map_tensors(Tensor.clone)
    snapshot = slots.snapshot(made, chunk=False)
    run_step(made, slots)
    assert not equal(slots, before)
    assert snapshot.restore() is slots
    assert equal(slots, before)


@each_layout
def test_a_chunk_leaves_its_slots_and_saves_nothing(name: str) -> None:
    slots = fill(LAYOUTS[name])
    snapshot = slots.snapshot(LAYOUTS[name], chunk=True)
    assert snapshot.saved == ()
    assert snapshot.restore() is slots


def test_a_step_of_a_policy_that_moves_nothing_saves_one_vector_of_each_head() -> None:
    slots = fill(LAYOUTS["heads"])
    (saved,) = slots.snapshot(LAYOUTS["heads"], chunk=False).saved
    assert [part.shape for part in saved.key] == [(ROWS, HEADS, DIM)]
