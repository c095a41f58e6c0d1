"""Test cuts and copies of graphs: what is cut out computes what the whole graph computes, in any drawn program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kvpass.fx import alias, splicing, walk

INPUTS = 2
PURE = ("add", "sub", "mul", "neg")
VIEWS = ("t", "view")
WRITES = ("add_", "copy_", "setitem")


def programs(*names: str) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Return a strategy for programs: for each operation its name and the numbers of two earlier values."""
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12)


def built(program: Sequence[tuple[str, int, int]]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Return a graph of a program on two inputs, and the nodes of its values."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"input_{number}") for number in range(INPUTS)]
    for name, *numbers in program:
        one, other = (nodes[number % len(nodes)] for number in numbers)
        if name == "setitem":
            graph.call_function(operator.setitem, (one, 0, graph.call_method("sum", (other, 0))))
        elif name == "view":
            nodes.append(graph.call_method("view", (graph.call_method("contiguous", (one,)), -1, 2)))
        elif name in WRITES:  # torch refuses operands that share memory in part
            nodes.append(graph.call_method(name, (one, graph.call_method("clone", (other,)))))
        else:
            nodes.append(graph.call_method(name, (one,) if name in ("neg", "t") else (one, other)))
    graph.output(tuple(nodes))
    return fx.GraphModule({}, graph), nodes


def inputs(seed: int = 0) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 9, (2, 2), generator=drawn) for _ in range(INPUTS)]


class Following(fx.Interpreter):
    """Interprets a graph with other values for some nodes, and clones values of nodes when a node has run."""

    def __init__(self, gm: fx.GraphModule, wanted: Sequence[fx.Node], last: fx.Node, replaced: Any = None) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.wanted, self.last, self.replaced, self.values = wanted, last, replaced or {}, list[Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        computed = super().run_node(n)  # also of replaced nodes, since an input takes an argument
        self.env[n] = value = self.replaced.get(n, computed)
        if n is self.last:
            self.values = [self.env[node].clone() for node in self.wanted]
        return value


def values_at(gm: fx.GraphModule, wanted: Sequence[fx.Node], last: fx.Node, replaced: Any = None) -> list[Tensor]:
    """Return the values of nodes at the time when the node `last` has run."""
    following = Following(gm, wanted, last, replaced)
    following.run(*inputs())
    return following.values


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)


# -- extract -----------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(programs(*PURE, *VIEWS, *WRITES), st.lists(st.integers(0, 20), min_size=1, max_size=3), st.booleans())
@example([("t", 0, 0), ("setitem", 2, 1), ("neg", 0, 0)], [3], False)  # a write through a view
@example([("neg", 0, 0), ("add_", 2, 2)], [2], True)  # a write before the reader
def test_an_extracted_graph_returns_the_values_at_its_reader(
    program: list[tuple[str, int, int]], numbers: list[int], reads_at_end: bool
) -> None:
    """Check values with the writes up to the last of the results, or up to a reader at the end."""
    gm, nodes = built(program)
    wanted = [nodes[number % len(nodes)] for number in numbers]
    output = gm.graph.output_node()
    extracted = splicing.extract(gm, wanted, output if reads_at_end else None)
    assert [node.name for node in walk.placeholders(extracted.graph)] == [node.name for node in nodes[:INPUTS]]
    expected = values_at(gm, wanted, output.prev if reads_at_end else max(wanted))
    assert same(extracted(*inputs()), expected)


@given(programs(*PURE))
def test_an_extracted_graph_computes_nothing_else(program: list[tuple[str, int, int]]) -> None:
    gm, nodes = built(program)
    names = {node.name for node in splicing.extract(gm, [nodes[-1]]).graph.nodes}
    behind = walk.ancestors(nodes[-1]) | set(nodes[:INPUTS])
    assert names == {node.name for node in behind} | {"output"}
    empty = splicing.extract(gm, [])
    assert [node.op for node in empty.graph.nodes] == ["placeholder"] * INPUTS + ["output"]
    assert empty(*inputs()) == ()


# -- cut ---------------------------------------------------------------------------------------------------------------


def no_number(node: fx.Node) -> None:
    """Leave sizes in the subgraph."""


