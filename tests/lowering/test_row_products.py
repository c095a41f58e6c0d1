"""Test that products of one row, and of few rows where faster, are decomposed, and nothing else."""

from __future__ import annotations

import re
import uuid

import pytest
import torch
from torch._inductor.inductor_prims import force_stride_order
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass.lowering import row_kernel, row_products
from kvpass.lowering.row_products import (
    DTYPES,
    Processor,
    RowLimits,
    column_part_count,
    column_parts,
    convert_operands,
    decompose_products,
    is_faster_as_sums,
)
from kvpass.torch_private import inductor, processor

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


@pytest.fixture(autouse=True)
def without_other_ways(monkeypatch):
    """Test the loops and the library where `row_kernel` or `float32_products` would be used."""
    monkeypatch.setattr(row_kernel, "fits", lambda rows, matrix: False)
    monkeypatch.setattr(processor, "library_products", lambda: frozenset(DTYPES))


def spelled(function, *arguments):
    """Return a function's graph after decomposition, and the number of products left."""
    traced = make_fx(function, tracing_mode="fake")(*arguments)
    decompose_products(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, sum(node.target in PRODUCTS for node in traced.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_on_one_row(dtype, bias):
    x, weight = torch.randn(1, 1, 48).to(dtype), torch.randn(32, 48).to(dtype)
    given = (x, weight, torch.randn(32).to(dtype)) if bias else (x, weight)
    traced, left = spelled(torch.nn.functional.linear, *given)
    assert left == 0
    exact = torch.nn.functional.linear(*(tensor.double() for tensor in given))
    made = traced(*given)
    assert made.dtype == dtype
    assert torch.allclose(made.double(), exact, atol=1e-5 if dtype == torch.float32 else 0.1)


def test_a_matrix_that_is_not_transposed():
    x, weight = torch.randn(1, 48), torch.randn(48, 32)
    traced, left = spelled(torch.mm, x, weight)
    assert left == 0
    assert torch.allclose(traced(x, weight), x @ weight, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 6])
@pytest.mark.parametrize("columns", [32, 33])
def test_a_few_rows_through_a_linear_layer(rows, columns, dtype):
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, 1, 48), (columns, 48), (columns,)))
    traced, left = spelled(torch.nn.functional.linear, x, weight, bias)
    exact = torch.nn.functional.linear(*(tensor.double() for tensor in (x, weight, bias)))
    made = traced(x, weight, bias)
    assert left == 0
    assert made.dtype == dtype
    assert (made.double() - exact).abs().max() <= exact.abs().max() * max(torch.finfo(dtype).eps, 1e-6)


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (17, torch.randn(32, 48)),
        (2, torch.randn(48, 32).t()),  # as in GPT-2: rows are contiguous, not columns
        (2, torch.randn(32, 48).double()),
    ],
)
def test_other_products_are_left_alone(rows, weight):
    _, left = spelled(torch.nn.functional.linear, torch.randn(rows, 48).to(weight.dtype), weight)
    assert left == 1


@pytest.mark.parametrize(
    ("dtype", "dots", "rows", "width", "expected"),
    [
        (torch.float32, False, 1, 512, 4),
        (torch.float32, False, 3, 512, 4),
        (torch.float32, False, 4, 512, 2),  # the rows stay in the cache
        (torch.float32, False, 4, 1536, 2),
        (torch.float32, False, 4, 1540, 4),
        (torch.float32, False, 8, 2048, 2),
        (torch.float32, False, 9, 2048, 0),
        (torch.float32, False, 12, 512, 1),
        (torch.float32, False, 13, 256, 0),
        (torch.bfloat16, True, 2, 8192, 4),
        (torch.bfloat16, True, 3, 2048, 2),
        (torch.bfloat16, True, 4, 2080, 4),
        (torch.bfloat16, True, 5, 2080, 0),
        (torch.bfloat16, True, 8, 512, 1),
        (torch.bfloat16, True, 9, 512, 0),
        (torch.bfloat16, False, 8, 2048, 2),  # the library must convert
        (torch.bfloat16, False, 9, 2048, 0),
        (torch.float16, False, 16, 2048, 2),
        (torch.float16, False, 17, 64, 0),
        (torch.float64, False, 1, 64, 0),
    ],
)
def test_the_number_of_column_parts(dtype, dots, rows, width, expected):
    processor = Processor(cache=48 << 10, dots=frozenset([dtype] if dots else []))
    x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(64, width, dtype=dtype)
    assert column_part_count(x, weight.t(), processor) == expected


def test_a_smaller_cache_has_room_for_fewer_rows():
    x, weight = torch.empty(4, 1536), torch.empty(64, 1536)
    assert column_part_count(x, weight.t(), Processor(32 << 10, frozenset())) == 4


def test_columns_that_cannot_be_split_and_those_that_lie_apart():
    processor = Processor(48 << 10, frozenset())
    assert column_part_count(torch.empty(1, 64), torch.empty(33, 64).t(), processor) == 1
    assert column_part_count(torch.empty(1, 64), torch.empty(34, 64).t(), processor) == 2
    assert column_part_count(torch.empty(1, 64), torch.empty(64, 32), processor) == 1
    assert column_part_count(torch.empty(2, 64), torch.empty(64, 32), processor) == 0


