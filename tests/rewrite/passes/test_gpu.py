"""Test the passes for GPUs on small graphs: which indices are copied, and which writes leave the graph."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass import policies
from kvpass.fx import walk
from kvpass.rewrite.passes.gpu import copy_write_indices, move_counters_to_caller
from kvpass.torch_private import fx_nodes

LAYERS = 2
NAMES = ("position", "free", "seen", "length")


def step_of(policies_of_layers: list[str], on_gpu: bool) -> Any:
    """Return the stub of a step that counts tokens and writes positions in each layer."""
    graph = fx.Graph()
    slots = [{name: graph.placeholder(f"slots_{layer}_{name}") for name in NAMES} for layer in range(LAYERS)]
    valid = graph.placeholder("valid")
    for own in slots:
        graph.call_function(torch.ops.aten.add_.Tensor, (own["length"], 1))
        seen = graph.call_function(torch.ops.aten.add.Tensor, (own["seen"], valid))
        graph.call_function(torch.ops.aten.copy_.default, (own["seen"], seen))
        graph.call_function(torch.ops.aten.copy_.default, (own["position"], own["length"]))
    graph.output(())
    made: dict[str, Any] = {}

    def compute(function: Any, nodes: list[fx.Node], before: str, name: str) -> str:
        made.update(function=function, nodes=nodes, before=before, name=name)
        return "the copies"

    return types.SimpleNamespace(
        decodes_on_gpu=on_gpu,
        layouts=[types.SimpleNamespace(policy=policies.resolve(each, {})) for each in policies_of_layers],
        sites=[types.SimpleNamespace(call=f"call {layer}") for layer in range(LAYERS)],
        slot=lambda layer, name: slots[layer][name],
        compute=compute,
        made=made,
        graph=graph,
        inputs=types.SimpleNamespace(valid=lambda layer: valid),
    )


@pytest.mark.parametrize("layers", [["d2o", "d2o"], ["full", "d2o"]])
def test_write_indices_of_all_layers_are_copied_before_the_first_write(layers: list[str]) -> None:
    step = step_of(layers, on_gpu=True)
    record = copy_write_indices(step)
    assert step.write_indices == "the copies"
    assert record.matched == ["slots_0_free", "slots_1_free"]
    assert step.made["before"] == "call 0"
    assert [node.name for node in step.made["nodes"]] == record.matched
    free = [torch.tensor([[3, 0]]), torch.tensor([[2, 5]])]
    copies: list[Tensor] = step.made["function"](*free)
    for copy, index in zip(copies, free, strict=True):
        assert torch.equal(copy, index)
        assert copy.data_ptr() != index.data_ptr()


@pytest.mark.parametrize(("layers", "on_gpu"), [(["h2o", "h2o"], True), (["d2o", "d2o"], False)])
def test_write_indices_are_not_copied_without_a_second_write(layers: list[str], on_gpu: bool) -> None:
    step = step_of(layers, on_gpu)
    record = copy_write_indices(step)
    assert step.write_indices == []
    assert step.made == {}
    assert record.left == {"free": "nothing merges on a GPU"}


def test_counters_are_written_by_the_caller_alone() -> None:
    step = step_of(["h2o", "h2o"], on_gpu=True)
    record = move_counters_to_caller(step)
    step.graph.lint()
    assert record.matched == [f"slots_{layer}_{name}" for layer in range(LAYERS) for name in ("seen", "length")]
    assert step.valid_node.name == "valid"
    written = [walk.operand_of(node).name for node in step.graph.nodes if fx_nodes.mutates(node)]
    assert written == ["slots_0_position", "slots_1_position"]


def test_counters_stay_in_the_graph_elsewhere() -> None:
    step = step_of(["h2o", "h2o"], on_gpu=False)
    before = str(step.graph)
    record = move_counters_to_caller(step)
    assert str(step.graph) == before
    assert step.valid_node is None
    assert list(record.left) == ["counters"]