@settings(max_examples=20)
@given(
    programs(*PURE, *VIEWS),
    st.lists(st.integers(0, 20), min_size=1, max_size=2),
    st.lists(st.integers(0, 20), max_size=2),
)
def test_a_subgraph_computes_its_results_from_other_values(
    program: list[tuple[str, int, int]], numbers: list[int], cuts: list[int]
) -> None:
    gm, nodes = built(program)
    results = [nodes[number % len(nodes)] for number in numbers]
    replaced = list(dict.fromkeys(nodes[number % len(nodes)] for number in cuts))
    others = {node: torch.full((2, 2), 50 + number) for number, node in enumerate(replaced)}
    subgraph = splicing.cut(gm, results, replaced, no_number)
    bound = values_at(gm, subgraph.bound, gm.graph.output_node().prev)
    assert same(subgraph.run(*others.values(), *bound), values_at(gm, results, max(results), others))
    assert [node.name for node in walk.placeholders(subgraph.module.graph)] == [
        node.name for node in (*replaced, *subgraph.bound)
    ]
    dependent = alias.dependents(walk.ancestors(max(results)), replaced)
    assert dependent.isdisjoint(subgraph.bound)


@settings(max_examples=30)
@given(programs("add", "neg", "t", *WRITES), st.integers(0, 20), st.integers(0, 20))
@example([("neg", 0, 0), ("add_", 2, 1), ("add", 2, 2)], 1, 4)
def test_a_subgraph_writes_in_place_as_the_whole_graph_does(
    program: list[tuple[str, int, int]], cut: int, result_number: int
) -> None:
    """Check programs in which all writes that matter move together, as `rewrite.mask_subgraph` requires."""
    gm, nodes = built(program)
    replaced, result = nodes[cut % len(nodes)], nodes[result_number % len(nodes)]
    alias_sets = alias.AliasSets(gm.graph)
    behind = alias.ancestors_with_writes([result], [replaced], alias_sets=alias_sets)
    moved = alias.dependents(behind, [replaced], alias_sets)
    assume(alias.overwriting_node(moved, alias_sets) is None)
    assume(alias.overwriting_node(behind, alias_sets, result) is None)
    assume(not any(node.op == "placeholder" for node in moved - {replaced}))
    subgraph = splicing.cut(gm, [result], [replaced], no_number, unpack=True)
    other = torch.full((2, 2), 50)
    bound = values_at(gm, subgraph.bound, gm.graph.output_node().prev)
    assert torch.equal(
        subgraph.run(other.clone(), *bound), values_at(gm, [result], result, {replaced: other.clone()})[0]
    )


