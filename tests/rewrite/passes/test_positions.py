"""Test that arithmetic on the cache's length reads the counter on the device, for every length after one trace."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.errors import UnsupportedGraph
from kvpass.fx import shapes
from kvpass.fx.shapes import SizeResolver
from kvpass.fx.walk import example_value, is_size, is_tensor, placeholders
from kvpass.rewrite.context import PassRecord
from kvpass.rewrite.passes.positions import put_length_on_device

TRACED, NEW = 5, 2  # the cache's length in the trace, and the number of new tokens
Function = Callable[[Tensor, Tensor, Tensor], Tensor]

ARITHMETIC: dict[str, Function] = {
    "positions": lambda past, table, x: torch.arange(past.shape[1], past.shape[1] + 2),
    "positions from the end": lambda past, table, x: torch.arange(past.shape[1] - 3, past.shape[1] - 1),
    "int32": lambda past, table, x: torch.arange(past.shape[1], past.shape[1] + 2, dtype=torch.int32),
    "one in half precision": lambda past, table, x: torch.arange(
        past.shape[1] + 1, past.shape[1] + 2, dtype=torch.bfloat16
    ),
    "a sum": lambda past, table, x: x + past.shape[1] + 3,
    "a difference": lambda past, table, x: x - past.shape[1],
    "a product": lambda past, table, x: x * (2 * past.shape[1] - 1),
    "a comparison": lambda past, table, x: x < past.shape[1],
    "a limit": lambda past, table, x: x.clamp(0, past.shape[1]),
    "a maximum": lambda past, table, x: x + torch.sym_max(past.shape[1], 7),
    "a minimum": lambda past, table, x: x + torch.sym_min(past.shape[1], 7),
    "in place": lambda past, table, x: x.clone().add_(past.shape[1]),
    "rows of a table": lambda past, table, x: table[past.shape[1] : past.shape[1] + 2],
    "rows and columns of a table": lambda past, table, x: table[past.shape[1] + 1 : past.shape[1] + 3, 1:3],
    "columns of a table": lambda past, table, x: table.T[:2, past.shape[1] - 2 : past.shape[1]],
}


def traced(function: Function, length: int = TRACED) -> tuple[fx.GraphModule, list[Any], Any]:
    """Return the graph of a function on a cache that grows, the arguments of the call, and its stub of a step."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, arguments: list[Any]) -> Callable[..., Any]:
        found.append((gm, arguments))
        return gm.forward

    given = inputs(length)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(given[0], 1)
    torch.compile(function, backend=backend, fullgraph=True)(*given)
    ((gm, _),) = found
    nodes = placeholders(gm.graph)
    arguments = [length if not is_tensor(node) else given[number_of(node)] for node in nodes]
    size = next(example_value(node) for node in nodes if is_size(node))
    with gm.graph.inserting_before(nodes[0]):
        counter = gm.graph.placeholder("length")
    counter.meta["example_value"] = torch.empty((), dtype=torch.int64, device="meta")
    sizes = SizeResolver((shapes.expr(size),), {}, NEW, 2, (size + NEW,))
    numbers = types.SimpleNamespace(number_or_node=lambda number: number)
    step = types.SimpleNamespace(graph=gm.graph, sizes=sizes, length=counter, size_nodes=numbers, windows=[None])
    return gm, arguments, step


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, length, 4), torch.arange(120.0).view(30, 4), torch.arange(0, 12, 3)


def number_of(node: fx.Node) -> int:
    """Return which of the inputs a placeholder is."""
    return ["l_past_", "l_table_", "l_x_"].index(node.name.lower())


class Recording(fx.Interpreter):
    """Interprets a graph and keeps the value of each node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_the_length_reads_the_counter(name: str) -> None:
    """Run the graph with another count and the sizes of the trace."""
    gm, arguments, step = traced(ARITHMETIC[name])
    record = put_length_on_device(step)
    gm.graph.lint()
    assert record.matched
    for length in (TRACED, 6, 9, 20):
        (result,) = fx.Interpreter(gm).run(torch.tensor(length), *arguments)
        expected = ARITHMETIC[name](*inputs(length))
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["positions", "a product", "a maximum", "rows and columns of a table"])
def test_the_nodes_that_read_the_length_are_recorded_with_their_expressions(name: str) -> None:
    gm, arguments, step = traced(ARITHMETIC[name])
    put_length_on_device(step)
    for length in (TRACED, 9):
        recording = Recording(gm)
        recording.run(torch.tensor(length), *arguments)
        for node, expression in step.lengths.nodes.items():
            assert int(recording.values[node]) == int(expression.subs(shapes.LENGTH, length))


def left(function: Function) -> tuple[PassRecord, Any]:
    _, _, step = traced(function)
    return put_length_on_device(step), step


def test_key_indices_are_left_to_the_masks() -> None:
    record, step = left(lambda past, table, x: torch.arange(past.shape[1] + 2) + 1)
    (index,) = step.lengths.key_indices[None]
    assert record.left == {index.name: "it counts the keys"}
    assert record.matched == []


def test_a_slice_that_grows_from_the_begin_indexes_keys() -> None:
    record, step = left(lambda past, table, x: table[: past.shape[1] + 2])
    (index,) = step.lengths.key_indices[None]
    assert index.target is torch.arange
    assert len(record.matched) == 1


def test_code_without_the_length_is_left() -> None:
    record, step = left(lambda past, table, x: x + table.shape[0] + past.sum())
    assert record.matched == []
    assert record.left == {}
    assert step.lengths.nodes == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_positions_that_a_dtype_rounds_are_refused_by_their_line(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedGraph, match=rf"test_positions\.py.*positions are counted in {dtype}, which rounds"):
        left(lambda past, table, x: torch.arange(past.shape[1], past.shape[1] + 2, dtype=dtype))


def test_other_functions_of_the_length_are_refused() -> None:
    with pytest.raises(UnsupportedGraph, match="is not a sum, product, maximum or minimum"):
        left(lambda past, table, x: x + past.shape[1] // 2)
