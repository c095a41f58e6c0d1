"""Test pins and `keep_prompt`: pinned tokens stay, and policies rank only the other tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies import Policy, Tokens, names, resolve
from kvpass.policies.pinned_tokens import Pins
from kvpass.reference.random import draw
from tests.aligners import random_aligner
from tests.diagnostics.test_simulate import check
from tests.layer import CallTokens, LayerOnReference, LayerOnSlots, layout_for
from tests.strategies import ROWS, Case, Row, cases
from tests.test_chunks_and_padding import compare

KEEPING = [
    "d2o", "expected_attention", "h2o", "keydiff", "knorm", "r_kv", "random", "roco", "streaming", "tova",
    "tri_attention", "vase", "window",
]  # fmt: skip
keeping = pytest.mark.parametrize("row", [ROWS[name] for name in KEEPING], ids=KEEPING)


def kept(draw: st.DataObject, row: Row, given: int, **fixed: object) -> Case:
    """Draw a case with pinned tokens, and one to eight more slots than the policy needs for the others."""
    options = {**draw.draw(st.composite(row.draw_options)()), "keep_prompt": True}
    policy = resolve(row.name, options)
    budget = given + policy.fitting_budget(1) + draw.draw(st.integers(0, 8))
    return draw.draw(cases(row, options=options, budget=budget, **fixed))


@pytest.mark.few(3)
@keeping
@given(data=st.data(), prompt=st.integers(1, 12))
def test_a_prompt_stays_as_the_reference_has_it(row: Row, data: st.DataObject, prompt: int) -> None:
    got = check(kept(data, row, prompt, prompt=prompt, steps=16))
    assert (got.positions[..., :prompt] == torch.arange(prompt)).all()


@pytest.mark.few(3)
@keeping
@given(data=st.data())
def test_chunks_stay_as_the_reference_has_it(row: Row, data: st.DataObject) -> None:
    case = kept(data, row, 12, prompt=4, dim=8)
    holes = data.draw(st.sampled_from([0.0, 0.3]))
    limits = data.draw(st.sampled_from([[], [case.budget + 2, case.budget][: case.rows]]))
    compare(case, [4, 1, 1, 1, 5, *[1] * 9, 3, 1, 1], holes, padded_steps=True, limits=limits)


class Marks:
    """Draws pins for parts of a conversation: at most `most` real tokens of each row."""

    def __init__(self, seed: int, rows: int, most: int, on_top: bool) -> None:
        self.drawn, self.on_top = torch.Generator().manual_seed(seed), on_top
        self.left = torch.full((rows, 1), most)

    def __call__(self, part: CallTokens) -> Pins:
        marked = (torch.rand(part.valid.shape, generator=self.drawn) < 0.4) & part.valid
        marked &= marked.cumsum(-1) <= self.left
        self.left -= marked.sum(-1, keepdim=True)
        return Pins(marked, self.on_top, torch.zeros(len(marked), dtype=torch.int64))


@pytest.mark.few(4)
@keeping
@given(data=st.data(), on_top=st.booleans())
def test_pins_stay_as_the_reference_has_it(row: Row, data: st.DataObject, on_top: bool) -> None:
    """Test any tokens of prompts, chunks and steps, with padding, row budgets, and every storage format."""
    most = data.draw(st.integers(1, 9))
    options = data.draw(row.options)
    policy = resolve(row.name, options)
    least = policy.minimum_budget() + policy.interval - 1
    budget = data.draw(st.integers(0, 8)) + max(least, row.min_budget) + (0 if on_top else most)
    case = data.draw(cases(row, options=options, budget=budget, dim=8))
    limits = [budget + more for more in data.draw(st.sampled_from([(2, 0), (0, 0), (0, 3)]))][: case.rows]
    compare(
        case,
        [case.prompt, *data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 12]), max_size=12))],
        data.draw(st.sampled_from([0.0, 0.3])),
        padded_steps=True,
        limits=limits if on_top or data.draw(st.booleans()) else (),
        spare=most if on_top else 0,
        kv_dtype=data.draw(st.sampled_from([None, None, "int8", "int4"])),
        pinned=Marks(case.seed, case.rows, most, on_top),
    )


@dataclasses.dataclass(frozen=True)
class Given(Policy):
    """A policy with given scores for each position, in hundredths."""

    name: ClassVar[str] = "given"
    scores: tuple[int, ...] = (5, 30, 2, 1, 20, 15, 10, 8, 6, 3)

    def score(self, tokens: Tokens) -> torch.Tensor:
        return torch.tensor(self.scores)[tokens.position.clamp(min=0)]


def selected(pinned: set[int], on_top: bool = False) -> list[int]:
    """Return the positions that stay of ten tokens with a budget of five."""
    q, k, v = layer(10)
    mask = torch.tensor([[position in pinned for position in range(10)]])
    pins = Pins(mask, on_top, torch.zeros(1, dtype=torch.int64))
    part = CallTokens(q, k, v, torch.ones_like(mask), pins)
    layout = layout_for(Given(), 5, part, ranked=False, spare=len(pinned)).with_pins(on_top)
    lowered = LayerOnSlots(layout, 1e4)
    lowered.feed(part)
    return lowered.positions()[0][0]


def test_pins_count_inside_the_budget_or_on_top_of_it() -> None:
    """Check by hand which tokens of highest score stay in addition to the pinned ones."""
    assert selected(set()) == [1, 4, 5, 6, 7]
    assert selected({0, 2}) == [0, 1, 2, 4, 5]
    assert selected({0, 2}, on_top=True) == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("compiled", [True, False])
def test_pins_must_leave_the_others_what_the_policy_needs(compiled: bool) -> None:
    q, k, v = layer(8)
    pins = Pins(torch.ones(1, 8, dtype=torch.bool), False, torch.zeros(1, dtype=torch.int64))
    part = CallTokens(q, k, v, torch.ones(1, 8, dtype=torch.bool), pins)
    layout = layout_for(resolve("h2o", {}), 9, part, ranked=False).with_pins()
    driven = (LayerOnSlots if compiled else LayerOnReference)(layout, 1e4)
    with pytest.raises(BudgetError, match=r"8 tokens are to stay, which leaves 1 .* at least 2: raise .* on_top=True"):
        driven.feed(part)


def layer(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, 8, generator=drawn) for _ in range(3))
    return 2 * q, k, v


def test_generated_tokens_of_the_highest_draws_stay() -> None:
    held = simulate("random", *layer(12), prompt=4, budget=6, keep_prompt=True, compiled=True).positions[-1, 0, 0]
    luckiest = sorted(range(4, 12), key=lambda position: -draw(0, position, 0))[:2]
    assert held.tolist() == [0, 1, 2, 3, *sorted(luckiest)]


def test_half_of_the_unpinned_slots_are_recent() -> None:
    """Check h2o with 10 slots and a prompt of 6: the last 2 of the other 4 are protected."""
    trace = simulate("h2o", *layer(30), prompt=6, budget=10, keep_prompt=True, compiled=True)
    for seen, held in enumerate(trace.positions[:, 0, 0].tolist(), start=6):
        if seen >= 10:
            assert held[:6] == [*range(6)]
            assert held[-2:] == [seen - 2, seen - 1]


def test_no_token_is_merged_into_a_pinned_prompt() -> None:
    q, k, v = layer(30)
    trace = simulate("d2o", q, k, v, prompt=6, budget=12, sinks=0, keep_prompt=True, compiled=True)
    assert torch.equal(trace.keys[:, :, :6], k[:, :, :6])
    assert torch.equal(trace.values[:, :, :6], v[:, :, :6])
    merged = [
        (trace.values[0, 0, slot] != v[0, 0, place]).any() for slot, place in enumerate(trace.positions[-1, 0, 0])
    ]
    assert any(merged)  # but other tokens are merged


@pytest.mark.parametrize("compiled", [True, False])
def test_a_pinned_prompt_must_leave_the_minimum_budget(compiled: bool) -> None:
    with pytest.raises(BudgetError, match=r"5 tokens are to stay, which leaves 1 .* needs at least 2"):
        simulate("h2o", *layer(8), prompt=5, budget=6, keep_prompt=True, compiled=compiled)
    with pytest.raises(BudgetError, match="7 tokens are to stay, which leaves 0 "):
        simulate("random", *layer(8), prompt=7, budget=6, keep_prompt=True, compiled=compiled)


@pytest.mark.parametrize("name", [name for name in names() if name in ROWS and name not in (*KEEPING, "kv_align")])
def test_keep_prompt_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(PolicyError, match=f"has no effect under policy {name!r}: .{{10}}"):
        resolve(name, {"keep_prompt": True})


def test_keep_prompt_is_refused_with_an_aligner() -> None:
    with pytest.raises(PolicyError, match="has no effect under policy 'kv_align'"):
        dataclasses.replace(kvpass.policies.get("kv_align")(aligner=random_aligner("direct")), keep_prompt=True)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_keep_prompt_must_be_a_bool(value: object) -> None:
    with pytest.raises(PolicyError, match="keep_prompt"):
        resolve("window", {"keep_prompt": value})


@dataclasses.dataclass(frozen=True)
class Halves(Policy):
    """A policy that protects the latest half of the budget and evicts the latest other token; its `victim` is wrong."""

    name: ClassVar[str] = "halves"

    def victim(self, tokens: Tokens) -> torch.Tensor:
        return torch.zeros_like(tokens.position[..., 0])

    def score(self, tokens: Tokens) -> torch.Tensor:
        recent = tokens.newest(tokens.budget - tokens.budget // 2)
        return torch.where(recent, tokens.position + 1000, -tokens.position)


def test_a_policy_of_ones_own_sees_the_rest_of_the_budget() -> None:
    """Check 10 slots and a prompt of 4: of the other 6 the latest 3 are protected; `victim` is unused."""
    trace = simulate(Halves(keep_prompt=True), *layer(20), prompt=4, budget=10, compiled=True)
    assert trace.positions[-1, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 17, 18, 19]
