"""Test which tokens of prompts and chunks are written to which slots, against lists of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvpass import policies
from kvpass.cache import admission
from kvpass.cache.admission import TokensToAdmit, admit
from kvpass.cache.layout import ROW_BUDGET, Layout
from kvpass.cache.slots import FREE, Slots
from kvpass.errors import BudgetError
from kvpass.policies.base import Attention, Merge, Policy, State, Tokens
from kvpass.policies.budgets import HeadClass
from kvpass.policies.pinned_tokens import PINNED, Pins

HEADS, DIM = 2, 4
CALLS = st.lists(
    st.integers(1, 5).flatmap(lambda count: st.lists(st.booleans(), min_size=2 * count, max_size=2 * count)),
    min_size=1,
    max_size=4,
)
"""For each call, whether the tokens of its two rows are real."""


def layout(policy: Policy, budget: int, **options: Any) -> Layout:
    capacity = options.pop("capacity", policy.capacity(budget))
    sizes = (policy, budget, capacity, options.pop("batch", 2), HEADS, DIM, DIM, torch.float32, torch.device("cpu"))
    return Layout(*sizes, stores_unrotated_keys=False, **options).with_head_classes()


def window(budget: int, **options: Any) -> Layout:
    return layout(policies.resolve("window", {}), budget, **options)


def tokens(valid: Tensor, first: int = 0, pins: Pins | None = None) -> TokensToAdmit:
    """Return tokens whose keys are their indices from `first` on, in each row and head, and values the negatives."""
    rows, count = valid.shape
    index = torch.arange(first, first + count, dtype=torch.float32)
    key = index[:, None] + 1000 * torch.arange(rows)[:, None, None, None] + 100 * torch.arange(HEADS)[:, None, None]
    key = key.expand(rows, HEADS, count, DIM).clone()
    return TokensToAdmit(key, -key, valid, Attention(), pins)


def real(count: int, rows: int = 2) -> Tensor:
    return torch.ones(rows, count, dtype=torch.bool)


def calls_of(drawn: Sequence[Sequence[bool]]) -> list[TokensToAdmit]:
    """Return the tokens of a prompt and chunks."""
    made: list[TokensToAdmit] = []
    first = 0
    for each in drawn:
        made.append(tokens(torch.tensor(each).view(2, -1), first))
        first += len(each) // 2
    return made


def admitted(layout: Layout, calls: Sequence[TokensToAdmit]) -> Any:
    slots = None
    for call in calls:
        slots = admit(layout, slots, call)
    return slots


def indices_of(calls: Sequence[TokensToAdmit], row: int) -> list[int]:
    """Return the indices of the real tokens of a row in the padded sequence; index `i` is number `i` of the list."""
    valid = torch.cat([call.valid[row] for call in calls])
    return valid.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("policy", ["window", "streaming", "full"])
@given(drawn=CALLS, budget=st.integers(3, 8))
@example(drawn=[[False] * 4], budget=3)  # a prompt of padding alone
@example(drawn=[[True] * 6, [False, True], [True] * 10], budget=3)
def test_tokens_that_stay_are_in_the_first_slots_by_position(policy: str, drawn: list[list[bool]], budget: int) -> None:
    sinks = 2 if policy == "streaming" else 0
    chosen = policies.resolve(policy, {"sinks": sinks} if sinks else {})
    budget, calls = (32, calls_of(drawn)) if policy == "full" else (budget, calls_of(drawn))
    made = layout(chosen, budget)
    slots = admitted(made, calls)
    for row in range(2):
        index = indices_of(calls, row)
        stay = [i for i in range(len(index)) if i < sinks or i >= len(index) - (budget - sinks)]
        free = [FREE] * (made.capacity - len(stay))
        assert slots.position[row, 0].tolist() == [*stay, *free]
        assert slots.index[row, 0].tolist() == [*(index[i] for i in stay), *free]
        for head in range(HEADS):
            expected = torch.tensor([1000.0 * row + 100 * head + index[i] for i in stay])[:, None].expand(-1, DIM)
            assert torch.equal(slots.key.read()[row, head, : len(stay)], expected)
            assert torch.equal(slots.value.read()[row, head, : len(stay)], -expected)
        assert slots.seen[row] == len(index)
        assert slots.length[row] == sum(call.valid.shape[1] for call in calls)
        assert slots.position[row, 0, slots.free[row, 0]] == FREE


@given(drawn=CALLS.filter(lambda drawn: len(drawn) > 1), budget=st.integers(1, 6))
def test_chunks_leave_what_the_whole_prompt_leaves(drawn: list[list[bool]], budget: int) -> None:
    """Check a policy whose scores do not depend on calls."""
    calls, made = calls_of(drawn), window(budget)
    whole = tokens(torch.cat([call.valid for call in calls], 1))
    assert_same(admitted(made, calls), admit(made, None, whole))


def assert_same(ours: Slots, theirs: Slots) -> None:
    """Compare all tensors, of vectors those of tokens alone: vectors of free slots are undefined."""
    for one, other in zip(ours.metadata, theirs.metadata, strict=True):
        assert torch.equal(one, other)
    live = (ours.position >= 0)[..., None]
    for mine, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
        assert torch.equal(mine.read() * live, other.read() * live)


@given(drawn=CALLS, budget=st.integers(1, 6))
def test_a_row_keeps_what_it_keeps_alone(drawn: list[list[bool]], budget: int) -> None:
    calls = calls_of(drawn)
    together = admitted(window(budget), calls)
    for row in range(2):
        part = slice(row, row + 1)
        alone = [dataclasses.replace(c, key=c.key[part], value=c.value[part], valid=c.valid[part]) for c in calls]
        assert_same(
            together.map_tensors(lambda tensor, part=part: tensor[part]), admitted(window(budget, batch=1), alone)
        )


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_chunk_overwrites_the_slots_before_it_unless_it_has_others(elsewhere: bool) -> None:
    made = window(4)
    before = admit(made, None, tokens(real(3)))
    copies = [tensor.clone() for tensor in before.tensors()]
    into = admit(made, None, tokens(real(2))) if elsewhere else None
    after = admit(made, before, tokens(real(3), 3), into=into)
    assert after is (into if elsewhere else before)
    assert after.position[0, 0].tolist() == [2, 3, 4, 5, FREE]
    assert all(map(torch.equal, before.tensors(), copies)) == elsewhere


def test_rows_of_a_prompt_may_have_budgets_of_their_own() -> None:
    slots = admit(window(5, row_budgets=True), None, tokens(real(9)), budgets=(3, 5))
    assert slots.state[ROW_BUDGET].flatten().tolist() == [3, 5]
    assert slots.position[:, 0].tolist() == [[6, 7, 8, FREE, FREE, FREE], [4, 5, 6, 7, 8, FREE]]
    slots = admit(window(5, row_budgets=True), slots, tokens(real(1), 9))
    assert slots.position[:, 0].tolist() == [[7, 8, 9, FREE, FREE, FREE], [5, 6, 7, 8, 9, FREE]]


# -- pinned tokens -----------------------------------------------------------------------------------------------------


def pins(columns: Sequence[Sequence[int]], count: int, on_top: bool = False) -> Pins:
    mask = torch.zeros(len(columns), count, dtype=torch.bool)
    for row, each in enumerate(columns):
        mask[row, list(each)] = True
    return Pins(mask, on_top, torch.zeros(len(columns), dtype=torch.int64))


@given(
    columns=st.lists(st.sets(st.integers(0, 7), max_size=3), min_size=2, max_size=2),
    padding=st.integers(0, 4),
    on_top=st.booleans(),
)
def test_pinned_tokens_stay_beside_the_policys(columns: list[set[int]], padding: int, on_top: bool) -> None:
    valid = real(8)
    valid[1, :padding] = False
    made = window(4, capacity=12).with_pins(on_top)
    pinned = pins([sorted(each) for each in columns], 8, on_top)
    slots = admit(made, None, tokens(valid, pins=pinned), budgets=(4, 4) if on_top else ())
    slots = admit(made, slots, tokens(real(3), 8))  # what is pinned stays so
    for row, first in enumerate((0, padding)):
        held = [index - first for index in sorted(columns[row]) if index >= first]
        others = [i for i in range(11 - first) if i not in held]
        rest = 4 if on_top else 4 - len(held)
        expected = sorted([*held, *others[len(others) - rest :]])
        position, state = slots.position[row, 0], slots.state
        assert position[position >= 0].tolist() == expected
        assert position[state[PINNED][row, 0]].tolist() == held
        if on_top:
            assert state[ROW_BUDGET][row].item() == 4 + len(held)


def test_pins_that_leave_the_policy_too_little_are_refused() -> None:
    made, pinned = window(3).with_pins(), pins([[0], [0, 1, 2]], 6)
    with pytest.raises(BudgetError, match=r"3 tokens are to stay, which leaves 0 of it for others.*needs at least 1"):
        admit(made, None, tokens(real(6), pins=pinned))


def test_a_policy_that_keeps_the_prompt_pins_its_real_tokens() -> None:
    policy, valid = policies.resolve("window", {"keep_prompt": True}), real(3)
    valid[1, 0] = False
    prompt = tokens(valid)
    assert torch.equal(prompt.pinned_of(policy), valid)
    assert prompt.pins_on_top(policy).tolist() == [0, 0]
    assert prompt.raised_budgets(policy, (5, 6)) == (5, 6)


def test_pins_on_padding_do_not_count() -> None:
    policy, valid = policies.resolve("window", {}), real(3)
    valid[1, 0] = False
    prompt = tokens(valid, pins=pins([[0], [0, 2]], 3, on_top=True))
    assert prompt.pinned_of(policy).tolist() == [[True, False, False], [False, False, True]]
    assert prompt.pins_on_top(policy).tolist() == [1, 1]
    assert prompt.raised_budgets(policy, (5, 6)) == (6, 7)
    within = tokens(valid, pins=pins([[0], [0, 2]], 3))
    assert within.pins_on_top(policy).tolist() == [0, 0]
    assert within.raised_budgets(policy, (5, 6)) == (5, 6)
    assert not tokens(valid).pinned_of(policy).any()


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_first_tokens_of_a_call(count: int) -> None:
    whole = tokens(real(5), pins=pins([[0, 4], [2]], 5))
    part = whole.first_tokens(count)
    assert torch.equal(part.key, whole.key[:, :, :count])
    assert torch.equal(part.value, whole.value[:, :, :count])
    assert torch.equal(part.valid, whole.valid[:, :count])
    assert part.pins is not None
    assert whole.pins is not None
    assert torch.equal(part.pins.mask, whole.pins.mask[:, :count])
    assert part.attention == Attention()
    assert tokens(real(5)).first_tokens(count).pins is None


# -- policies that merge, and classes of heads -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MergesIntoFirst(Policy):
    """Keeps the latest tokens, and merges every second evicted token into the first of them."""

    name: ClassVar[str] = "merges into first"

    def score(self, tokens: Tokens) -> Tensor:
        return tokens.position

    def state(self) -> dict[str, torch.dtype]:
        return {"merged": torch.float32}

    def merge_evicted(self, tokens: Tokens, cached_keys: Tensor, evicted: Tensor, valid: Tensor) -> Merge:
        share = torch.where(valid, (torch.arange(valid.shape[-1]) % 2).float(), 0.0)
        merged = tokens.state["merged"].clone()
        merged[..., 0] += share.sum(-1)
        return Merge(torch.zeros_like(share, dtype=torch.int64), 3 * share, share, 0.5, {"merged": merged})


@pytest.mark.parametrize("block", [1, 2, 1024])
def test_evicted_tokens_are_merged_as_the_policy_weighs_them(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MERGE_BLOCK", block)
    valid = real(9)
    valid[1, :3] = False  # evicts 0 ... 3, indices 3 ... 6, where row 0 evicts 0 ... 6
    made = layout(MergesIntoFirst(), 2)
    prompt = tokens(valid)
    slots = admit(made, None, prompt)
    for row, merged in enumerate(([1, 3, 5], [4, 6])):
        for stored, vectors in ((slots.key, prompt.key), (slots.value, prompt.value)):
            total = 0.5 * vectors[row, :, 7] + 3 * vectors[row, :, merged].sum(1)
            torch.testing.assert_close(stored.read()[row, :, 0], total / (0.5 + len(merged)))
            assert torch.equal(stored.read()[row, :, 1], vectors[row, :, 8])
        assert slots.state["merged"][row, 0].tolist() == [len(merged), 0, 0]


def test_nothing_is_merged_while_nothing_is_evicted() -> None:
    prompt = tokens(real(2))
    slots = admit(layout(MergesIntoFirst(), 2), None, prompt)
    assert torch.equal(slots.key.read()[:, :, :2], prompt.key)
    assert not slots.state["merged"].any()


@dataclasses.dataclass(frozen=True)
class LargestKeyFirst(Policy):
    """Gives the head whose first key is largest three slots, and the other one."""

    name: ClassVar[str] = "largest key first"
    heads: ClassVar[Any] = "kv"

    def score(self, tokens: Tokens) -> Tensor:
        return tokens.position

    def state(self) -> dict[str, torch.dtype]:
        return {"number": torch.float32}

    def init_token_state(self, key: Tensor, value: Tensor) -> State:
        return {"number": key[..., 0].float()}

    def head_classes(self, heads: int, budget: int) -> tuple[HeadClass, ...]:
        return (HeadClass(1, budget + 1), HeadClass(1, budget - 1))

    def head_counts(self, tokens: Tokens, layer: int) -> Tensor:
        return tokens.state["number"][..., 0]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_each_class_of_heads_keeps_the_tokens_of_its_budget(elsewhere: bool) -> None:
    made, prompt = layout(LargestKeyFirst(), 2), tokens(real(5))
    prompt.key[1, 0] += 500  # in row 1 the first head is largest, in row 0 the second
    slots = admit(made, None, prompt)
    assert slots.order.tolist() == [[1, 0], [0, 1]]
    assert slots.inverse.tolist() == [[1, 0], [0, 1]]
    assert [part.position[:, 0].tolist() for part in slots.by_class] == [[[2, 3, 4, FREE]] * 2, [[4, FREE]] * 2]
    into = admit(made, None, tokens(real(1))) if elsewhere else None
    chunk = tokens(real(1), 5)
    after = admit(made, slots, chunk, into=into)
    assert after.order.tolist() == [[1, 0], [0, 1]]
    assert [part.position[:, 0].tolist() for part in after.by_class] == [[[3, 4, 5, FREE]] * 2, [[5, FREE]] * 2]
    large, small = (part.key.read() for part in after.by_class)
    for row, order in enumerate(([1, 0], [0, 1])):
        assert torch.equal(large[row, 0, :2], prompt.key[row, order[0], 3:])
        assert torch.equal(large[row, 0, 2], chunk.key[row, order[0], 0])
        assert torch.equal(small[row, 0, 0], chunk.key[row, order[1], 0])
        assert after.by_class[0].state["number"][row, 0, 2] == chunk.key[row, order[0], 0, 0]


@given(heads=st.permutations([0, 1]))
def test_the_tokens_of_some_heads(heads: list[int]) -> None:
    whole, attention = tokens(real(3)), Attention(queries=torch.ones(2, 1, 1))
    whole = dataclasses.replace(whole, output_projection=torch.randn(1, HEADS, 3, DIM, 5))
    part = whole.of_heads(torch.tensor([[heads[0]], [heads[1]]]), attention)
    assert part.attention is attention
    for row, head in enumerate(heads):
        assert torch.equal(part.key[row, 0], whole.key[row, head])
        assert torch.equal(part.value[row, 0], whole.value[row, head])
        assert torch.equal(part.output_projection[row, 0], whole.output_projection[0, head])  # type: ignore[index]


def test_statistics_are_divided_among_classes() -> None:
    made = layout(LargestKeyFirst(), 2)
    results = [torch.tensor(number) for number in range(4)]
    assert admission.split_by_class(made, results) == [results[:2], results[2:]]
    assert admission.split_by_class(window(2), results) == [results]
    one, other = Attention(), Attention(queries=torch.ones(1))
    assert admission.attention_of_classes([one, other]) == (one, other)
    assert admission.attention_of_classes([one]) is one
    assert admission.attention_of_classes([]) == Attention()


@dataclasses.dataclass(frozen=True)
class Rescores(Policy):
    """Keeps the tokens of largest values, as `rescore` finds them."""

    name: ClassVar[str] = "rescores"

    def rescore(self, tokens: Tokens, key: Tensor, value: Tensor, weights: Sequence[Tensor]) -> State:
        return {"largest": value[:, :1, :, 0].float()}

    def score(self, tokens: Tokens) -> Tensor:
        return tokens.state["largest"]


def test_scores_may_depend_on_all_cached_vectors() -> None:
    made = layout(Rescores(), 2)
    slots = admit(made, None, tokens(real(4)))  # values fall
    assert slots.position[0, 0].tolist() == [0, 1, FREE]
    slots = admit(made, slots, tokens(real(2), -2))  # larger ones than all before
    assert slots.position[0, 0].tolist() == [4, 5, FREE]
    assert "largest" not in slots.state


def test_a_layout_with_more_slots_than_tokens_leaves_them_free() -> None:
    slots = admit(window(4, capacity=64), None, tokens(real(2)))
    assert (slots.position >= 0).sum(-1).flatten().tolist() == [2, 2]
    assert isinstance(slots, Slots)
    assert slots.capacity == 64
