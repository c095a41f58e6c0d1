"""Test products of 16 bits that are computed in float32, whatever this processor's libraries have."""

from __future__ import annotations

import uuid

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass.lowering import float32_products
from kvpass.lowering.float32_products import FEW_ROWS, MIN_ROWS, InFloat32
from kvpass.lowering.row_products import convert_operands
from kvpass.torch_private import inductor, processor

aten, product = torch.ops.aten, torch.ops.kvpass.float32_product
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def without_library(monkeypatch):
    """Act as on a processor whose libraries have no products of 16 bits."""
    monkeypatch.setattr(processor, "library_products", frozenset)


def converted(function, *arguments):
    """Return a function's graph with converted operands, and the targets in it."""
    traced = make_fx(function, tracing_mode="fake")(*arguments)
    convert_operands(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, [node.target for node in traced.graph.nodes]


def largest(x):
    """Return the largest magnitude, or zero of an empty tensor."""
    return float(torch.cat([x.abs().flatten(), x.new_zeros(1)]).max())


def is_rounded_once(made, exact):
    """Check that numbers differ from float64 by one rounding, and by that of sums in float32."""
    room = torch.finfo(made.dtype).eps / 2 * exact.abs() + 1e-5 * largest(exact)
    return bool(((made.double() - exact).abs() <= room).all())


@given(
    rows=st.integers(0, 2 * FEW_ROWS),
    height=st.integers(0, 40),
    columns=st.integers(0, 60),
    block=st.sampled_from([1, 64, 700, float32_products.BLOCK]),
    dtype=st.sampled_from(HALVES),
    has_int8_weights=st.booleans(),
    is_transposed=st.booleans(),
    has_bias=st.booleans(),
)
def test_products_are_rounded_once(rows, height, columns, block, dtype, has_int8_weights, is_transposed, has_bias):
    x = torch.randn(rows, height).to(dtype)
    shape = (columns, height) if is_transposed else (height, columns)
    matrix = (3 * torch.randn(shape)).to(torch.int8 if has_int8_weights else dtype)
    matrix = matrix.T if is_transposed else matrix
    bias = torch.randn(columns).to(dtype) if has_bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float32_products, "BLOCK", block)
        made = product(x, matrix, bias)
    exact = x.double() @ matrix.double() + (0 if bias is None else bias.double())
    assert made.shape == (rows, columns)
    assert made.dtype == dtype
    if rows < MIN_ROWS and not has_int8_weights:  # torch's own loops, without a bias
        assert torch.allclose(made.double(), exact, rtol=0.02, atol=0.02 * largest(exact))
    else:
        assert is_rounded_once(made, exact)


@pytest.mark.parametrize("rows", [MIN_ROWS, 40, 2 * FEW_ROWS])
@pytest.mark.parametrize("grad", [False, True])
def test_callers_with_autocast_or_gradients_change_nothing(rows, grad):
    x, matrix = torch.randn(rows, 32).bfloat16(), torch.randn(32, 48).bfloat16()
    expected = product(x, matrix, None)
    weight = torch.nn.Parameter(matrix, requires_grad=grad)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(x, weight, None), expected)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_of_16_bits_are_replaced(dtype, bias):
    x, weight = torch.randn(2, 9, 48).to(dtype), torch.randn(32, 48).to(dtype)
    given = (x, weight, torch.randn(32).to(dtype)) if bias else (x, weight)
    traced, targets = converted(torch.nn.functional.linear, *given)
    assert product.default in targets
    assert not {aten.mm.default, aten.addmm.default}.intersection(targets)
    assert is_rounded_once(traced(*given), torch.nn.functional.linear(*(each.double() for each in given)))


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(("rows", "is_replaced"), [(1, False), (MIN_ROWS - 1, False), (MIN_ROWS, True)])
def test_batches_of_many_rows_are_multiplied_in_float32(rows, is_replaced):
    given = torch.randn(3, rows, 16).bfloat16(), torch.randn(3, 16, 20).bfloat16()
    traced, _ = converted(torch.bmm, *given)
    (batched,) = traced.graph.find_nodes(op="call_function", target=aten.bmm.default)
    assert batched.meta["val"].dtype == (torch.float32 if is_replaced else torch.bfloat16)
    assert traced(*given).dtype == torch.bfloat16
    if is_replaced:
        assert is_rounded_once(traced(*given), torch.bmm(*(each.double() for each in given)))


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_in_other_dtypes_stay(dtype):
    given = torch.randn(9, 64, dtype=dtype), torch.randn(96, 64, dtype=dtype)
    assert product.default not in converted(torch.nn.functional.linear, *given)[1]


