"""Test budgets that are shares of each row's real tokens: a padded row keeps the same tokens as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvpass
from kvpass import policies
from kvpass.cache.layout import ROW_BUDGET
from kvpass.cache.model_cache import caches_in
from kvpass.policies.budgets import Plan, by_rows
from tests.aligners import random_aligner
from tests.models import build, model_with_unequal_layers, prompt, teacher_forced
from tests.strategies import MODEL_SPECIFIC, TABLE
from tests.traces import Traced


def cached_positions(run: Any, row: int = 0, padding: int = 0, step: int = -1) -> list[list[int]]:
    """Return a row's positions in each layer after a step, counted from the end of the padding."""
    return [
        [position - padding for position in layer[row, 0].tolist() if position >= 0] for layer in run.positions[step]
    ]


@pytest.mark.parametrize("policy", ["streaming", "h2o", "cascade", "d2o"])
@pytest.mark.parametrize("padding", [(6,), (6, 6)], ids=["one row", "two rows"])
@pytest.mark.few(1)
def test_a_share_counts_no_padding(traced: Callable[..., Traced], policy: str, padding: tuple[int, ...]) -> None:
    """Check that rows of 14 tokens in 20 columns keep 7 tokens, not 10."""
    model, (ids, mask) = traced("Llama", len(padding), "is padded or not"), prompt(len(padding), 24, padding)
    padded = teacher_forced(model, ids, mask, [20, 1, 1], policy=policy, budget=0.5, inner="eager")
    alone = teacher_forced(model, ids[:1, 6:], mask[:1, 6:], [14, 1, 1], policy=policy, budget=0.5, inner="eager")
    assert cached_positions(padded, padding=6) == cached_positions(alone)
    torch.testing.assert_close(padded.logits[:1, -3:], alone.logits[:, -3:], atol=1e-4, rtol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["eager", "reference"])
def test_rows_of_different_lengths_keep_their_own_share_under_d2o(inner: str) -> None:
    model, (ids, mask) = Traced(model_with_unequal_layers(2)), prompt(2, 24, (8, 0))
    together = teacher_forced(model, ids, mask, [20, 1, 1], policy="d2o", budget=0.5, inner=inner)
    for row, left in enumerate((8, 0)):
        one = (ids[row : row + 1, left:], mask[row : row + 1, left:])
        alone = teacher_forced(model, *one, [20 - left, 1, 1], policy="d2o", budget=0.5, inner=inner)
        assert cached_positions(together, row, left) == cached_positions(alone)


PADDING = (9, 0, 4)
STEPS = [25, *[1] * 5, 3, *[1] * 4]  # beyond `every`, `refresh_interval` and the next compaction of buzz
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((row.name, row.fixed) for row in TABLE if row.rows and row.name not in ("full", *MODEL_SPECIFIC)),
    ("buzz", {"iterate_prompt": False, "log_n": True}),
    ("buzz", {"window": 2}),
    ("cascade", {"order": "attend_first", "heads": "kv"}),
    ("cascade", {"cascades": 2, "sinks": 1, "reduce": "max", "growth": "linear"}),
    ("d2o", {"merge": "none"}),
    ("sage", {"refresh_interval": 3, "share": "private"}),
    ("tova", {"interval": 3}),
    ("snapkv", {"window": 3, "interval": 2, "positions": "cache"}),
    ("h2o", {"positions": "cache"}),
    ("roco", {"positions": "cache"}),
    ("cascade", {"positions": "absolute"}),
    ("tova", {"kv_dtype": "int8"}),
    ("kv_align", {"recipe": "direct", "every": 1}),
    ("kv_align", {"recipe": "paper", "every": 1}),
    ("kv_align", {"recipe": "direct", "every": 2}),
]
every_policy = pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=[f"{name}-{options}" if options else name for name, options in OPTIONS]
)


