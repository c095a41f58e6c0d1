"""Test that nested regions of graphs are inlined."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.torch_private import regions


def body(*constants: Tensor) -> fx.GraphModule:
    """Return a body that adds constants to its input."""
    graph, root = fx.Graph(), torch.nn.Module()
    result = graph.placeholder("x")
    for number, constant in enumerate(constants):
        setattr(root, f"_tensor_constant{number}", constant)
        result = graph.call_function(operator.add, (result, graph.create_node("get_attr", f"_tensor_constant{number}")))
    graph.output((result,))
    return fx.GraphModule(root, graph)


def test_each_constant_of_each_body_keeps_its_value() -> None:
    graph, root = fx.Graph(), torch.nn.Module()
    root.one, root.two = body(torch.tensor(1.0), torch.tensor(20.0)), body(torch.tensor(300.0))
    x = graph.placeholder("x")
    for name in ("one", "two", "one"):
        call = graph.call_function(regions.CALL, (graph.create_node("get_attr", name), name, x))
        x = graph.call_function(operator.getitem, (call, 0))
    graph.output((x,))
    gm = regions.inline_regions(fx.GraphModule(root, graph))
    assert not [node for node in gm.graph.nodes if node.target is regions.CALL]
    assert gm(torch.tensor(0.5))[0] == 342.5
