"""Test that analyses of a graph run once for the graph, not once for each layer."""

from __future__ import annotations

import pytest
import torch

import kvpass
from kvpass.fx import alias
from tests.models import build


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["streaming", "h2o", "cascade"])
def test_memory_is_analysed_as_often_for_many_layers(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count analyses: one for each layer would take time quadratic in the number of layers."""
    analysed = []

    class Counted(alias.AliasSets):
        def __init__(self, graph: torch.fx.Graph, *given: object) -> None:
            analysed.append(graph)
            super().__init__(graph, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(alias, "AliasSets", Counted)

    def count(layers: int) -> int:
        torch._dynamo.reset()
        analysed.clear()
        loop = kvpass.DecodeLoop(build("Llama", layers=layers), policy, budget=16, inner="eager")
        loop.prompt(torch.arange(2, 30)[None])
        loop.generate(3)
        return len(analysed)

    assert 5 < count(1) == count(3)
