"""Test which outputs and inputs of a step graph go, stay, or are left to the host, on small traced functions."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpass.errors import UnsupportedGraph
from kvpass.fx import shapes, walk
from kvpass.fx.shapes import SizeResolver
from kvpass.fx.walk import example_value, is_size, is_tensor, placeholders
from kvpass.rewrite.passes.interface import drop_growing_outputs, order_inputs, precompute_on_host, resolve_sizes
from kvpass.torch_private import symbolic_shapes

LENGTH = 5
Function = Callable[..., Any]


def refuse_growth(node: fx.Node) -> None:
    walk.refuse(node, "it still grows")


def step_of(function: Function, *others: Tensor) -> Any:
    """Return the stub of a step that decodes one token: its cache [1, 5, 2] is the first input."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, arguments: Any) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    past = torch.zeros(1, LENGTH, 2)
    torch._dynamo.reset()
    for each in (past, *others):
        for dim, size in enumerate(each.shape):
            if size in (LENGTH, LENGTH + 1):
                torch._dynamo.mark_dynamic(each, dim)
    torch.compile(function, backend=backend, fullgraph=True)(past, *others)
    (gm,) = found
    nodes = placeholders(gm.graph)
    size = next(example_value(n) for n in nodes if is_size(n) and symbolic_shapes.size_hint(example_value(n)) == LENGTH)
    sizes = SizeResolver((shapes.expr(size),), {}, 1, 2, (size + 1,))
    names = [f"l_{name}_" for name in inspect.signature(function).parameters]
    given: dict[fx.Node, Any] = {node: (past, *others)[names.index(node.name)] for node in nodes if is_tensor(node)}
    given |= {node: symbolic_shapes.size_hint(example_value(node)) for node in nodes if is_size(node)}
    numbers = types.SimpleNamespace(number_or_node=lambda number: number, has=lambda node: False)
    host: list[fx.Node] = []

    def host_input(node: fx.Node) -> fx.Node:
        with gm.graph.inserting_before(node):
            host.append(gm.graph.placeholder(f"{node.name}_on_host"))
        return host[-1]

    return types.SimpleNamespace(
        graph=gm.graph, gm=gm, sizes=sizes, placeholders=nodes, size_nodes=numbers, device=torch.device("cpu"),
        sites=[], attention=types.SimpleNamespace(dropped_outputs={}, admitted_nodes=[]), valid_node=None,
        argument_of=given, inputs=types.SimpleNamespace(host_input=host_input, nodes=host), host=host,
        refuse_growth=refuse_growth,
    )  # fmt: skip


def decode(past: Tensor, x: Tensor) -> Any:
    """Return outputs of each kind: a tensor, keys, values, a length, and a mask that grows."""
    keys, values = torch.cat([past, x], 1), torch.cat([past, x + 1], 1)
    grown = torch.arange(past.shape[1] + 1) > 2
    return x * 2, keys, values, past.shape[1] + 1, grown, x.sum()


def test_outputs_that_grow_are_removed_and_said_how_to_make_them() -> None:
    step = step_of(decode, torch.ones(1, 1, 2))
    names = [node.name for node in walk.results(step.graph) if is_tensor(node)]
    step.sites = [types.SimpleNamespace(keys_out=1, values_out=2)]
    record = drop_growing_outputs(step)
    outputs = step.outputs.dynamo_outputs
    assert outputs.indices == [0, None, None, None, None, 1]
    assert outputs.lengths == {3: 1}
    assert outputs.grown == [4]
    assert outputs.dropped == {}
    assert record.matched == ["output 1", "output 2", "output 3", "output 4"]
    assert [node.name for node in walk.results(step.graph)] == [names[0], names[-1]]
    assert not [node for node in step.graph.nodes if node.target in (torch.cat, torch.arange)]


def test_outputs_of_a_chunk_come_behind() -> None:
    step = step_of(decode, torch.ones(1, 1, 2))
    step.sites = [types.SimpleNamespace(keys_out=1, values_out=2)]
    own = walk.results(step.graph)[0]
    step.attention = types.SimpleNamespace(dropped_outputs={4: (1, 0)}, admitted_nodes=[[own, own], [own]])
    step.valid_node = own
    drop_growing_outputs(step)
    assert step.outputs.admitted_outputs == [[2, 3], [4]]
    assert step.outputs.valid_output == 5
    assert step.outputs.dynamo_outputs.dropped == {4: (1, 0)}
    assert step.outputs.dynamo_outputs.grown == []
    assert len(walk.results(step.graph)) == 6