def scores(queries, keys):
    return queries @ keys.transpose(1, 2)


def attention(queries, keys, values):
    return scores(queries, keys) @ values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("function", [scores, torch.bmm])
def test_products_of_attention(function, rows, dtype, monkeypatch):
    monkeypatch.setattr(row_products, "batches", lambda graph, processor: row_products._all_batches(graph))
    given = torch.randn(3, rows, 64 if function is scores else 9).to(dtype), torch.randn(3, 9, 64).to(dtype)
    traced = make_fx(function, tracing_mode="fake")(*given)
    decompose_products(traced.graph)
    traced.recompile()
    exact, made = function(*(tensor.double() for tensor in given)), traced(*given)
    assert not products_of(traced.graph)
    assert (made.dtype, made.shape, made.stride()) == (dtype, exact.shape, exact.contiguous().stride())
    assert (made.double() - exact).abs().max() <= exact.abs().max() * max(torch.finfo(dtype).eps, 1e-6)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "expected"),
    [
        (2, 64, torch.float32, 4),  # sixteen numbers are a cache line
        (2, 128, torch.float32, 8),
        (2, 64, torch.bfloat16, 2),
        (8, 64, torch.float32, 2),  # limited by the number of registers for sums
        (17, 64, torch.float32, 1),
        (2, 96, torch.float32, 4),
        (2, 33, torch.float32, 1),
        (2, 8, torch.float32, 1),
    ],
)
def test_a_row_of_values_is_read_in_cache_lines(rows, width, dtype, expected):
    assert column_parts(torch.empty(3, rows, 9), torch.empty(3, 9, width, dtype=dtype)) == expected
    assert column_parts(torch.empty(3, rows, width), torch.empty(3, 9, width, dtype=dtype).transpose(1, 2)) == 1


def products_of(graph):
    return graph.find_nodes(op="call_function", target=aten.bmm.default)


@pytest.mark.parametrize(
    ("vectors", "dtype", "rows", "expected"),
    [
        ("AVX512", torch.float32, 2, [True, True]),
        ("AVX512", torch.float32, 5, [True, False]),
        ("AVX512", torch.bfloat16, 2, [True, True]),
        ("AVX512", torch.bfloat16, 3, [False, True]),
        ("something else", torch.bfloat16, 2, [True, True]),
    ],
)
def test_products_of_attention_that_loops_compute_faster(vectors, dtype, rows, expected):
    given = (torch.randn(3, rows, 64), torch.randn(3, 9, 64), torch.randn(3, 9, 64))
    traced = make_fx(attention, tracing_mode="fake")(*(x.to(dtype) for x in given))
    processor = Processor(32 << 10, frozenset(), vectors)
    assert [is_faster_as_sums(node, processor) for node in products_of(traced.graph)] == expected


def test_products_with_anything_else_are_left_alone():
    queries = torch.randn(3, 2, 64)
    assert spelled(torch.bmm, queries, torch.randn(3, 9, 128)[..., ::2].transpose(1, 2))[1] == 1
    assert spelled(torch.bmm, queries.double(), torch.randn(3, 64, 9).double())[1] == 1


@pytest.mark.parametrize(("layers", "left"), [(2, 0), (3, 3)])
def test_values_go_through_loops_where_there_are_few_layers(layers, left, monkeypatch):
    """Check that models with many layers call the library: a call ends a kernel, so that layers stay separate."""
    monkeypatch.setattr(row_products.Processor, "here", lambda: Processor(32 << 10, frozenset(), "made up"))
    monkeypatch.setitem(
        row_products.LIMITS, ("made up", torch.float32, False), RowLimits(2, 2, 2, 2, scores=2, values=2)
    )

    def deep(queries, keys, values):
        for _ in range(layers):
            queries = attention(queries, keys, values)
        return queries

    assert spelled(deep, torch.randn(3, 2, 8), torch.randn(3, 9, 8), torch.randn(3, 9, 8))[1] == left


@pytest.mark.filterwarnings("error:Raw SymInt")
def test_a_dynamic_number_of_slots(monkeypatch):
    monkeypatch.setattr(row_products.Processor, "here", lambda: Processor(32 << 10, frozenset(), "made up"))
    monkeypatch.setitem(
        row_products.LIMITS, ("made up", torch.float32, False), RowLimits(2, 2, 2, 2, scores=2, values=2)
    )
    given = torch.randn(3, 2, 8), torch.randn(3, 9, 8), torch.randn(3, 9, 8)
    options = {"post_grad_custom_pre_pass": inductor.graph_pass(uuid.uuid4().bytes, decompose_products)}
    compiled = torch.compile(attention, options=options)
    for keys in given[1:]:
        torch._dynamo.mark_dynamic(keys, 1)
    made, codes = run_and_get_code(compiled, *given)
    assert torch.allclose(made, attention(*given), atol=1e-5)
    assert "extern_kernels.bmm" not in codes[-1]
    longer = torch.randn(3, 2, 8), torch.randn(3, 21, 8), torch.randn(3, 21, 8)
    assert torch.allclose(compiled(*longer), attention(*longer), atol=1e-5)


