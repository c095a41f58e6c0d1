"""Test products of few rows by the C++ kernel: any shape, what is fused into it, and where it is used."""

from __future__ import annotations

import ctypes
import functools
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import config, ir
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear, silu

import kvpass
from kvpass.lowering import row_kernel
from kvpass.lowering.row_products import Processor, decompose_products
from kvpass.torch_private import generated_code, inductor

pytestmark = pytest.mark.skipif(not Processor.here().has_row_kernel, reason="the kernel needs AVX2 or AVX-512")

OPERATOR = torch.ops.kvpass.row_products.default
CALL = "kvpass::multiply<"  # in generated code
ROWS = (1, 2, 3, 4, 5, 8, 9, 16)
MATRICES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8]


AVX2 = ("__AVX512F__", "__AVX512BF16__")
"""The macros whose absence makes the kernel one for processors without AVX-512."""


@functools.cache
def library(rows: torch.dtype, matrix: torch.dtype, without: tuple[str, ...]) -> ctypes.CDLL:
    """Return the kernel's inner loops for every number of rows, compiled without some macros of the compiler."""
    source, kind = row_kernel._template(rows, matrix)
    source = "".join(f"#undef {macro}\n" for macro in without) + source
    cases = "".join(
        f"case {count}: return kvpass::multiply<kvpass::{kind}, {count}>(x, m, stride, size, columns, y, to);\n"
        for count in ROWS
    )
    inputs = "int64_t count, const void* x, const void* m, int64_t stride, int64_t size, int64_t columns"
    include = "#include <c10/util/BFloat16.h>\n#include <c10/util/Half.h>\n"
    wrapper = f'extern "C" void product({inputs}, float* y, int64_t to) {{ switch (count) {{ {cases} }} }}'
    return generated_code.cpp_library(include + source + wrapper)


def product(rows: Tensor, matrix: Tensor, without: tuple[str, ...] = ()) -> Tensor:
    """Multiply rows [R, K] with a matrix [N, K] by the inner loops, to [R, N] in a larger memory."""
    (count, size), columns = rows.shape, matrix.shape[0]
    memory = torch.full((count, columns + 3), torch.nan)
    sizes = matrix.stride(0), size, columns
    numbers = [count, rows.data_ptr(), matrix.data_ptr(), *sizes, memory.data_ptr(), memory.stride(0)]
    library(rows.dtype, matrix.dtype, without).product(*map(ctypes.c_int64, numbers))
    assert memory[:, columns:].isnan().all()
    return memory[:, :columns]