def sized(resolve: Callable[[fx.Node], Any]) -> splicing.Subgraph:
    """Cut out x.view(n), where the size n is of another input."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    size = graph.call_method("size", (y, 0))
    size.meta["example_value"] = 4
    result = graph.call_method("view", (x, size))
    graph.output((result,))
    return splicing.cut(fx.GraphModule({}, graph), [result], [x], resolve, unpack=True)


def test_sizes_become_numbers_or_inputs() -> None:
    x = torch.arange(4).view(2, 2)
    number = sized(lambda node: 4)
    assert number.bound == ()
    assert torch.equal(number.run(x), x.flatten())
    for bound in (sized(lambda node: node), sized(lambda node: None)):
        assert [node.name for node in bound.bound] == ["size"]
        assert torch.equal(bound.run(x, 4), x.flatten())


def keyed(function: Callable[..., Any], names: tuple[str, str] = ("x", "y")) -> tuple[Any, ...]:
    gm = fx.symbolic_trace(function)
    for node, name in zip(walk.placeholders(gm.graph), names, strict=False):
        node.name = name
    result = walk.operand_of(gm.graph.output_node())
    return splicing.cut(gm, [result], walk.placeholders(gm.graph), no_number).key


def test_keys_of_subgraphs_are_equal_if_they_compute_the_same() -> None:
    key = keyed(lambda x, y: (x + 1) * y)
    assert key == keyed(lambda a, b: (a + 1) * b, ("input", "other"))
    assert hash(key) == hash(keyed(lambda x, y: (x + 1) * y))
    for other in (
        lambda x, y: (x + 1.0) * y,
        lambda x, y: (x + True) * y,
        lambda x, y: (x - 1) * y,
        lambda x, y: y * (x + 1),
        lambda x, y: (y + 1) * x,
        lambda x, y: torch.mul(x + 1, y),
    ):
        assert keyed(other) != key


def test_an_error_of_a_subgraph_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    gm, nodes = built([("add", 0, 1)])
    subgraph = splicing.cut(gm, [nodes[2]], nodes[:2], no_number)
    with pytest.raises(RuntimeError, match="must match"):
        subgraph.run(torch.ones(2, 2), torch.ones(3, 3))
    assert capfd.readouterr() == ("", "")


# -- splice and emit ---------------------------------------------------------------------------------------------------


def test_a_traced_function_is_spliced_in() -> None:
    constant = torch.tensor([[5, 6], [7, 8]])
    gm, nodes = built([("neg", 0, 0), ("neg", 1, 1)])
    outputs: list[Any] = []
    for number, one in enumerate(nodes[2:]):
        module = torch.nn.Module()
        module.constant = constant * (number + 1)
        graph = fx.Graph()
        a, b = graph.placeholder("a"), graph.placeholder("b")
        summed = graph.call_function(torch.add, (a, graph.get_attr("constant")))
        graph.output((graph.call_function(torch.mul, (summed, b)), a))
        traced = fx.GraphModule({"constant": module.constant}, graph)
        before = gm.graph.output_node()
        outputs += splicing.splice(gm, traced, [one, nodes[1]], before, f"layer_{number}")
    assert outputs[1] is nodes[2]
    gm.graph.output_node().args = ((outputs[0], outputs[2]),)
    gm.graph.lint()
    gm.recompile()
    x, y = inputs()
    assert same(gm(x, y), [(constant - x) * y, (2 * constant - y) * y])


def test_a_function_that_returns_one_value_is_spliced_in() -> None:
    gm, nodes = built([("neg", 0, 0)])
    (output,) = splicing.splice(gm, fx.symbolic_trace(lambda x: x + 1), [nodes[2]], gm.graph.output_node(), "one")
    gm.graph.output_node().args = ((output,),)
    gm.recompile()
    assert torch.equal(gm(*inputs())[0], 1 - inputs()[0])


@pytest.mark.parametrize("target", ["transpose", torch.transpose])
def test_an_emitted_call_has_the_value_of_its_result(target: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode() as mode:
        x.meta["example_value"] = torch.empty(2, 3, dtype=torch.int32)
    node = splicing.emit(graph, target, x, 0, 1)
    value = walk.example_value(node)
    assert (value.shape, value.dtype, value.fake_mode) == ((3, 2), torch.int32, mode)


def test_an_emitted_call_stands_before_a_node_and_has_its_line() -> None:
    _, nodes = built([("neg", 0, 0), ("neg", 2, 2)])
    nodes[3].meta.update(stack_trace='  File "a.py", line 3, in f\n    -x\n', example_value=torch.zeros(5))
    nodes[1].meta["stack_trace"] = '  File "b.py", line 4, in g\n    y\n'
    for node in nodes[:3]:
        node.meta["example_value"] = torch.ones(2, 2)
    emitted = splicing.emit_before(nodes[3], torch.add, nodes[2], 1)
    assert emitted.next is nodes[3]
    assert walk.known_line(emitted) == "a.py:3: -x"
    assert torch.equal(walk.example_value(emitted), torch.full((2, 2), 2.0))
    assert walk.known_line(splicing.emit_before(nodes[3], torch.neg, emitted, like=nodes[1])) == "b.py:4: y"
    assert nodes[3].meta["example_value"].shape == (5,)


def test_nodes_are_put_first_in_an_order() -> None:
    gm, nodes = built([("neg", 0, 0)])
    splicing.put_first(gm.graph, [nodes[1], nodes[0]])
    assert [node.name for node in gm.graph.nodes][:2] == ["input_1", "input_0"]
    splicing.put_first(gm.graph, [])
    gm.graph.lint()


def test_a_graph_keeps_no_memory_of_its_example_inputs() -> None:
    gm, nodes = built([("neg", 0, 0)])
    nodes[0].meta["example_value"] = torch.ones(4, 3, dtype=torch.bfloat16).t()
    with FakeTensorMode():
        fake = nodes[1].meta["example_value"] = torch.ones(2)
    computed = nodes[2].meta["example_value"] = torch.ones(2)
    splicing.release_example_data(gm.graph)
    released = walk.example_value(nodes[0])
    assert released.is_meta
    assert (released.shape, released.stride(), released.dtype) == ((3, 4), (1, 3), torch.bfloat16)
    assert walk.example_value(nodes[1]) is fake
    assert walk.example_value(nodes[2]) is computed
