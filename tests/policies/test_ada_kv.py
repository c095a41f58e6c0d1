"""Test AdaKV: budgets computed by hand, and invariants of slots in classes of heads."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs

import kvpass
from kvpass.cache.cached_attention import CachedAttention, NewTokens
from kvpass.cache.layout import ROW_BUDGET
from kvpass.cache.model_cache import caches_in
from kvpass.cache.slots import ClassedSlots, Slots
from kvpass.cache.step import decode_step
from kvpass.errors import BudgetError, PolicyError, UnsupportedGraph
from kvpass.policies import resolve
from kvpass.policies.ada_kv import AdaKV, _changes, classes_of, count_winners, shares_of
from kvpass.policies.budgets import HeadClass
from tests.architectures import zoo
from tests.changed_files import changed
from tests.layer import CallTokens, LayerOnSlots, layout_for
from tests.models import build, prompt, with_uneven_attention

SCORES = torch.tensor([[[.30, .20, .15, .10, .05, .05, .05, .05, .03, .02],
                        [.90, .02, .02, .01, .01, .01, .01, .01, .005, .005]]])  # fmt: skip


@pytest.mark.parametrize(("safeguard", "wanted"), [(0.0, [7, 1]), (0.2, [7, 1]), (0.5, [6, 2]), (1.0, [4, 4])])
def test_counts_by_hand(safeguard: float, wanted: list[int]) -> None:
    """Test eight tokens of two heads: the first head's best seven exceed the other's second best."""
    position = torch.arange(10).expand(1, 2, -1)
    assert count_winners(SCORES, position, 4, safeguard).tolist() == [wanted]
    padded = position.clone()
    padded[:, 0, 2:7] = -1  # five tokens that do not compete
    assert count_winners(SCORES, padded, 4, 0.0).tolist() == [[5, 3]]


def test_budgets_by_hand() -> None:
    assert classes_of(shares_of(8), 8 * 64, 4) == (HeadClass(1, 245), HeadClass(2, 91), HeadClass(5, 17))
    assert classes_of((1.0, 1.0, 1.0), 90, 4) == ()
    assert AdaKV(shares=(1.0,)).head_classes(3, 90) == ()
    assert classes_of((0.5, 1.5), 40, 5) == (HeadClass(1, 28), HeadClass(1, 12))
    assert classes_of((2.0, 2.0, 1.0, 1.0, 1.0), 5 * 13, 4) == (HeadClass(2, 16), HeadClass(3, 11))
    assert classes_of((2.0, 1.0), 8, 4) == ()  # not more than the minimum


@pytest.mark.parametrize(("count", "most"), [(0, 3), (1, 0), (1, 4), (2, 3), (3, 2)])
def test_changes_of_budgets_come_in_order(count: int, most: int) -> None:
    every = itertools.product(range(-most, most + 1), repeat=count)
    wanted = sorted(every, key=lambda each: (sum(map(abs, each)), [-more for more in each]))
    assert [each for size in range(most * count + 1) for each in _changes(count, most, size)] == wanted


@given(
    heads=st.integers(2, 40), least=st.integers(1, 70), more=st.integers(0, 300),
    shares=st.lists(st.sampled_from([5.0, 1.45, 0.9, 0.22]), min_size=2, max_size=12),
)  # fmt: skip
def test_budgets_add_up_and_fall(heads: int, least: int, more: int, shares: list[float]) -> None:
    for each in (shares_of(heads), tuple(shares)):
        count, budget = len(each), least + more
        found = classes_of(each, count * budget, least) or (HeadClass(count, budget),)
        assert sum(part.heads for part in found) == count
        assert sum(part.heads * part.budget for part in found) == count * budget
        assert min(part.budget for part in found) >= least
        assert [part.budget for part in found] == sorted({part.budget for part in found}, reverse=True)
        assert len(found) <= 4


def layer(seed: int, rows: int = 2, heads: int = 4, tokens: int = 40) -> CallTokens:
    """Return random tokens; each head attends more sharply than the previous one."""
    drawn = torch.Generator().manual_seed(seed)
    sharpness = torch.arange(1, heads + 1).repeat_interleave(2)[:, None, None] * 0.8
    q = torch.randn(rows, 2 * heads, tokens, 8, generator=drawn) * sharpness
    k, v = (torch.randn(rows, heads, tokens, 8, generator=drawn) for _ in range(2))
    return CallTokens(q, k, v, torch.ones(rows, tokens, dtype=torch.bool))


def parts(whole: CallTokens, prompt: int) -> list[CallTokens]:
    """Split a conversation into a prompt, a chunk of three tokens, and steps."""
    ends = [0, prompt, prompt + 3, *range(prompt + 4, whole.q.shape[2] + 1)]
    fields = ("q", "k", "v")
    return [
        CallTokens(*(getattr(whole, name)[:, :, a:b] for name in fields), whole.valid[:, a:b])
        for a, b in itertools.pairwise(ends)
    ]


def fed(policy: AdaKV, whole: CallTokens, prompt: int = 24, budget: int = 9) -> tuple[LayerOnSlots, list[Tensor]]:
    pieces = parts(whole, prompt)
    lowered = LayerOnSlots(layout_for(policy, budget, pieces[0], ranked=False), 1e4)
    return lowered, [lowered.feed(piece) for piece in pieces]


@dataclasses.dataclass(frozen=True)
class TwoEqualClasses(AdaKV):
    """A policy with classes of equal capacity, in the model's order of heads."""

    name = "_two_equal_classes"

    def head_classes(self, heads: int, budget: int) -> tuple[HeadClass, ...]:
        return (HeadClass(1, budget), HeadClass(heads - 1, budget))

    def head_counts(self, tokens: Any, layer: int) -> Tensor:
        return torch.zeros(tokens.position.shape[:2], dtype=torch.int64)