def random_matrix(columns: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.randn(columns, size, generator=torch.Generator().manual_seed(seed))
    return (
        x.to(dtype) if dtype.is_floating_point else (40 * x).round().clamp(-128 * (dtype == torch.int8), 127).to(dtype)
    )


@pytest.mark.parametrize("without", [(), AVX2], ids=["all", "AVX2"])
@pytest.mark.parametrize("dtype", MATRICES)
@settings(deadline=None)  # the first example compiles
@given(data=st.data())
def test_products_of_any_shape(dtype: torch.dtype, without: tuple[str, ...], data: st.DataObject) -> None:
    """Check the numbers, gaps between the matrix's rows, and that a row does not depend on the rows beside it."""
    count, columns = data.draw(st.sampled_from(ROWS)), data.draw(st.integers(1, 70))
    size = data.draw(st.integers(1, 9)) * row_kernel.CACHE_LINE // dtype.itemsize
    has_dots = not without and row_kernel.uses_dot_products(torch.bfloat16, dtype)
    left = torch.bfloat16 if has_dots else torch.float32
    rows = random_matrix(count, size, left, 0)
    matrix = random_matrix(columns, size + data.draw(st.sampled_from([0, 8])), dtype, 1)[:, :size]
    made, exact = product(rows, matrix, without), rows.double() @ matrix.double().mT
    bound = rows.double().abs() @ matrix.double().abs().mT
    assert ((made - exact).abs() <= 1e-5 * bound).all()
    row = data.draw(st.integers(0, count - 1))
    assert torch.equal(product(rows[row : row + 1], matrix, without)[0], made[row])


def test_a_compiler_without_dot_products_of_bfloat16() -> None:
    rows, matrix = (random_matrix(count, 96, torch.bfloat16, seed=count) for count in (3, 7))
    made = product(rows, matrix, without=("__AVX512BF16__",))
    assert torch.allclose(made.double(), rows.double() @ matrix.double().mT, atol=1e-4)


def compiled(function: Callable[..., Any], *arguments: Tensor) -> tuple[Any, str]:
    """Return the result of a compiled function, and its generated code."""
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": inductor.graph_pass(uuid.uuid4().bytes, decompose_products)}
    made, (*_, code) = run_and_get_code(torch.compile(function, dynamic=False, options=options), *arguments)
    return made, code


def code_that_equals_eager(function: Callable[..., tuple[Tensor, ...]], *arguments: Tensor) -> str:
    """Check the results of a compiled function against those of the function, and return its generated code."""
    results, code = compiled(function, *arguments)
    for result, expected in zip(results, function(*arguments), strict=True):
        assert torch.allclose(result, expected, atol=1e-5)
    return code


def weights(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(1, 96, torch.float32), (1, 96, torch.float16), (3, 50, torch.float32), (8, 96, torch.bfloat16)],
)
def test_bias_activation_and_residual_sum_are_fused(rows, columns, dtype):
    """Check that a layer is a kernel, for numbers of columns with and without a rest."""

    def mlp(x, gate, up, bias, down):
        return x + linear(silu(linear(x, gate)) * linear(x, up, bias), down)

    shapes = (rows, 1, 64), (columns, 64), (columns, 64), (columns,), (64, columns)
    x, gate, up, bias, down = weights(*shapes, dtype=dtype)
    made, code = compiled(mlp, x, gate, up, bias, down)
    if columns % 32:  # the last matrix has no whole cache lines
        assert code.count(CALL) == 2
    else:
        assert code.count(CALL) == 3
        reads_rows = dtype == torch.float32 or row_kernel.uses_dot_products(dtype, dtype)
        assert code.count("pybinding(") == (3 if reads_rows else 4)  # one converts the rows to float32
    exact = mlp(*(tensor.double() for tensor in (x, gate, up, bias, down)))
    assert (made.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_several_results_of_one_kernel() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        made = linear(x, weight)
        rounded = (made + bias).bfloat16()
        return made, rounded, rounded.relu()

    arguments = weights((3, 64), (40, 64), (40,), dtype=torch.float32)
    results, code = compiled(function, *arguments)
    assert (code.count(CALL), code.count("pybinding(")) == (1, 1)
    for result, expected in zip(results, function(*arguments), strict=True):
        assert result.dtype == expected.dtype
        assert torch.allclose(result, expected, atol=1e-5, rtol=0.01)


def test_a_product_with_further_readers_is_stored():
    def function(x, weight, residual):
        made = linear(x, weight)
        return made, residual + made, made.sum(-1)

    arguments = weights((2, 64), (40, 64), (2, 40), dtype=torch.float32)
    assert code_that_equals_eager(function, *arguments).count(CALL) == 1


def test_a_result_in_another_order_of_dimensions():
    def function(x, weight, scale):
        return linear(x, weight).view(2, 4, 16).transpose(0, 1) * scale, linear(x, weight).t().contiguous()

    arguments = weights((2, 64), (64, 64), (4, 2, 16), dtype=torch.float32)
    code_that_equals_eager(function, *arguments)


def test_weights_that_are_parts_of_a_tensor():
    def function(x, joined):
        query, key = joined.narrow(0, 8, 40), joined[48:, :32]
        return linear(x, query), linear(x[:, :32], key)

    arguments = weights((3, 64), (80, 64), dtype=torch.float32)
    assert code_that_equals_eager(function, *arguments).count(CALL) == 2


def test_weights_in_int8_are_converted_in_registers():
    def function(x, codes, scale):
        return linear(x, codes.to(x.dtype)) * scale

    x, scale = weights((4, 64), (96,), dtype=torch.bfloat16)
    codes = random_matrix(96, 64, torch.int8, 0)
    made, code = compiled(function, x, codes, scale)
    assert "kvpass::Products<int8_t>" in code
    exact = function(x.double(), codes, scale.double())
    assert (made.double() - exact).abs().max() <= 0.01 * exact.abs().max()


def test_rows_in_float64_keep_their_numbers():
    """Check that weights in int8, which have their own dtype in the graph, do not bring such rows to the kernel."""

    def function(x, codes):
        return linear(x, codes.to(x.dtype))

    x, codes = weights((4, 64), dtype=torch.float64)[0], random_matrix(96, 64, torch.int8, 0)
    made, code = compiled(function, x, codes)
    assert CALL not in code
    assert torch.allclose(made, function(x, codes), atol=0, rtol=1e-12)


@pytest.mark.parametrize("matrices", [[torch.bfloat16], [torch.float32] * 2, [torch.bfloat16, torch.float32]])
def test_code_with_a_wrapper_in_cpp(matrices):
    """Check that the kernels of a graph, which are one file then, do not define the same names."""

    def function(x, *several):
        return [linear(x.to(matrix.dtype), matrix) for matrix in several]

    x, *several = weights((2, 64), *[(40 + 8 * index, 64) for index in range(len(matrices))], dtype=torch.float32)
    several = [matrix.to(dtype) for matrix, dtype in zip(several, matrices, strict=True)]
    with torch._inductor.config.patch(cpp_wrapper=True):
        made, code = compiled(function, x, *several)
    assert code.count(CALL) == len(several)
    for product, matrix in zip(made, several, strict=True):
        assert torch.allclose(product.float(), linear(x, matrix.float()), atol=0.02)


def uses_kernel(x: Tensor, weight: Tensor) -> bool:
    traced = make_fx(linear, tracing_mode="fake")(x, weight)
    decompose_products(traced.graph)
    return bool(traced.graph.find_nodes(op="call_function", target=OPERATOR))


@pytest.mark.parametrize(
    ("x", "weight", "expected"),
    [
        (torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16(), True),
        (torch.randn(17, 64).bfloat16(), torch.randn(32, 64).bfloat16(), False),
        (torch.randn(12, 64), torch.randn(32, 64), True),
        (torch.randn(13, 64), torch.randn(32, 64), False),
        (torch.randn(2, 64), torch.randn(64, 32).t(), False),  # as in GPT-2: columns are not contiguous
        (torch.randn(2, 72), torch.randn(32, 72), False),  # a row of the matrix ends within a cache line
        (torch.randn(2, 64).double(), torch.randn(32, 64).double(), False),
    ],
)
def test_which_products_it_computes(x, weight, expected):
    assert uses_kernel(x, weight) == expected


@pytest.mark.skipif(not hasattr(torch._inductor.config.cpp, "march"), reason="torch 2.11 has no such setting")
@pytest.mark.parametrize(
    ("march", "uses"), [("", False), ("x86-64-v3", False), ("native", True), ("native -mmove-max=256", True)]
)
def test_not_for_another_processor(march, uses):
    x, weight = torch.randn(2, 64), torch.randn(32, 64)
    with torch._inductor.config.patch({"cpp.march": march}):
        assert uses_kernel(x, weight) is uses


@pytest.mark.parametrize(("vectors", "uses"), [("DEFAULT", False), ("AVX2", True), ("AVX512", True)])
def test_vectors(vectors, uses, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    assert uses_kernel(torch.randn(2, 64), torch.randn(32, 64)) is uses


def test_the_operator_without_a_compiler():
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    assert torch.allclose(OPERATOR(x, weight), x.float() @ weight.float().mT, atol=1e-5)


class Renamed(ir.CppTemplateBuffer):
    """Inductor's buffer of a template with an argument under another name."""

    def __init__(self, layout: Any, inputs: Any, *, render: Any) -> None:
        super().__init__(layout, inputs, render, None, None)


def test_a_torch_that_is_newer_than_tested_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(row_kernel, "untested_version", lambda package: asked.append(package) or "9.9")
    monkeypatch.setattr(row_kernel, "is_compiled", functools.cache(row_kernel.is_compiled.__wrapped__))
    arguments = weights((3, 64), (40, 64), dtype=torch.float32)
    assert row_kernel.is_compiled()
    for _ in range(2):
        assert CALL in code_that_equals_eager(lambda x, weight: (linear(x, weight),), *arguments)
    assert asked == ["torch"]


def test_a_torch_that_does_not_compile_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_kernel, "untested_version", lambda package: "9.9")
    monkeypatch.setattr(row_kernel, "is_compiled", functools.cache(row_kernel.is_compiled.__wrapped__))
    monkeypatch.setattr(ir, "CppTemplateBuffer", Renamed)
    arguments = weights((3, 64), (40, 64), dtype=torch.float32)
    with config.patch(force_disable_caches=True):  # `monkeypatch` would delete the setting of torch 2.15
        with pytest.warns(kvpass.KVPassWarning, match="steps on a CPU are slower, as torch .* takes 3 positional"):
            assert not row_kernel.is_compiled()
        assert CALL not in code_that_equals_eager(lambda x, weight: (linear(x, weight),), *arguments)
