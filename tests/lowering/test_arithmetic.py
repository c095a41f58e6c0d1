"""Check that generated code computes each value about once: repeated work gives right results slowly."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass.lowering import row_products
from kvpass.lowering.row_products import Processor, RowLimits
from kvpass.torch_private import inductor
from tests.aligners import random_aligner
from tests.calibrations import made_for_model
from tests.lowering.arithmetic import Arithmetic, StepGraphs, count, keeping, step_graphs
from tests.strategies import ROWS

MOST = 1.6
"""Largest ratio of operations in loops to operations in the graph.

Ratios are 0.5 to 1.1, and 1.3 to 1.5 where `keydiff` compacts, because it takes the root of a key's norm for every
number of the key.
"""

LOOPS = {"none": (0, 0), "values": (0, 16), "both": (16, 16)}
"""Numbers of rows up to which attention's two products are loops, for `LIMITS` of a processor."""

HEADS, DIM, BUDGET = 2, 64, 256
PIECES = [BUDGET + 20, *[1] * 3, 4]  # a prompt, steps until one evicts several tokens, and a chunk


@functools.lru_cache(maxsize=2)
def graphs(policy: str, dtype: torch.dtype, group: int, kv_dtype: str | None) -> StepGraphs:
    """Return the step graphs of a layer with heads as in SmolLM2, but few weights, so that attention dominates."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=1)
    heads = dict(num_attention_heads=group * HEADS, num_key_value_heads=HEADS, head_dim=DIM)
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=1024, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    options: dict[str, Any] = dict(ROWS[policy].fixed)
    options |= made_for_model(policy, 1, group * HEADS, HEADS, DIM)
    if policy == "kv_align":
        options |= {"aligner": random_aligner("direct", heads=HEADS, dim=DIM, window=BUDGET), "every": 1}
    budget = 2 * BUDGET if policy == "full" else BUDGET
    return step_graphs(model, policy, PIECES, budget=budget, kv_dtype=kv_dtype, **options)


def counts(made: StepGraphs, loops: str, monkeypatch: pytest.MonkeyPatch, most: int | None = None) -> list[Arithmetic]:
    """Count the arithmetic of the first `most` step graphs, on a simulated processor."""
    scores, values = LOOPS[loops]
    for dtype in row_products.DTYPES:
        limits = RowLimits(quartered=2, paired=4, cached=16, uncached=8, scores=scores, values=values)
        monkeypatch.setitem(row_products.LIMITS, ("made up", dtype, False), limits)
    processor = Processor(32 << 10, frozenset(), "made up")
    return [count(made, index, processor) for index in range(len(made.steps))[:most]]


def assert_nothing_is_computed_anew(found: list[Arithmetic]) -> None:
    assert found
    for each in found:
        assert 0.3 < each.ratio < MOST, f"{each.loops} operations for {each.graph} of the graph, most in {each.largest}"


@pytest.mark.parametrize(("policy", "loops", "most"), [("window", "both", None), ("streaming", "values", 1)])
def test_the_smallest_cases_by_default(policy: str, loops: str, most: int | None, monkeypatch) -> None:
    made = graphs(policy, torch.bfloat16, 3, None)
    assert_nothing_is_computed_anew(counts(made, loops, monkeypatch, most))


VARIANTS: list[tuple[torch.dtype, int, str | None, str]] = [
    (torch.bfloat16, 3, None, "both"),
    (torch.bfloat16, 3, "int8", "values"),
    (torch.float32, 1, None, "both"),
    (torch.float32, 3, None, "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "group", "kv_dtype", "loops"), VARIANTS)
@pytest.mark.parametrize("policy", ROWS)
def test_nothing_is_computed_anew(policy: str, dtype: torch.dtype, group: int, kv_dtype: Any, loops: str, monkeypatch):
    assert_nothing_is_computed_anew(counts(graphs(policy, dtype, group, kv_dtype), loops, monkeypatch))


def test_operands_that_are_computed_anew_for_every_result_are_seen(monkeypatch) -> None:
    """Remove buffers: queries are rotated for every key, and rows normalised for every column of weights."""
    monkeypatch.setattr(inductor, "to_buffer", lambda x: x)
    (step,) = counts(graphs("window", torch.bfloat16, 3, None), "both", monkeypatch, 1)
    assert step.ratio > MOST


@pytest.mark.parametrize("stored", [True, False])
def test_scores_that_are_computed_anew_for_every_value_are_seen(stored: bool, monkeypatch) -> None:
    def weighted(scores: Tensor, values: Tensor) -> tuple[Tensor]:
        weights = (scores * 2 - 3) * scores + 1  # for `exp`, Inductor would make a buffer itself
        weights = inductor.to_buffer(weights) if stored else weights
        return ((weights.unsqueeze(2) * values).sum(1),)

    given = torch.randn(3, 50), torch.randn(3, 50, 64)
    made = keeping("window", budget=8)
    made.steps.append((make_fx(weighted)(*given), given, [], False, None))
    (found,) = counts(made, "none", monkeypatch)
    assert found.graph == 3 * 50 * (4 + 2 * 64)
    assert found.loops == (found.graph if stored else 3 * 50 * (4 + 2) * 64)