def test_products_stay_where_the_library_has_them(monkeypatch):
    monkeypatch.setattr(processor, "library_products", lambda: frozenset(HALVES))
    given = torch.randn(9, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    assert product.default not in converted(torch.nn.functional.linear, *given)[1]


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.int8])
def test_one_compiled_graph_serves_all_numbers_of_rows(weights):
    """Check that no other product remains."""
    matrix = (3 * torch.randn(96, 64)).to(weights)

    def multiply(x, weight):
        return torch.nn.functional.linear(x, weight.to(x.dtype)) + 1

    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": inductor.graph_pass(uuid.uuid4().bytes, convert_operands)}
    compiled = torch.compile(multiply, options=options, dynamic=True)
    for rows in (7, 2 * FEW_ROWS):
        x = torch.randn(rows, 64).bfloat16()
        made, codes = run_and_get_code(compiled, x, matrix)
        assert torch.allclose(made.double(), multiply(x.double(), matrix), rtol=0.02, atol=0.1)
        for code in codes:
            body = code[code.index("def call(") : code.index("def get_args")]
            assert "kvpass.float32_product" in body
            assert "extern_kernels" not in body


class MarkedTensor(torch.Tensor):
    """A tensor whose class is its own, as a quantized weight's is."""


def runs_in_float32(function, *arguments):
    """Return whether a function multiplies in float32 in graphs that run uncompiled; its results must be close."""
    calls = []

    def counted(*given):
        calls.append(given)
        return product(*given)

    with pytest.MonkeyPatch.context() as patch, InFloat32():
        patch.setattr(torch.ops.kvpass, "float32_product", counted)
        made = function(*arguments)
    expected = function(*arguments)
    assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
    assert torch.allclose(made.double(), expected.double(), rtol=0.02, atol=0.02 * largest(expected))
    return bool(calls)


@pytest.mark.usefixtures("without_library")
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([*HALVES, torch.float32]),
    has_bias=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_linear_layers_run_in_float32_uncompiled(shape, dtype, has_bias):
    x, weight = torch.randn(*shape, 24).to(dtype), torch.randn(32, 24).to(dtype)
    bias = torch.randn(32).to(dtype) if has_bias else None
    with torch.no_grad():
        assert runs_in_float32(torch.nn.functional.linear, x, weight, bias) == (dtype in HALVES)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("case", ["gradients", "autocast", "a class of its own", "vector"])
def test_other_linear_layers_stay_uncompiled(case):
    x, weight = torch.randn(9, 24).bfloat16(), torch.randn(32, 24).bfloat16()
    weight = {"a class of its own": weight.as_subclass(MarkedTensor), "vector": weight[0]}.get(case, weight)
    with torch.set_grad_enabled(case == "gradients"), torch.autocast("cpu", enabled=case == "autocast"):
        assert not runs_in_float32(torch.nn.functional.linear, x, weight)


def test_linear_layers_stay_where_the_library_has_them_uncompiled(monkeypatch):
    monkeypatch.setattr(processor, "library_products", lambda: frozenset(HALVES))
    with torch.no_grad():
        assert not runs_in_float32(torch.nn.functional.linear, torch.randn(9, 24).half(), torch.randn(32, 24).half())