def test_equal_classes_are_snapkv_bit_for_bit() -> None:
    whole = layer(0)
    ours, outputs = fed(TwoEqualClasses(window=3), whole)
    theirs, wanted = fed(resolve("snapkv", {"window": 3}), whole)  # type: ignore[arg-type]
    assert isinstance(ours.slots, ClassedSlots)
    assert isinstance(theirs.slots, Slots)
    assert all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True))
    assert ours.positions() == theirs.positions()


COUNTS: list[Tensor] = []


@dataclasses.dataclass(frozen=True)
class Noting(AdaKV):
    """A policy that records the counts of heads."""

    name = "_noting"

    def head_counts(self, tokens: Any, layer: int) -> Tensor:
        COUNTS.append(super().head_counts(tokens, layer))
        return COUNTS[-1]


@pytest.mark.parametrize("order", [(2, 0, 3, 1), (3, 2, 1, 0)])
def test_permuted_heads_give_permuted_results(order: tuple[int, ...]) -> None:
    """Test heads with different counts; among equal counts the lower head comes first."""
    whole = layer(1, rows=1)
    by_query = [2 * head + i for head in order for i in range(2)]
    other = CallTokens(whole.q[:, by_query], whole.k[:, order], whole.v[:, order], whole.valid)
    COUNTS.clear()
    (ours, outputs), (theirs, permuted) = (fed(Noting(window=3, safeguard=0.0), each) for each in (whole, other))
    assert len(set(COUNTS[0][0].tolist())) == 4
    for one, two in zip(outputs, permuted, strict=True):
        assert torch.equal(one[:, by_query], two)
    assert [[row[head] for head in order] for row in ours.positions()] == theirs.positions()


