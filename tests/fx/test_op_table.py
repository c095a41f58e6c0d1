"""Test the table of operators: along a named axis they really work slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.fx import op_table, propagation, walk
from tests.capture.traced import query_graph, result

SHAPE = (2, 3, 5, 4)

CARRIED: dict[str, tuple[Callable[[Tensor], Any], dict[int, int | None]]] = {
    "pointwise": (lambda x: x * 2 + x.sigmoid(), {0: 0, 1: 1, 2: 2, 3: 3}),
    "transposed": (lambda x: x.transpose(1, 2), {0: 0, 1: 2, 2: 1, 3: 3}),
    "permuted": (lambda x: x.permute(3, 0, 1, 2), {0: 1, 1: 2, 2: 3, 3: 0}),
    "heads joined": (lambda x: x.transpose(1, 2).reshape(2, 5, 12), {0: 0, 1: None, 2: 1, 3: None}),
    "grouped": (lambda x: x[:, :, None].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4), {0: 0, 1: None, 2: 2, 3: 3}),
    "repeated": (lambda x: x.repeat_interleave(2, 1), {0: 0, 1: None, 2: 2, 3: 3}),
    "flipped": (lambda x: x.flip(2), {0: 0, 1: 1, 2: None, 3: 3}),
    "rolled": (lambda x: x.roll(1, 2), {0: None, 1: None, 2: None, 3: None}),
    "cut": (lambda x: x[:, :, 1:], {0: 0, 1: 1, 2: None, 3: 3}),
    "all of it": (lambda x: x[:, :, :], {0: 0, 1: 1, 2: 2, 3: 3}),
    "heads picked": (lambda x: x[:, [1, 0, 2]], {0: 0, 1: None, 2: 2, 3: 3}),
    "summed": (lambda x: x.sum(1), {0: 0, 1: None, 2: 1, 3: 2}),
    "summed and kept": (lambda x: x.sum(1, keepdim=True), {0: 0, 1: None, 2: 2, 3: 3}),
    "summed whole": (lambda x: x.sum(), {0: None, 1: None, 2: None, 3: None}),
    "maximum of a row": (lambda x: x.amax(-1), {0: 0, 1: 1, 2: 2, 3: None}),
    "norm": (lambda x: x.norm(2, -1), {0: 0, 1: 1, 2: 2, 3: None}),
    "normalized": (lambda x: torch.nn.functional.normalize(x, dim=-1), {0: 0, 1: 1, 2: 2, 3: None}),
    "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True), {0: 0, 1: None, 2: 2, 3: 3}),
    "running sum": (lambda x: x.cumsum(2), {0: 0, 1: 1, 2: None, 3: 3}),
    "softmax": (lambda x: torch.nn.functional.softmax(x, dim=2), {0: 0, 1: 1, 2: None, 3: 3}),
    "product": (lambda x: torch.matmul(x, torch.ones(4, 6)), {0: 0, 1: 1, 2: 2, 3: None}),
    "linear": (lambda x: torch.nn.functional.linear(x, torch.ones(6, 4)), {0: 0, 1: 1, 2: 2, 3: None}),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (4,)), {0: 0, 1: 1, 2: 2, 3: None}),
    "stacked": (lambda x: torch.stack([x, x.sin()], 1)[:, 0], {0: 0, 1: 1, 2: 2, 3: 3}),
    "joined": (lambda x: torch.cat([x, x * 2], dim=3)[..., :4], {0: 0, 1: 1, 2: 2, 3: None}),
    "complex": (lambda x: torch.view_as_real(torch.complex(x, x.sin()))[..., 0], {0: 0, 1: 1, 2: 2, 3: 3}),
    "pairs": (lambda x: torch.view_as_complex(x.unflatten(-1, (2, 2))).abs(), {0: 0, 1: 1, 2: 2, 3: None}),
    "equation": (lambda x: torch.einsum("abcd,de->acbe", x, torch.ones(4, 4)), {0: 0, 1: 2, 2: 1, 3: None}),
    "unknown": (lambda x: torch.fft.fft(x, dim=0), {0: None, 1: None, 2: None, 3: None}),
}


def followed(function: Callable[[Tensor], Any], x: Tensor, dim: int) -> int | None:
    """Return the output dimension of an input axis, through all operations."""
    return query_graph(function, (x,), lambda gm: _followed(gm.graph, dim))


def _followed(graph: fx.Graph, dim: int) -> int | None:
    axes: dict[fx.Node, int | None] = {walk.placeholders(graph)[0]: dim}
    for node in graph.nodes:
        parents = [p for p in node.all_input_nodes if p in axes]
        if parents and node.op != "output":
            dims = {None if axes[p] is None else propagation.propagate_dim(node, p, axes[p]) for p in parents}  # type: ignore[arg-type]
            axes[node] = dims.pop() if len(dims) == 1 else None
    return axes[graph.output_node().args[0][0]]  # type: ignore[index]


@pytest.mark.parametrize(("name", "dim"), [(name, dim) for name in CARRIED for dim in range(4)])
def test_where_an_axis_goes(name: str, dim: int) -> None:
    function, wanted = CARRIED[name]
    assert followed(function, torch.rand(SHAPE), dim) == wanted[dim]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(CARRIED)), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 10**6))
def test_operators_of_the_table_work_slice_by_slice(names: list[str], dim: int, seed: int) -> None:
    """Change every slice but one, and check that this one is unchanged."""
    drawn = torch.Generator().manual_seed(seed)

    def function(x: Tensor) -> Any:
        for name in names:
            x = CARRIED[name][0](x)
        return x

    x = torch.rand(SHAPE, generator=drawn)
    try:
        function(x)
    except (RuntimeError, IndexError):  # these operators cannot be combined
        reject()
    axis = followed(function, x, dim)
    assume(axis is not None)
    kept = int(torch.randint(SHAPE[dim], (), generator=drawn))
    other = torch.rand(SHAPE, generator=drawn)
    other.select(dim, kept).copy_(x.select(dim, kept))
    torch.testing.assert_close(function(other).select(axis, kept), function(x).select(axis, kept))


REDUCING = sorted(op_table.tagged("reduces", "along"))
FOLLOWING: list[tuple[Any, ...]] = [(), (True,), (False,), (1,), (True, True), (True, False), (False, True), (2, 3)]


def calls_of(name: str, x: Tensor, dim: int) -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the calls of an operator along a dimension that torch accepts: op, target, arguments and keywords."""
    homes = (torch, torch.nn.functional, torch.special, torch.linalg)
    functions = [getattr(home, name.removeprefix("linalg_"), None) for home in homes]
    ways = [("call_function", function) for function in dict.fromkeys(functions) if function]
    ways += [("call_method", name)] * hasattr(Tensor, name)
    first = (2,) if name in ("norm", "linalg_vector_norm", "normalize") else ()
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((*first, dim, *more), {}) for more in FOLLOWING]
    given += [((), {"dim": dim}), ((), {"dim": dim, "keepdim": True}), ((*first, dim), {"keepdim": True})]
    calls = [(op, target, args, named) for op, target in ways for args, named in given]
    return [(op, target, args, named) for op, target, args, named in calls if run(op, target, x, args, named)]


