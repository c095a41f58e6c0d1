"""Hypothesis strategies for attention layers, and the table of policies for all generic tests."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvpass import policies
from kvpass.errors import BudgetError
from kvpass.policies import Policy
from tests.aligners import random_aligner
from tests.calibrations import CALIBRATED, random_calibration, random_gates

torch.set_num_threads(1)


@dataclasses.dataclass(frozen=True)
class Row:
    """One policy in the table, with its options, smallest budget and properties.

    Attributes:
        options: strategy for dictionaries of options.
        min_budget: smallest budget drawn.
        scored: whether the policy scores tokens, so that it must beat `random`.
        fixed: options for tests of whole models, chosen so that a small budget suffices.
        case: values that a case for this policy must have.
        lossless: further options that prevent eviction before the budget is full.
        periodic: whether the policy takes `interval`, and so can evict several tokens at once.
        rows: whether rows may have different budgets.
    """

    name: str
    options: st.SearchStrategy[dict[str, Any]] = dataclasses.field(default_factory=lambda: st.just({}))
    min_budget: int = 4
    scored: bool = False
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    case: dict[str, Any] = dataclasses.field(default_factory=dict)
    lossless: dict[str, Any] = dataclasses.field(default_factory=dict)
    periodic: bool = True
    rows: bool = True

    def draw_options(self, draw: st.DrawFn) -> dict[str, Any]:
        """Draw options; for a periodic policy, half of the draws include an interval."""
        intervals = draw(INTERVALS) if self.periodic else {}
        return {**intervals, **draw(self.options)}

    def lossless_at(self, budget: int, interval: int = 1) -> dict[str, Any]:
        """Return options that prevent eviction up to `budget` tokens; all heads then hold equally many."""
        if self.name == "duo_attention":
            return {"sinks": 0, "recent": budget + 1 - interval}
        return self.lossless


INTERVALS = st.sampled_from([{}, {}, {"interval": 2}, {"interval": 5}])
ALIGNERS = st.builds(
    lambda recipe, every: {"aligner": random_aligner(recipe, every=every), "every": every},
    st.sampled_from(["direct", "paper", "nothing"]),
    st.integers(1, 3),
)
CALIBRATIONS = st.builds(lambda seed: random_calibration(1, seed=seed), st.integers(0, 20))
CALIBRATED_CASE: dict[str, Any] = {"heads": 2, "groups": 2, "dim": 8, "positions": "absolute"}
BUDGETS_BY_HEAD = ("ada_kv", "critical_kv", "defensive_kv", "duo_attention")
"""Policies that divide a layer's budget among its heads."""
TWO_HEADS: dict[str, Any] = {"heads": 2, "positions": "absolute"}
"""Values that these policies require of a case."""
SHARED_BY_CLASSES = dict(
    min_budget=6, scored=True, fixed={"window": 3}, case=TWO_HEADS, lossless={"shares": (1.0,)}, rows=False
)
"""Fields shared by `ada_kv` and the policies that divide budgets in the same way."""
MODEL_SPECIFIC = ("kv_align", "duo_attention", *CALIBRATED)
"""Policies whose weights are made for one model."""

