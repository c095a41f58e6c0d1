"""Compare lowered operations with references: padding anywhere, chunks on live slots, padded decode steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.drawing import EXAMPLES
from tests.layer import CallTokens, LayerOnReference, LayerOnSlots, layout_for
from tests.strategies import ROWS, TABLE, cases, fitting_budget

EVICTING = [row for row in TABLE if row.name != "full"]


@st.composite
def budgets(draw, case):
    """Draw different budgets for the rows that the policy accepts; none if rows must have equal budgets."""
    if not ROWS[case.name].rows:
        return []
    policy, most = case.policy, case.budget + 8
    if case.name == "kv_align":
        most = policy.loaded.scope.window
    fit = sorted(
        {fitting_budget(policy, draw(st.integers(ROWS[case.name].min_budget, most))) for _ in range(case.rows)}
    )
    return draw(st.permutations([fit[0], *fit, *fit][: case.rows]))


def stretches(case, lengths, holes, padded_steps):
    """Yield random tokens for these lengths; a share `holes` of them is padding."""
    drawn = torch.Generator().manual_seed(case.seed)
    for length in lengths:
        shape = (case.rows, case.heads, length, case.dim)
        q = torch.randn(case.rows, case.heads * case.groups, length, case.dim, generator=drawn) * 2
        k, v = torch.randn(shape, generator=drawn), torch.randn(shape, generator=drawn)
        real = torch.rand(case.rows, length, generator=drawn) >= holes
        yield CallTokens(q, k, v, real if length > 1 or padded_steps else torch.ones_like(real))


def compare(case, lengths, holes, padded_steps=False, limits=(), spare=0, kv_dtype=None, pinned=lambda part: None):
    """Compare slots with the reference; `pinned` returns the pins of a part, which may have slots on top."""
    policy, theta = case.policy.for_layer(0, 1), 1e4
    assume(policy.evicts)  # a layer may keep every token
    parts = [dataclasses.replace(x, pins=pinned(x)) for x in stretches(case, lengths, holes, padded_steps)]
    layout = layout_for(policy, case.budget, parts[0], case.positions == "cache", spare, kv_dtype, limits)
    pins = [part.pins for part in parts if part.pins is not None]
    if pins:
        layout = layout.with_pins(pins[0].on_top)
    lowered, reference = LayerOnSlots(layout, theta, limits), LayerOnReference(layout, theta, limits)
    for part in parts:
        got, expected = lowered.feed(part), reference.feed(part)
        assert lowered.positions() == reference.positions()
        if pins:
            assert torch.equal(
                lowered.slots.cached_indices(layout, pinned=True),
                reference.layer.index(pinned=True).expand(-1, layout.heads, -1),
            )
        real = part.valid[:, None, :, None].expand_as(got)
        torch.testing.assert_close(got[real], expected[real], atol=1e-4, rtol=1e-4)


@pytest.mark.few(6)
@pytest.mark.parametrize("row", EVICTING, ids=lambda row: row.name)
@given(data=st.data())
def test_padded_prompts_and_chunks(row, data):
    case = data.draw(cases(row, dim=8))
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 2, 5, 12, 25]), min_size=1, max_size=12))
    compare(case, [case.prompt, *lengths], data.draw(st.sampled_from([0.0, 0.2, 0.6])))


@pytest.mark.few(10)
@pytest.mark.parametrize("row", EVICTING, ids=lambda row: row.name)
@given(data=st.data())
def test_padded_steps_change_nothing(row, data):
    case = data.draw(cases(row, dim=8))
    limits = data.draw(st.just([]) | budgets(case))
    compare(case, [case.prompt] + [1] * data.draw(st.integers(1, 12)), 0.3, padded_steps=True, limits=limits)


@pytest.mark.parametrize("row", EVICTING, ids=lambda row: row.name)
@given(data=st.data())
@settings(max_examples=EXAMPLES // 3)
def test_a_row_of_a_batch_is_as_alone(row, data):
    """Compare each row of a padded batch with its real tokens alone, in a prompt and steps.

    In half of the cases rows have different budgets.
    """
    case = dataclasses.replace(data.draw(cases(row, dim=8)), rows=3)
    policy = case.policy.for_layer(0, 1)
    assume(policy.evicts)  # a layer may keep every token
    prompt, *steps = stretches(case, [case.prompt, *[1] * data.draw(st.integers(1, 12))], 0.4, False)
    prompt.valid[:, -1] = True
    limits = data.draw(st.just([]) | budgets(case))
    whole = layout_for(policy, case.budget, prompt, case.positions == "cache", limits=limits)
    together = LayerOnSlots(whole, 1e4, limits)
    outputs = [together.feed(part) for part in (prompt, *steps)]
    for b in range(case.rows):
        alone = LayerOnSlots(dataclasses.replace(whole, batch=1), 1e4, limits[b : b + 1])
        for part, output in zip((prompt, *steps), outputs, strict=True):
            real = part.valid[b]
            q, k, v = (x[b : b + 1, :, real] for x in (part.q, part.k, part.v))
            got = alone.feed(CallTokens(q, k, v, part.valid[b : b + 1, real]))
            torch.testing.assert_close(output[b : b + 1, :, real], got, atol=1e-4, rtol=1e-4)
        assert together.positions()[b] == alone.positions()[0]


@pytest.mark.few(10)
@pytest.mark.parametrize("row", [row for row in TABLE if row.periodic or row.name == "buzz"], ids=lambda row: row.name)
@given(data=st.data())
def test_a_missed_compaction_stays_within_the_slots(row, data):
    """Check rows behind the host's count: padded steps delay their compaction, but slots suffice."""
    case = data.draw(cases(row, dim=8))
    parts = list(stretches(case, [case.prompt] + [1] * 20, 0.3, True))
    layout = layout_for(case.policy, case.budget, parts[0], case.positions == "cache")
    lowered = LayerOnSlots(layout, 1e4)
    lowered.knows_padding = False
    for part in parts:
        assert torch.isfinite(lowered.feed(part)).all()
        assert all(len(head) == len(set(head)) < layout.capacity for row in lowered.positions() for head in row)


@pytest.mark.few(10)
@pytest.mark.parametrize("row", [row for row in EVICTING if row.rows], ids=lambda row: row.name)
@given(data=st.data())
def test_rows_with_budgets_of_their_own(row, data):
    """Test slots for the largest budget or more, with prompts, steps and chunks."""
    case = dataclasses.replace(data.draw(cases(row, dim=8)), rows=3)
    lengths = data.draw(st.lists(st.sampled_from([1, 1, 5]), max_size=12))
    compare(
        case, [case.prompt, *lengths], 0.2, limits=data.draw(budgets(case)), spare=data.draw(st.sampled_from([0, 5]))
    )