def test_classes_equal_one_rectangle_with_a_budget_for_each_head() -> None:
    """Compare with a padded rectangle with masks, which holds as many tokens in more slots."""
    policy, whole = AdaKV(window=3), layer(2)
    lowered, _ = fed(policy, whole, prompt=24)
    slots = lowered.slots
    assert isinstance(slots, ClassedSlots)
    plain = dataclasses.replace(lowered.layout, classes=(), row_budgets=True)
    rectangle = slots.joined_classes(lowered.layout).with_state_of(plain, [0, 0])
    budgets = torch.tensor([part.budget for part in lowered.layout.by_class])
    rectangle.state[ROW_BUDGET].copy_(budgets[slots.inverse][..., None])
    new = layer(3, tokens=12)
    for t in range(12):
        q, k, v = (getattr(new, name)[:, :, t : t + 1] for name in ("q", "k", "v"))
        real = torch.tensor([True, t != 4])
        ours, theirs = (
            decode_step(layout, CachedAttention(8**-0.5), held, NewTokens(q, k, v, real)).output
            for layout, held in ((lowered.layout, slots), (plain, rectangle))
        )
        torch.testing.assert_close(ours, theirs)
        one, other = slots.joined_classes(lowered.layout).position, rectangle.position
        assert torch.equal(one.sort(-1).values, other.sort(-1).values)


def compiled(model: Any, inner: Any = "eager", **more: Any) -> Any:
    settings: dict[str, Any] = {"budget": 12, "window": 3, **more}
    return torch.compile(model, backend=kvpass.backend("ada_kv", inner=inner, **settings))


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def sharp() -> Any:
    """Return a model whose heads attend with different sharpness."""
    return with_uneven_attention(build("GPTNeoX"))


@torch.no_grad()
@pytest.mark.few(1)
@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
def test_bytes_are_those_of_equal_heads(kv_dtype: str | None) -> None:
    """Compare bytes, except for the order of the heads and two counters of each class."""
    model, reports = sharp(), []
    for policy, more in (("ada_kv", {}), ("snapkv", {})):
        backend = kvpass.backend(policy, budget=12, window=3, inner="eager", kv_dtype=kv_dtype, **more)
        cache = torch.compile(model, backend=backend)(ids(2, 40), use_cache=True).past_key_values
        reports.append(kvpass.inspect(cache))
        torch._dynamo.reset()
    ours, theirs = reports
    orders, counters = 2 * 2 * 4 * 8, 3 * 2 * 2 * 8
    assert [x.nbytes for x in ours.layers] == [x.nbytes + orders + counters for x in theirs.layers]
    assert ours.layers[0].capacities == ((1, 19), (1, 13), (1, 11), (1, 9))
    assert sum(heads * slots for heads, slots in ours.layers[0].capacities) == 4 * theirs.layers[0].capacity
    assert "1x19 1x13 1x11 1x9" in str(ours)
    held = (ours.layers[0].positions >= 0).sum(-1)
    assert held.sort(-1).values.tolist() == [[8, 10, 12, 18]] * 2


