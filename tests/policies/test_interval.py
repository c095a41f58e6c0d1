"""Test `interval`: a row is compacted when it exceeds its budget, and then grows until it exceeds it again."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import kvpass
from kvpass.apps.evaluation.report import section
from kvpass.apps.evaluation.settings import Result
from kvpass.diagnostics.simulate import simulate
from kvpass.errors import BudgetError, PolicyError
from kvpass.policies import Policy, Tokens, resolve
from tests.calibrations import made_for_model
from tests.models import build, prompt, teacher_forced
from tests.strategies import BUDGETS_BY_HEAD, TABLE
from tests.test_invariants import settings
from tests.traces import Traced

PERIODIC = [row for row in TABLE if row.periodic and row.name not in BUDGETS_BY_HEAD]  # the model here has one head
SLACK = [3, 4, 5, 6, 7, 8, 9, 6, 7, 8, 9, 6, 7, 8, 9]
"""Tokens held after a prompt of 3 and each of 14 steps, with budget 9 and interval 4."""
periodic = pytest.mark.parametrize("row", PERIODIC, ids=lambda row: row.name)


def layer(tokens: int, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 1, tokens, 8, generator=drawn) for _ in range(3))
    return 2 * q, k, v


def calibrated(name: str) -> dict[str, Any]:
    """Return the options that a policy needs for such a layer."""
    return made_for_model(name, 1, 1, 1, 8)


@periodic
@pytest.mark.parametrize("compiled", [True, False])
def test_the_number_of_cached_tokens_step_by_step(row: Any, compiled: bool) -> None:
    options = {**row.fixed, **calibrated(row.name), "interval": 4}
    trace = simulate(row.name, *layer(17), prompt=3, budget=9, compiled=compiled, **options)
    assert (trace.positions >= 0).sum(-1)[:, 0, 0].tolist() == SLACK


@periodic
def test_a_prompt_is_compacted_at_its_end_if_it_does_not_fit(row: Any) -> None:
    options = {**row.fixed, **calibrated(row.name), "interval": 4}
    for length, held in ((9, 9), (10, 6), (25, 6)):
        trace = simulate(row.name, *layer(length), prompt=length, budget=9, compiled=True, **options)
        assert (trace.positions[0] >= 0).sum(-1).unique().tolist() == [held]


def test_between_compactions_nothing_goes() -> None:
    held = simulate("window", *layer(30), prompt=3, budget=9, interval=4, compiled=True).positions[:, 0, 0].tolist()
    for seen, positions in enumerate(held, start=3):
        last = SLACK[min(seen, 9) - 3] if seen < 10 else 6 + (seen - 10) % 4
        assert [p for p in positions if p >= 0] == [*range(seen - last, seen)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("full", "it evicts no token"),
        ("buzz", "it evicts in batches already"),
        ("cascade", "each new token pushes one token"),
        ("d2o", "each token is merged when"),
        ("sage", "it selects on its own schedule"),
    ],
)
def test_policies_with_a_schedule_of_their_own_say_so(name: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=f"interval=2: must be 1 for {name!r}: {reason}"):
        resolve(name, {"interval": 2})


@pytest.mark.parametrize("value", [0, -3, 1.5, None, True, "4"])
def test_intervals_that_are_no_number_of_tokens(value: object) -> None:
    with pytest.raises(PolicyError, match="interval"):
        resolve("h2o", {"interval": value})


@pytest.mark.parametrize("compiled", [True, False])
def test_an_interval_above_the_budget(compiled: bool) -> None:
    with pytest.raises(BudgetError, match=r"budget=9 .* at least 11 slots: 2 .* interval - 1 = 9; take more slots"):
        simulate("h2o", *layer(12), prompt=3, budget=9, interval=10, compiled=compiled)
    assert simulate("h2o", *layer(12), prompt=3, budget=11, interval=10, compiled=compiled).positions.shape[-1] == 11


@pytest.mark.parametrize("compiled", [True, False])
def test_a_prompt_that_stays_must_fit_what_a_compaction_leaves(compiled: bool) -> None:
    options: dict[str, Any] = dict(budget=9, interval=4, keep_prompt=True, compiled=compiled)
    with pytest.raises(BudgetError, match=r"6 tokens are to stay, which leaves 0 "):
        simulate("random", *layer(20), prompt=6, **options)
    held = simulate("random", *layer(20), prompt=5, **options).positions
    assert (held[..., :5] == torch.arange(5)).all()


@dataclasses.dataclass(frozen=True)
class Ticking(Policy):
    """A user's policy with its own counter."""

    name: ClassVar[str] = "ticking"

    def tick(self, clock: Any, budget: int) -> tuple[bool, Any]:
        return True, clock

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.position