def run(op: str, target: Any, x: Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call makes; none if torch does not accept its arguments."""
    function = getattr(Tensor, target) if op == "call_method" else target
    try:
        made = function(x, *args, **named)
    except (TypeError, RuntimeError):
        return []
    return [made] if isinstance(made, Tensor) else list(made)


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("dim", [0, 2, -1])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_every_argument_of_a_reduction_is_read_as_torch_reads_it(name: str, dim: int) -> None:
    """Compare axes with the sizes of torch's own result, for each way to pass the dimension and what follows."""
    x, found = torch.rand(2, 3, 5, 4), []
    for op, target, args, named in calls_of(name, x, dim):
        made, graph = run(op, target, x, args, named)[0], fx.Graph()
        operand = graph.placeholder("x")
        node = graph.create_node(op, target, (operand, *args), named)
        operand.meta["example_value"], node.meta["example_value"] = x, made
        sizes = dict(zip(made.shape, range(made.ndim), strict=True))  # all sizes of x differ, and none is 1
        wanted = [None if axis == dim % 4 else sizes.get(x.shape[axis]) for axis in range(4)]
        followed = [propagation.propagate_dim(node, operand, axis) for axis in range(4)]
        assert followed in (wanted, [None] * 4), (target, args, named)
        found.append(followed)
    assert any(each != [None] * 4 for each in found)


def test_an_operator_is_in_one_row() -> None:
    names = [name for row in op_table._TABLE.values() for name in row.split()]
    assert len(names) == len(set(names))


OPERANDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("neg", "abs", "bitwise_not"), ()),
    "masked_fill": (torch.tensor([True, False, False]), 1),
}