@torch.no_grad()
def test_rows_with_other_orders_are_picked_with_them_and_compile_nothing_more() -> None:
    counting = EagerAndRecordGraphs()
    run = compiled(sharp(), counting)
    prompts, after = ids(4, 40), ids(4, 1, seed=9)
    cache = run(prompts, use_cache=True).past_key_values
    orders = [layer.slots.order.clone() for layer in caches_in(cache)]
    assert any(len({tuple(row) for row in order.tolist()}) > 1 for order in orders)
    wanted = run(after, past_key_values=cache, use_cache=True).logits
    cache = run(prompts, use_cache=True).past_key_values
    picked = torch.tensor([2, 0, 3, 1])
    cache.reorder_cache(picked)
    made = len(counting.graphs)
    got = run(after[picked], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(got.logits, wanted[picked])
    for layer, order in zip(caches_in(got.past_key_values), orders, strict=True):
        assert torch.equal(layer.slots.order, order[picked])
    for seed in range(3):
        other = run(ids(4, 40, seed=20 + seed), use_cache=True).past_key_values
        run(after, past_key_values=other, use_cache=True)
    assert len(counting.graphs) == made


@torch.no_grad()
@pytest.mark.few(1)
@pytest.mark.parametrize("kv_dtype", [None, "int4"])
def test_a_saved_cache_goes_on(tmp_path: Any, kv_dtype: Any) -> None:
    run = compiled(sharp(), kv_dtype=kv_dtype)
    cache = run(ids(3, 40), use_cache=True).past_key_values
    kvpass.save_cache(cache, tmp_path / "talk")
    loaded = kvpass.load_cache(tmp_path / "talk", run)
    one, other = (run(ids(3, 1), past_key_values=each, use_cache=True) for each in (cache, loaded))
    assert torch.equal(one.logits, other.logits)


@torch.no_grad()
def test_a_file_with_a_wrong_order_of_heads_is_refused(tmp_path: Path) -> None:
    def repeat_a_head(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["0.order"][0, 0] = tensors["0.order"][0, 1]

    run = compiled(sharp())
    kvpass.save_cache(run(ids(1, 40), use_cache=True).past_key_values, tmp_path / "talk")
    other = changed(tmp_path / "talk", repeat_a_head, tmp_path / "other")
    with pytest.raises(kvpass.errors.CacheFileError, match="order of heads"):
        kvpass.load_cache(other, run)


@torch.no_grad()
def test_invalid_budgets_are_refused() -> None:
    with pytest.raises(BudgetError, match=r"budget=64 .* at least 65"):
        resolve("ada_kv", {}).check_budget(64)
    with pytest.raises(
        BudgetError, match=r"budget=0\.5: 'ada_kv' assigns fixed slots to each head, .* number of slots"
    ):
        kvpass.backend("ada_kv", budget=0.5)
    with pytest.raises(BudgetError, match="needs a budget"):
        kvpass.backend("ada_kv")
    with pytest.raises(PolicyError, match="positions='cache': heads keep different numbers of tokens"):
        kvpass.backend("ada_kv", budget=80, positions="cache")
    with pytest.raises(PolicyError, match="at most 4 different numbers"):
        resolve("ada_kv", {"shares": (5.0, 4.0, 3.0, 2.0, 1.0)})
    with pytest.raises(PolicyError, match=r"2 numbers for a model with 4 KV heads"):
        compiled(build("GPTNeoX"), shares=(2.0, 1.0))(ids(1, 20), use_cache=True)
    q, k, v = (torch.randn(1, heads, 20, 8) for heads in (2, 1, 1))
    with pytest.raises(PolicyError, match="one per layer: use policy='snapkv'"):
        kvpass.simulate("ada_kv", q, k, v, prompt=12, budget=8, window=3)
    with pytest.raises(PolicyError, match="selects among the tokens of a prompt"):
        kvpass.prefill(compiled(build("Llama")), ids(1, 20), chunk=10, pin=[(0, 2)])


@torch.no_grad()
def test_a_mask_for_each_head_is_refused() -> None:
    run = compiled(zoo.build("bloom", "causal"))
    cache = run(ids(1, 20) % 60, use_cache=True).past_key_values
    with pytest.raises(UnsupportedGraph, match=r"each head has its own mask.*'snapkv'"):
        run(ids(1, 1) % 60, past_key_values=cache, use_cache=True)


@dataclasses.dataclass(frozen=True)
class SaysNothingOfPrompts(TwoEqualClasses):
    """A policy of a user, who gives no reason against `keep_prompt`."""

    name = "_says_nothing_of_prompts"
    keep_prompt_refusal = ""


def test_pins_are_refused_if_heads_have_budgets_of_their_own() -> None:
    loop = kvpass.DecodeLoop(build("Llama"), SaysNothingOfPrompts(window=3), budget=8, inner="eager")
    ids = prompt(1, 6, ())[0]
    with pytest.raises(PolicyError, match="pin: not supported for '_says_nothing_of_prompts', whose heads"):
        loop.prompt(ids, pin=[(0, 2)])
    loop.prompt(ids)
    with pytest.raises(PolicyError, match="pin: not supported for '_says_nothing_of_prompts', whose heads"):
        loop.prompt(ids, pin=[(0, 2)])