def settings(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `kvpass.backend`."""
    if name == "kv_align":
        every = options["every"]
        options = {"aligner": random_aligner(options["recipe"], layers=2, heads=2, dim=16, every=every), "every": every}
    return {"policy": name, "budget": 0.5, **options}


@pytest.mark.few(1)
@every_policy
def test_a_row_keeps_its_own_share_beside_others(
    traced: Callable[..., Traced], name: str, options: dict[str, Any]
) -> None:
    """Compare rows of a batch with the reference, and with the same rows alone."""
    model, (ids, mask) = traced("Llama", 3, "is fed a share"), prompt(3, sum(STEPS), PADDING)
    chosen = settings(name, options)
    together = teacher_forced(model, ids, mask, STEPS, **chosen, inner="eager")
    reference = teacher_forced(model, ids, mask, STEPS, **chosen, inner="reference")
    for ours, theirs in zip(together.positions, reference.positions, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    real = mask.bool()
    torch.testing.assert_close(together.logits[real], reference.logits[real], atol=1e-4, rtol=1e-4)
    for row, left in enumerate(PADDING):
        alone = teacher_forced(model, ids[row : row + 1, left:], mask[row : row + 1, left:], [25 - left, *STEPS[1:]],
                      **chosen, inner="eager")  # fmt: skip
        for step, layers in enumerate(alone.positions):
            for layer, mine in enumerate(layers):
                assert cached_positions(together, row, left, step)[layer] == [x for x in mine[0, 0].tolist() if x >= 0]
        torch.testing.assert_close(together.logits[row, left:], alone.logits[0], atol=1e-4, rtol=1e-4)


PICKED = [
    ("h2o", {}),
    ("buzz", {}),
    ("cascade", {}),
    ("d2o", {}),
    ("sage", {"refresh_interval": 3}),
    ("kv_align", {"recipe": "direct", "every": 2}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "options"), PICKED, ids=[name for name, _ in PICKED])
@torch.no_grad()
def test_budgets_go_with_the_rows_that_are_picked(
    traced: Callable[..., Traced], name: str, options: dict[str, Any]
) -> None:
    """Reorder, drop and repeat rows in consecutive steps, as beam search does."""
    ids, mask = prompt(3, 40, PADDING)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    model = traced("Llama", 3, "is fed a share").under(kvpass.backend(**settings(name, options), inner="eager"))

    def run(picks: dict[int, list[int]]) -> tuple[torch.Tensor, list[list[int]], list[int]]:
        """Return the last logits, the positions in the first layer's first heads, and the original rows."""
        out = model(ids[:, :25].contiguous(), attention_mask=mask[:, :25].contiguous(),
                    position_ids=position[:, :25].contiguous(), use_cache=True)  # fmt: skip
        rows = [0, 1, 2]
        for t in range(25, 40):
            if t in picks:
                out.past_key_values.reorder_cache(torch.tensor(picks[t]))
                rows = [rows[pick] for pick in picks[t]]
            given = (x[rows, :][:, at].contiguous() for x, at in
                     ((ids, slice(t, t + 1)), (mask, slice(t + 1)), (position, slice(t, t + 1))))  # fmt: skip
            new, upto, here = given
            out = model(
                new, attention_mask=upto, position_ids=here, past_key_values=out.past_key_values, use_cache=True
            )
        positions = kvpass.inspect(out.past_key_values).layers[0].positions
        return out.logits[:, -1], positions[:, 0].tolist(), rows

    straight, held_straight, _ = run({})
    logits, positions, rows = run({27: [2, 0, 1], 28: [1, 1, 0], 30: [2, 0], 33: [1, 0, 0]})
    torch.testing.assert_close(logits, straight[rows], atol=1e-4, rtol=1e-4)
    assert [[x for x in each if x >= 0] for each in positions] == [
        [x for x in held_straight[row] if x >= 0] for row in rows
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o", "buzz", "d2o"])
def test_budgets_are_remembered_by_row_where_they_differ_alone(traced: Callable[..., Traced], policy: str) -> None:
    """Check which layouts store row budgets: those of padded batches, and all of d2o, whose layers differ."""
    model = traced("Llama", 2, "is fed two shares")
    for padding in ((6, 6), (6, 0)):
        run = teacher_forced(model, *prompt(2, 21, padding), [20, 1], policy=policy, budget=0.5, inner="eager")
        for cache in caches_in(run.cache):
            assert (ROW_BUDGET in cache.slots.state) == cache.layout.row_budgets
            assert cache.layout.row_budgets == (padding == (6, 0) or policy == "d2o")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "buzz", "cascade"])