@pytest.mark.parametrize(
    ("name", "other"),
    [(name, other) for name in op_table._OTHER_SPELLINGS for other in op_table._OTHER_SPELLINGS[name].split()],
)
def test_other_spellings_of_an_operator_compute_the_same(name: str, other: str) -> None:
    x = torch.tensor([7.0, -2.0, 5.0])
    x = x.long() if name.startswith("bitwise") else x
    operands = OPERANDS.get(name, (torch.tensor([2, 3, 4]).to(x.dtype),))

    def compute(spelling: str) -> Tensor:
        homes = [home for home in (*op_table._HOMES, Tensor) if hasattr(home, spelling)]
        call: Any = getattr(homes[0], spelling)
        result: Tensor = call([x, *operands]) if name == "cat" else call(x.clone(), *operands)
        return result

    assert torch.equal(compute(name), compute(other))


CALLS = [
    "float()",
    "long()",
    "int()",
    "contiguous()",
    "detach()",
    "clone()",
    "ravel()",
    "abs()",
    "exp()",
    "squeeze()",
    "unbind()",
    "adjoint()",
    "half()",
    "double()",
    "diagonal()",
    "t()",
    "unsqueeze(0)",
    "flatten(0)",
    "cumsum(0)",
    "sum(0)",
    "chunk(2)",
    "split(2)",
    "tensor_split(2)",
    "repeat_interleave(2)",
    "transpose(0,1)",
    "movedim(0,1)",
    "moveaxis(0,1)",
    "swapaxes(0,1)",
    "swapdims(0,1)",
    "permute(1,0)",
    "view(4,3)",
    "reshape(2,6)",
    "repeat(2,1)",
    "tile(2,1)",
    "flip(0)",
    "expand(2,3,4)",
    "broadcast_to(2,3,4)",
    "select(0,1)",
    "narrow(0,0,1)",
    "unflatten(0,(3,1))",
    "to(torch.float32)",
    "to(torch.int64)",
    "type_as(x)",
    "view_as(x)",
    "expand_as(x)",
    "type(torch.float32)",
    "masked_fill(x>0,1)",
    "index_select(0,torch.tensor([0]))",
    "__getitem__(0)",
    "clamp(0)",
    "add(0)",
    "sort()",
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_methods_that_share_memory_are_tagged_as_views(call: str, dtype: torch.dtype) -> None:
    name, x = call.partition("(")[0], torch.ones(3, 4, dtype=dtype)
    result = eval(f"x.{call}", {"x": x, "torch": torch})
    parts = result if isinstance(result, (tuple, list)) else [result]
    shares = any(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)
    views = op_table.tagged("view") | {"__getitem__", "int", "long"}
    assert name in views or not shares


def test_a_function_of_that_name_is_no_operator() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x.flip(0) + y

    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(add, (x, x))
    for each in (x, node):
        each.meta["example_value"] = torch.rand(3, 2)
    assert op_table.operator_name(node) == ""
    assert propagation.propagate_dim(node, x, 0) is None


@pytest.mark.parametrize(
    ("product", "axis"),
    [
        (lambda x: x.outer(torch.ones(3)), 0),
        (lambda x: torch.ones(3).outer(x), 1),
        (lambda x: x.outer(x), None),
    ],
)
def test_each_vector_of_a_product_has_its_axis(product: Callable[[Tensor], Tensor], axis: int | None) -> None:
    assert followed(product, torch.rand(5), 0) == axis


@pytest.mark.parametrize(
    ("pick", "axis"),
    [
        (lambda x, i: x[i], 0),
        (lambda x, i: x[:, i], 1),
        (lambda x, i: x[None, :, i], 2),
        (lambda x, i: x[..., i, :], 1),
        (lambda x, i: x[i[:, None], i], 0),
        (lambda x, i: x.index_select(2, i), 2),
        (lambda x, i: torch.nn.functional.embedding(i, x[0]), 0),
    ],
)
def test_a_lookup_follows_its_index(pick: Callable[..., Tensor], axis: int) -> None:
    def question(gm: fx.GraphModule) -> int | None:
        node = next(n for n in reversed(gm.graph.nodes) if propagation.lookup(n) is not None)
        _, by = propagation.lookup(node)  # type: ignore[misc]
        index = next(i for i in by.values() if isinstance(i, fx.Node))
        return propagation.index_axis(node, index, 0)

    assert query_graph(pick, (torch.rand(5, 5, 5), torch.tensor([2, 0, 1])), question) == axis


def test_a_lookup_with_the_table_first_is_never_read_as_one_with_the_index_first() -> None:
    def function(table: Tensor, index: Tensor) -> Tensor:
        return torch.embedding(table, index)

    arguments = torch.rand(5, 4), torch.tensor([2, 0, 1])
    assert query_graph(function, arguments, lambda gm: propagation.lookup(result(gm))) is None


@pytest.mark.parametrize(
    ("move", "axis"),
    [
        (lambda x: x[None, :, None, :], 3),
        (lambda x: x[:, None].expand(3, 2, 1).transpose(1, 2), 1),
        (lambda x: x[:, :, None], 1),
        (lambda x: x[:, -1:].reshape(3), None),
        (lambda x: x.expand(3, 5), None),
    ],
)
def test_an_axis_of_one_element_is_followed(move: Callable[[Tensor], Tensor], axis: int | None) -> None:
    """Test an axis like the tokens of a prompt with one token."""
    assert followed(move, torch.randn(3, 1), 1) == axis


@pytest.mark.parametrize(
    ("number", "dtype", "wanted"),
    [
        (-1e9, torch.float16, -torch.inf),
        (-1e9, torch.float32, -1e9),
        (0.5, torch.int64, 0.0),
        (-0.5, torch.bool, 1.0),
        (300, torch.int8, None),
        (torch.inf, torch.int64, None),
        (0.1, torch.float64, 0.1),
    ],
)
def test_a_constant_is_rounded_as_its_tensor_is(number: float, dtype: torch.dtype, wanted: float | None) -> None:
    graph = fx.Graph()
    literal = graph.call_function(torch.tensor, (number,), {"dtype": torch.float64})
    cast = graph.call_method("to", (literal, dtype))
    literal.meta["example_value"] = torch.tensor(number, dtype=torch.float64)
    cast.meta["example_value"] = literal.meta["example_value"].to(dtype)
    assert op_table.constant(literal) == number
    assert op_table.constant(cast) == wanted


@pytest.mark.parametrize(
    ("fill", "wanted"),
    [
        (lambda x: torch.zeros(3), 0.0),
        (lambda x: x.new_ones(2, 3), 1.0),
        (lambda x: torch.ones_like(x, dtype=torch.bool), 1.0),
        (lambda x: torch.full((2,), 0.1, dtype=torch.float16), float(torch.tensor(0.1).half())),
        (lambda x: x.new_full((2,), fill_value=0.1), float(torch.tensor(0.1))),
        (lambda x: torch.full_like(x, 7, dtype=torch.int64), 7.0),
        (lambda x: torch.full((2,), 2.5)[:1].expand(4).half().to(torch.int32), 2.0),
        (lambda x: torch.tensor(2.0).view(1, 1) * 1, None),
        (lambda x: torch.empty(2), None),
        (lambda x: x[:1], None),
    ],
)
def test_a_constant_is_read_from_any_fill(fill: Callable[[Tensor], Tensor], wanted: float | None) -> None:
    assert query_graph(fill, (torch.rand(2),), lambda gm: op_table.constant(result(gm))) == wanted


def test_a_literal_tensor_is_read_from_its_module() -> None:
    graph = fx.Graph()
    literal = graph.get_attr("literal")
    gm = fx.GraphModule({"literal": torch.tensor([0.1])}, graph)
    literal.meta["example_value"] = gm.literal
    assert op_table.constant(literal, gm) == float(torch.tensor(0.1))
    assert op_table.constant(literal) is None