def test_a_policy_of_ones_own_with_a_schedule_is_refused() -> None:
    assert Ticking().interval == 1
    with pytest.raises(PolicyError, match="must be 1 for 'ticking': it overwrites, merges, aligns or compacts"):
        Ticking(interval=2)


def test_rows_are_compacted_one_by_one(traced: Callable[..., Traced]) -> None:
    """Check rows of 12, 10 and 9 tokens, which exceed a budget of 14 in different steps."""
    padding = (0, 2, 3)
    ids, mask = prompt(3, 24, padding)
    run = teacher_forced(
        traced("Llama", 3, "is fed"), ids, mask, [12, *[1] * 12], policy="h2o", budget=14, interval=5, inner="eager"
    )
    for row, left in enumerate(padding):
        held, expected = 12 - left, []
        for _ in range(13):
            expected.append(held)
            held = held + 1 if held < 14 else 10
        assert [int((step[0][row, 0] >= 0).sum()) for step in run.positions] == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("positions", ["absolute", "cache"])
def test_two_graphs_of_steps_and_no_more(positions: str) -> None:
    """Count the graphs: one appends and one compacts, from one graph of Dynamo."""
    compiled: list[int] = []

    def inner(gm: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.append(len(gm.graph.nodes))
        return gm

    model, (ids, mask) = Traced(build("Llama", layers=1)), prompt(2, 60, (3, 0))
    given: dict[str, Any] = dict(policy="h2o", budget=14, interval=5, positions=positions, inner=inner)
    teacher_forced(model, ids, mask, [12, *[1] * 10], **given)
    before = len(compiled)
    assert model.graphs == 2
    teacher_forced(model, ids, mask, [12, *[1] * 48], **given)
    # The second conversation has its own backend, which compiles the same graphs again.
    assert len(compiled) == 2 * before
    assert model.graphs == 2


def test_reports_have_both_numbers() -> None:
    model, (ids, mask) = build("Llama", layers=1), prompt(1, 12, ())
    given: dict[str, Any] = dict(budget=9, interval=4)
    cache = teacher_forced(model, ids, mask, [12], policy="h2o", **given, inner="eager").cache
    report = kvpass.inspect(cache)
    assert (report.layers[0].budget, report.layers[0].compacted) == (9, 6)
    said = "interval=4: 6 to 9 tokens are cached between compactions"
    assert said in str(report)
    assert said in str(kvpass.explain(model, "h2o", **given)(ids))
    assert "interval" not in str(kvpass.explain(model, "h2o", budget=9)(ids))
    shared = kvpass.explain(model, "h2o", budget=0.75, interval=4)(ids)
    assert "interval=4: budget + 1 - 4 tokens are cached after a compaction" in str(shared)


def test_the_tables_of_eval_have_both_numbers() -> None:
    key = dict(measure="nothing", budget=9, chunk=1, prefill="token", settings={}, kv_dtype=None, model=None)
    key |= dict(dtype="float32", device="cpu")
    results = [Result({**key, "policy": name}, [], {"found": 1.0}) for name in ("h2o", "h2o:interval=4")]
    measure: Any = types.SimpleNamespace(name="nothing")
    assert "compacted to" in section(measure, results)
    assert "compacted to" not in section(measure, results[:1])


@periodic
def test_an_interval_of_one_is_the_policy_as_it_is(row: Any) -> None:
    budget = settings(row.name, "Llama", 9)["budget"]
    plain = {**row.fixed, **calibrated(row.name), "interval": 1}
    kept = [simulate(row.name, *layer(30), prompt=12, budget=budget, compiled=way, **plain) for way in (True, False)]
    assert torch.equal(kept[0].positions, kept[1].positions)
    assert (kept[0].positions >= 0).sum(-1).unique().tolist() == [budget]
