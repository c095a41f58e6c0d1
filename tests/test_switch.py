"""Test a trace shared by several backends: each runs as if compiled alone, within its guards."""

from __future__ import annotations

import torch

import kvpass
from tests.models import build, prompt, teacher_forced
from tests.switch import Switch
from tests.traces import Traced


def test_every_backend_runs_on_the_graphs_of_the_first() -> None:
    ids, mask = prompt(2, 18, (2, 0))
    shared, settings = Traced(build("Llama", layers=1)), dict(budget=8, inner="eager")
    policies = ("h2o", "window", "h2o")
    together = [teacher_forced(shared, ids, mask, [10, *[1] * 8], policy=name, **settings) for name in policies]
    assert shared.graphs == 2
    alone = teacher_forced(build("Llama", layers=1), ids, mask, [10, *[1] * 8], policy="window", **settings)
    torch.testing.assert_close(together[1].logits, alone.logits, rtol=0, atol=0)
    assert torch.equal(together[0].logits, together[2].logits)
    assert not torch.equal(together[0].logits, together[1].logits)


@torch.no_grad()
def test_a_trace_for_one_length_does_not_serve_a_compiler_for_all_lengths() -> None:
    """Check that a backend for dynamic lengths is refused, because its guards would be missing."""
    eager, compiling = kvpass.backend("window", budget=8, inner="eager"), kvpass.backend("window", budget=8)
    model, switch = build("Llama", layers=1), Switch().to(eager)
    model.compile(backend=switch)
    model(prompt(2, 9, ())[0], use_cache=True)
    assert switch.can_reuse_traces(compiling)
    model(prompt(2, 10, ())[0], use_cache=True)
    assert switch.graphs == 2
    assert switch.can_reuse_traces(eager)
    assert not switch.can_reuse_traces(compiling)