def test_compiled(policy: str) -> None:
    """Compare two prompts under Inductor and eager; slots have dynamic sizes from the second prompt on."""
    runs: dict[str, list[Any]] = {}
    for inner in ("inductor", "eager"):
        model = Traced(build("Llama"))
        for tokens in (25, 39):
            ids, mask = prompt(3, tokens + sum(STEPS[1:]), PADDING)
            run = teacher_forced(model, ids, mask, [tokens, *STEPS[1:]], policy=policy, budget=0.5, inner=inner)
            runs.setdefault(inner, []).append((run, mask.bool()))
    for (compiled, real), (eager, _) in zip(*runs.values(), strict=True):
        for ours, theirs in zip(compiled.positions, eager.positions, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        torch.testing.assert_close(compiled.logits[real], eager.logits[real], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_share_for_an_aligner_is_no_larger_than_its_window() -> None:
    """Check an aligner's window with a long prompt; rows equal the same rows alone."""
    ids, mask = prompt(2, 90, (50, 0))
    chosen = settings("kv_align", {"recipe": "direct", "every": 1})
    window = chosen["aligner"].scope.window
    assert 20 < window < 45
    model = Traced(build("Llama"))
    run = teacher_forced(model, ids, mask, [88, 1, 1], **chosen, inner="eager")
    assert [len(row) for row in cached_positions(run, 0)[:1] + cached_positions(run, 1)[:1]] == [19, window]
    alone = teacher_forced(model, ids[1:], mask[1:], [88, 1, 1], **{**chosen, "budget": window}, inner="eager")
    torch.testing.assert_close(run.logits[1:], alone.logits, atol=1e-4, rtol=1e-4)


def test_budgets_by_row_give_the_same_sizes_as_numbers() -> None:
    numbers = [*range(12, 400), 4096, 100_003]
    by_row = torch.tensor(numbers).view(-1, 1, 1)
    for options in ({}, {"stride": 4, "sinks": 2}, {"old_stride": 2}, {"window": 3}, {"threshold": 5}):
        buzz = policies.resolve("buzz", options)
        sizes = torch.stack([torch.as_tensor(x).expand_as(by_row) for x in buzz.sizes(by_row)], -1)
        assert sizes[:, 0, 0].tolist() == [[*buzz.sizes(number)] for number in numbers]
    for options in ({}, {"cascades": 3}, {"gamma": 0.5}):
        cascade = policies.resolve("cascade", options)
        decays = torch.stack([torch.as_tensor(x).expand(by_row.shape) for x in cascade._decays(by_row)], -1)
        expected = torch.tensor([cascade._decays(number) for number in numbers])
        torch.testing.assert_close(decays[:, 0, 0], expected, atol=0, rtol=2e-7)
    for options in ({}, {"sinks": 1}, {"top": 2}):
        sage = policies.resolve("sage", options)
        split = torch.stack([torch.as_tensor(x).expand_as(by_row) for x in sage._split(by_row, 3)], -1)
        assert split[:, 0, 0].tolist() == [[*sage._split(number, 3)] for number in numbers]


def test_fitting_budgets_of_rows_are_those_of_numbers() -> None:
    aligned = policies.resolve("kv_align", {"aligner": random_aligner("direct")})
    others = [policies.resolve(name, {}) for name in policies.names() if name not in MODEL_SPECIFIC]
    for policy in (aligned, *others):
        rows = policy.fitting_budget(torch.tensor([[0], [13], [50]]))
        assert rows.flatten().tolist() == [policy.fitting_budget(budget) for budget in (0, 13, 50)]


def test_a_plan_by_rows_takes_each_row_from_the_plan_for_its_budget() -> None:
    plans = {6: Plan(7, 8, (5, 7), 9), 10: Plan(11, 12, (11, 10), 14)}
    assert by_rows(plans, [10, 6]) == Plan(11, 12, (11, 7), 14)
    assert by_rows({6: plans[6]}, [6, 6]) is plans[6]
