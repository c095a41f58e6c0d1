"""Test walks along the operands and users of nodes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.errors import OUT_OF_MEMORY, UnreadableGraph
from kvpass.fx import walk

OPERANDS = st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=12)
"""Numbers of earlier nodes, for each node."""


def graph_of(operands: list[list[int]]) -> list[fx.Node]:
    """Return the nodes of a graph: one input, and calls with the drawn operands."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for numbers in operands:
        nodes.append(graph.call_function(torch.add, tuple(nodes[number % len(nodes)] for number in numbers)))
    for node in nodes:
        node.meta["example_value"] = torch.ones(2)
    return nodes


def computed_from(node: fx.Node, stop: set[fx.Node], ends: set[fx.Node]) -> set[fx.Node]:
    """Compute `ancestors` by its definition."""
    if node in stop:
        return set()
    parents = () if node in ends else node.all_input_nodes
    return {node}.union(*(computed_from(parent, stop, ends) for parent in parents))


@settings(max_examples=60, deadline=None)
@given(OPERANDS, st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)))
def test_ancestors(operands: list[list[int]], stop: set[int], ends: set[int]) -> None:
    nodes = graph_of(operands)
    stopped, last = ({nodes[number] for number in numbers if number < len(nodes)} for numbers in (stop, ends))
    found = walk.ancestors(nodes[-1], stopped, until=last.__contains__)
    assert found == computed_from(nodes[-1], stopped, last)


@settings(max_examples=60, deadline=None)
@given(OPERANDS)
def test_reach_through_users_is_the_inverse_of_ancestors(operands: list[list[int]]) -> None:
    nodes = graph_of(operands)
    reached = list(walk.reach(nodes[:1], lambda node: node.users))
    assert len(reached) == len(set(reached))
    assert set(reached) == {node for node in nodes if nodes[0] in walk.ancestors(node)}


@settings(max_examples=60, deadline=None)
@given(OPERANDS, st.sets(st.integers(0, 12)))
def test_a_chain_goes_on_while_its_nodes_are_let_through(operands: list[list[int]], through: set[int]) -> None:
    nodes = graph_of(operands)
    found = walk.chain(nodes[-1], lambda node: nodes.index(node) in through)
    assert all(one.args[0] is other for one, other in itertools.pairwise(found))
    assert all(nodes.index(node) in through for node in found[:-1])
    assert not found[-1].args or nodes.index(found[-1]) not in through


def test_a_chain_ends_at_what_is_no_tensor() -> None:
    graph = fx.Graph()
    size = graph.placeholder("size")
    size.meta["example_value"] = 3
    made = graph.call_function(torch.arange, (size,))
    assert walk.chain(made, lambda node: True) == [made]


def test_the_line_of_a_node_is_found_whatever_its_path_says() -> None:
    (node,) = graph_of([])
    node.meta["stack_trace"] = '  File "/home/me/pipeline code/line 2.py", line 17, in forward\n    return x + 1\n'
    assert walk.source_line(node) == "/home/me/pipeline code/line 2.py:17: return x + 1"


def test_an_unexpected_error_becomes_a_refusal_of_the_first_line() -> None:
    first, second = graph_of([[0]])
    first.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    return x + 1\n'
    with (
        pytest.raises(UnreadableGraph, match=r"KeyError: 'x'.*run it uncompiled") as known,
        walk.converting_errors([first]),
    ):
        raise KeyError("x")
    assert known.value.line == "model.py:7: return x + 1"
    assert str(known.value) == f"{known.value.line}: {known.value.reason}"
    for calls in ([], [second]):
        with pytest.raises(UnreadableGraph, match="reading the graph failed") as unknown, walk.converting_errors(calls):
            raise KeyError("x")
        assert unknown.value.line is None


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_a_lack_of_memory_is_no_refusal(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="no memory left"), walk.converting_errors(graph_of([])):
        raise kind("no memory left")