TABLE = [
    Row("window"),
    Row("full", periodic=False),
    Row("streaming", st.fixed_dictionaries({"sinks": st.integers(0, 3)})),
    Row(
        "random",
        st.fixed_dictionaries(
            {"seed": st.integers(0, 100), "redraw": st.booleans(), "recent": st.sampled_from([0, 0, 1, 3])}
        ),
    ),
    Row("h2o", st.fixed_dictionaries({"heavy": st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0])}), scored=True),
    Row(
        "buzz",
        st.fixed_dictionaries(
            {
                "stride": st.integers(3, 6),
                "sinks": st.integers(0, 3),
                "window": st.none() | st.integers(1, 3),
                "threshold": st.none() | st.integers(2, 6),
                "log_n": st.booleans(),
                "variant": st.sampled_from(["buzz", "fast", "nomax"]),
                "iterate_prompt": st.booleans(),
                "old_stride": st.none() | st.integers(2, 6),
            }
        ),
        scored=True,
        lossless={"window": None, "threshold": None},
        periodic=False,
    ),
    Row(
        "cascade",
        st.fixed_dictionaries(
            {
                "cascades": st.integers(1, 8),
                "sinks": st.integers(0, 3),
                "growth": st.sampled_from(["pow2", "pow3", "pow4", "linear"]),
                "reduce": st.sampled_from(["mean", "max", "median"]),
                "gamma": st.none() | st.sampled_from([0.0, 0.5, 0.95, 1.0]),
                "order": st.sampled_from(["write_first", "attend_first"]),
                "eager_fill": st.booleans(),
                "heads": st.sampled_from(["shared", "kv"]),
                "select": st.sampled_from([True, True, False]),
            }
        ),
        scored=True,
        lossless={"eager_fill": True},
        periodic=False,
    ),
    Row(
        "d2o",
        st.fixed_dictionaries(
            {
                "sinks": st.integers(0, 3),
                "heavy": st.sampled_from([0.0, 0.3, 0.75, 1.0]),
                "extra_sinks": st.booleans(),
                "layers": st.sampled_from(["softmax", "gate", "paper"]),
                "gate": st.sampled_from([0.0, 100.0]),
                "alpha": st.sampled_from([1.0, 3.0]),
                "beta": st.sampled_from([0.0, 0.3, 0.5, 1.0]),
                "merge": st.sampled_from(["paper", "average", "none", "official"]),
                "skip_layers": st.sampled_from([(), (), (0,), (-1, 3), (2,)]),
                "density": st.sampled_from(["kv", "query"]),
            }
        ),
        scored=True,
        periodic=False,
    ),
    Row("tova", scored=True),
    Row("knorm", scored=True),
    Row("roco", scored=True),
    Row(
        "sage",
        st.fixed_dictionaries(
            {
                "share": st.sampled_from(["union", "concat", "private"]),
                "refresh_interval": st.none() | st.integers(1, 6),
                "sinks": st.none() | st.integers(0, 1),
                "top": st.none() | st.just(1),
                "select_at": st.sampled_from(["prompt_end", "overflow"]),
            }
        ),
        min_budget=5,  # with three query heads for each KV head
        scored=True,
        periodic=False,
    ),
    Row(
        "snapkv",
        st.fixed_dictionaries({"window": st.integers(1, 4), "kernel": st.sampled_from([1, 3, 5])}),
        min_budget=5,
        scored=True,
        fixed={"window": 3},
    ),
    Row(
        "pyramid_kv",
        st.fixed_dictionaries(
            {"window": st.integers(1, 4), "kernel": st.sampled_from([1, 3]), "beta": st.sampled_from([1, 2, 20])}
        ),
        min_budget=6,
        scored=True,
        fixed={"window": 3},
    ),
    Row(
        "ada_kv",
        st.fixed_dictionaries(
            {
                "window": st.integers(1, 4),
                "kernel": st.sampled_from([1, 3, 5]),
                "safeguard": st.sampled_from([0.0, 0.2, 0.6, 1.0]),
                "shares": st.sampled_from([(), (3.0, 1.0), (1.0, 1.0)]),
            }
        ),
        **SHARED_BY_CLASSES,
    ),
    Row(
        "critical_kv",
        st.fixed_dictionaries(
            {
                "window": st.integers(1, 4),
                "kernel": st.sampled_from([1, 3]),
                "safeguard": st.sampled_from([0.0, 0.2]),
                "first": st.sampled_from([0.0, 0.5, 0.7, 1.0]),
                "epsilon": st.sampled_from([0.0, 1e-4]),
            }
        ),
        **SHARED_BY_CLASSES,
    ),
    Row(
        "defensive_kv",
        st.fixed_dictionaries(
            {
                "window": st.integers(1, 4),
                "kernel": st.sampled_from([1, 3, 5]),
                "safeguard": st.sampled_from([0.0, 0.2]),
                "mass": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
            }
        ),
        **SHARED_BY_CLASSES,
    ),
    Row(
        "duo_attention",
        st.fixed_dictionaries(
            {
                "gates": st.builds(lambda seed: random_gates(1, seed=seed), st.integers(0, 20)),
                "sinks": st.integers(0, 3),
                "recent": st.integers(1, 4),
            }
        ),
        case=TWO_HEADS,
        fixed={"sinks": 1, "recent": 3},
        rows=False,
    ),
    Row(
        "keydiff",
        st.fixed_dictionaries(
            {"sinks": st.integers(0, 2), "recent": st.integers(0, 2), "interval": st.sampled_from([1, 2, 5])}
        ),
        fixed={"sinks": 1, "interval": 2},
    ),
    Row(
        "r_kv",
        st.fixed_dictionaries(
            {
                "window": st.integers(1, 4),
                "kernel": st.sampled_from([1, 3, 7]),
                "weight": st.sampled_from([0.1, 0.5, 0.9]),
                "plain": st.booleans(),
                "official": st.booleans(),
                "interval": st.sampled_from([1, 2, 5]),
            }
        ),
        min_budget=5,
        scored=True,
        fixed={"window": 3, "interval": 2},
    ),
    Row(
        "vase",
        st.fixed_dictionaries(
            {
                "variant": st.sampled_from(["attn", "attn", "dkv"]),
                "sinks": st.integers(0, 2),
                "recent": st.integers(1, 4),
                "large": st.sampled_from([0.0, 0.25, 0.6]),
                "kernel": st.sampled_from([1, 3, 5]),
                "seed": st.integers(0, 100),
                "interval": st.integers(1, 6),
            }
        ),
        scored=True,
        fixed={"sinks": 1, "recent": 3, "interval": 2},
    ),
    Row(
        "tri_attention",
        st.fixed_dictionaries(
            {
                "calibration": CALIBRATIONS,
                "sinks": st.integers(0, 2),
                "recent": st.integers(0, 2),
                "interval": st.sampled_from([1, 2, 5]),
            }
        ),
        case=CALIBRATED_CASE,
        fixed={"sinks": 1, "interval": 2},
    ),
    Row(
        "expected_attention",
        st.fixed_dictionaries(
            {
                "calibration": CALIBRATIONS,
                "sinks": st.integers(0, 2),
                "horizon": st.sampled_from([1, 7, 512]),
                "epsilon": st.sampled_from([0.0, 0.02]),
                "interval": st.sampled_from([1, 2, 5]),
            }
        ),
        case=CALIBRATED_CASE,
        fixed={"sinks": 1, "interval": 2},
    ),
    Row("kv_align", ALIGNERS, min_budget=7, case={"heads": 2, "dim": 8, "positions": "absolute"}, periodic=False),
]
ROWS = {row.name: row for row in TABLE}