def test_checks_of_what_grows_are_left_to_the_host() -> None:
    def checked(past: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        torch._assert_async(mask.sum() > 0, "the mask hides all")
        torch._assert_async(x.sum() > 0, "the tokens are none")
        return x * 2 + past.shape[1]

    step = step_of(checked, torch.ones(1, 1, 2), torch.ones(1, LENGTH + 1))
    drop_growing_outputs(step)
    assert [node.args[1] for node in step.host_checks] == ["the mask hides all"]
    left = [node for node in step.graph.nodes if node.target is torch._assert_async]
    assert [node.args[1] for node in left] == ["the tokens are none"]


# -- values that the host computes -------------------------------------------------------------------------------------


def counted(past: Tensor, mask: Tensor) -> Tensor:
    return mask.cumsum(-1)[:, -1:] + past.shape[1]


def written(past: Tensor, mask: Tensor) -> Tensor:
    return mask.sum(-1).add_(past.shape[1])


@pytest.mark.parametrize(
    ("function", "mask", "on_host"),
    [
        (counted, torch.ones(1, LENGTH + 1, dtype=torch.int64), 1),
        (counted, torch.ones(1, LENGTH + 1, dtype=torch.bool), 1),
        (counted, torch.ones(1, LENGTH + 1), 0),
        (written, torch.ones(1, LENGTH + 1, dtype=torch.int64), 0),
        (lambda past, mask: past.sum(1) + mask.shape[1], torch.ones(1, LENGTH + 1, dtype=torch.int64), 0),
        (lambda past, mask: mask * past.shape[1], torch.ones(1, LENGTH + 1, dtype=torch.int64), 0),
        (lambda past, mask: mask[:, :1] + torch.ones(past.shape[1]).sum(), torch.ones(1, 1, dtype=torch.int64), 1),
    ],
    ids=["integers", "booleans", "floats", "written in place", "a cache", "what grows", "a length"],
)
def test_the_host_computes_what_reads_all_tokens_and_no_state(function: Function, mask: Tensor, on_host: int) -> None:
    step = step_of(function, mask)
    record = precompute_on_host(step)
    step.graph.lint()
    assert len(record.matched) == len(step.host) == on_host
    for node in step.host:
        assert node.users


# -- sizes and inputs --------------------------------------------------------------------------------------------------


def appended(past: Tensor, x: Tensor) -> Tensor:
    return x.view(1, torch.cat([past, x], 1).shape[1] - past.shape[1], 2) + 1


@pytest.mark.parametrize(
    ("function", "shape"),
    [(appended, (1, 1, 2)), (lambda past, x: x.expand(past.shape[1] - past.shape[1] + 3, 2) + x.shape[0], (1, 2))],
    ids=["new tokens", "nothing"],
)
def test_lengths_that_cancel_out_become_numbers(function: Function, shape: tuple[int, ...]) -> None:
    step = step_of(function, torch.ones(shape))
    resolve_sizes(step)
    assert [node.name for node in step.graph.nodes if node.op == "placeholder" or is_size(node)] == ["l_x_"]
    (result,) = fx.Interpreter(step.gm).run(torch.ones(shape))
    assert torch.equal(result, function(torch.zeros(1, 9, 2), torch.ones(shape)))


def test_a_size_that_grows_is_refused_by_the_line_that_reads_it() -> None:
    step = step_of(lambda past, x: x + torch.ones(past.shape[1]).prod(), torch.ones(1, 2))
    with pytest.raises(UnsupportedGraph, match=r"test_interface\.py.*torch\.ones.*it still grows"):
        resolve_sizes(step)


def test_an_input_that_grows_is_refused_if_it_is_read() -> None:
    step = step_of(lambda past, mask: mask[:, :1] * 2 + past.shape[1] * 0, torch.ones(1, LENGTH + 1))
    with pytest.raises(UnsupportedGraph, match="it still grows"):
        resolve_sizes(step)


def test_inputs_that_nothing_reads_are_removed() -> None:
    step = step_of(decode, torch.ones(1, 1, 2))
    step.sites = [types.SimpleNamespace(keys_out=1, values_out=2)]
    drop_growing_outputs(step)
    resolve_sizes(step)
    assert [node.name for node in placeholders(step.graph)] == ["l_x_"]


@given(order=st.permutations(range(9)), data=st.data())
def test_inputs_are_ordered_as_their_values_are_passed(order: list[int], data: st.DataObject) -> None:
    """Order slots, weights, of which layers share one, other new inputs, and Dynamo's own."""
    graph = fx.Graph()
    named = {number: graph.placeholder(f"input_{number}") for number in order}
    slots, weights, new, own = [named[0], named[1]], [named[2], named[3]], [named[4]], [named[n] for n in range(5, 9)]
    own = data.draw(st.permutations(own))
    removed = own.pop()
    graph.erase_node(removed)
    graph.output(())
    step: Any = types.SimpleNamespace(
        graph=graph, placeholders=[*own, removed], slot_inputs=[slots[:1], slots[1:]],
        policy_weights=types.SimpleNamespace(of_layers=[weights, [weights[1]]]),
        inputs=types.SimpleNamespace(nodes=new),
    )  # fmt: skip
    expected = [node.name for node in (*slots, *weights, *new, *own)]
    assert order_inputs(step).matched == expected
    assert [node.name for node in placeholders(graph)] == expected