def scaled(x, codes, scale):
    """Multiply by codes and a scale for each column, like weight-only quantisation."""
    return torch.nn.functional.linear(x, codes.to(x.dtype)) * scale


def scaled_transposed(x, codes, scale):
    return torch.mm(x, codes.t().to(x.dtype)) * scale


def compiled_in_int8(function, change, rows, dtype):
    """Return the generated code of a product with random int8 weights, and check its result."""
    torch._dynamo.reset()
    x, scale = torch.randn(rows, 64).to(dtype), torch.rand(96).to(dtype)
    codes = torch.randint(-128, 128, (96, 64), dtype=torch.int8)
    options = {"post_grad_custom_pre_pass": inductor.graph_pass(uuid.uuid4().bytes, change)}
    made, written = run_and_get_code(torch.compile(function, options=options), x, codes, scale)
    exact = function(x.double(), codes, scale.double())
    assert (made.double() - exact).abs().max() <= exact.abs().max() * max(2 * torch.finfo(dtype).eps, 1e-5)
    return written[-1]


@pytest.mark.parametrize("function", [scaled, scaled_transposed])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.float32), (4, torch.float32), (1, torch.bfloat16), (8, torch.bfloat16)]
)
def test_weights_in_int8_are_converted_in_registers(rows, dtype, function):
    """Check that codes become float32 directly: conversion through bfloat16 takes twice as long in a loop."""
    written = compiled_in_int8(function, decompose_products, rows, dtype)
    body = written[written.index("def call(") : written.index("def get_args")]
    assert "empty_strided_cpu" in body
    assert not re.findall(r"extern_kernels|empty_strided_cpu\(\((?:64, 96|96, 64)\)", body)
    loop = written[written.index("int8_t>::loadu") :][:2000]
    assert re.search(r"convert<float[^>]*>\(tmp0\)", loop)


@pytest.mark.parametrize("function", [scaled, scaled_transposed])
@pytest.mark.parametrize("rows", [9, 40])
def test_weights_in_int8_are_converted_for_many_rows(rows, function):
    """Check that Inductor does not call a product of torch that is slow for many rows."""
    written = compiled_in_int8(function, convert_operands, rows, torch.bfloat16)
    assert "extern_kernels.mm(" in written
    assert "int8pack" not in written


def test_products_without_weights_in_int8_stay():
    given = torch.randn(9, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    traced = make_fx(torch.nn.functional.linear, tracing_mode="fake")(*given)
    before = str(traced.graph)
    convert_operands(traced.graph)
    assert str(traced.graph) == before


def test_not_on_a_gpu():
    x, weight = torch.empty(1, 64, device="meta"), torch.empty(64, 64, device="meta")
    assert column_part_count(x, weight.t(), Processor.here()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_read_in_their_own_dtype(dtype):
    """Check that no call to the library or conversion remains, and that no float32 matrix is made."""
    x, weight = torch.randn(1, 64).to(dtype), torch.randn(96, 64).to(dtype)
    options = {"post_grad_custom_pre_pass": inductor.graph_pass(uuid.uuid4().bytes, decompose_products)}
    _, codes = run_and_get_code(torch.compile(torch.nn.functional.linear, options=options), x, weight)
    body = codes[-1][codes[-1].index("def call(") : codes[-1].index("def get_args")]
    assert not re.findall(r"extern_kernels|torch\.ops\.(aten|prims)|copy_\(", body)
    assert "empty_strided_cpu" in body
    assert not re.findall(r"empty_strided_cpu\(\((?:64, 96|96, 64)\)", body)


def test_a_row_of_a_larger_tensor():
    def last(x, weight):
        return (x * 2)[:, -1] @ weight + x.transpose(1, 2).reshape(3, 48)[1:2] @ weight

    given = torch.randn(1, 3, 48), torch.randn(48, 32)
    traced, left = spelled(last, *given)
    assert left == 0
    assert torch.allclose(traced(*given), last(*given), atol=1e-4)


def test_rows_are_stored_once():
    def both(x, a, b):
        return x @ a, x @ b

    traced, _ = spelled(both, torch.randn(1, 8), torch.randn(8, 4), torch.randn(8, 6))
    written = [node.args[0].target for node in traced.graph.nodes if node.target is force_stride_order]
    assert written.count(aten.mul.Scalar) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_every_new_node_has_metadata(rows):
    """Check strides too: later operators were traced for the strides of the product."""
    traced, left = spelled(torch.nn.functional.linear, torch.randn(rows, 48), torch.randn(32, 48))
    made = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert left == 0
    assert all(node.meta["val"].shape is not None for node in made)
    assert made[-1].meta["val"].shape == (rows, 32)
    assert made[-1].meta["val"].stride() == (32, 1)