@dataclasses.dataclass(frozen=True)
class Case:
    """SizeResolver, options and seed of one layer: the arguments of `kvpass.simulate`."""

    name: str
    options: dict[str, Any]
    seed: int
    rows: int
    heads: int
    groups: int
    dim: int
    budget: int | None
    prompt: int
    steps: int
    positions: str
    theta: float | None

    def layer(self, sharpness: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of normal numbers; arbitrary floats would produce ties by accident."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = self.prompt + self.steps
        q = torch.randn(self.rows, self.heads * self.groups, tokens, self.dim, generator=generator) * sharpness
        k = torch.randn(self.rows, self.heads, tokens, self.dim, generator=generator)
        return q, k, torch.randn(self.rows, self.heads, tokens, self.dim, generator=generator)

    @property
    def policy(self) -> Policy:
        return policies.resolve(self.name, self.options)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "budget": self.budget,
            "positions": self.positions,
            "rope_theta": self.theta,
            **self.options,
        }


@st.composite
def cases(draw: st.DrawFn, row: Row, **fixed: Any) -> Case:
    """Draw a layer for a row of the table; many prompts are about as long as the budget."""
    fixed = row.case | fixed
    options = fixed.pop("options", None)
    options = row.draw_options(draw) if options is None else options
    policy = policies.resolve(row.name, options)
    budget = fixed.pop("budget", None) or fitting_budget(policy, draw(st.integers(row.min_budget, row.min_budget + 12)))
    near = st.sampled_from([max(1, budget - 1), budget, budget + 1])
    values = {
        "seed": draw(st.integers(0, 2**20)),
        "rows": draw(st.integers(1, 2)),
        "heads": draw(st.integers(1, 2)),
        "groups": draw(st.integers(1, 3)),
        "dim": draw(st.sampled_from([2, 8])),
        "prompt": draw(near | st.integers(1, 30)),
        "steps": draw(st.integers(0, 16)),
        "positions": draw(st.sampled_from(["absolute", "cache"])),
        "theta": draw(st.sampled_from([1e4, None])),
    }
    return Case(row.name, options, budget=budget if policy.evicts else None, **{**values, **fixed})


def fitting_budget(policy: Policy, budget: int) -> int:
    """Return the smallest budget of at least `budget` that the policy accepts."""
    for larger in range(1000):  # a policy may also have a largest budget
        with contextlib.suppress(BudgetError):
            policy.check_budget(budget + larger)
            return budget + larger
    raise ValueError(f"{policy} accepts no budget from {budget} on")
