"""Products of a single row are spelled out, those of a few rows where it is faster, and nothing else is."""

from __future__ import annotations

import re
import uuid

import pytest
import torch
from torch._inductor.inductor_prims import force_stride_order
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass import compat
from kvpass.lowering.row_products import DTYPES, Processor, halves, spell_out

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def spelled(function, *arguments):
    """The graph of a function on these arguments, spelled out, and how many products are left in it."""
    traced = make_fx(function, tracing_mode="fake")(*arguments)
    spell_out(traced.graph)
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
        (2, torch.randn(48, 32).t()),  # as in GPT-2: rows lie together, not columns
        (2, torch.randn(32, 48).double()),
    ],
)
def test_other_products_are_left_alone(rows, weight):
    _, left = spelled(torch.nn.functional.linear, torch.randn(rows, 48).to(weight.dtype), weight)
    assert left == 1


@pytest.mark.parametrize(
    ("dtype", "dots", "rows", "width", "expected"),
    [
        (torch.float32, False, 1, 512, 2),
        (torch.float32, False, 3, 512, 2),
        (torch.float32, False, 4, 512, 1),  # the rows stay near
        (torch.float32, False, 4, 1536, 1),
        (torch.float32, False, 4, 1540, 2),
        (torch.float32, False, 8, 2048, 2),
        (torch.float32, False, 9, 2048, 0),
        (torch.float32, False, 12, 512, 1),
        (torch.float32, False, 13, 256, 0),
        (torch.bfloat16, True, 2, 8192, 2),
        (torch.bfloat16, True, 3, 2048, 1),
        (torch.bfloat16, True, 3, 2080, 0),
        (torch.bfloat16, True, 8, 512, 1),
        (torch.bfloat16, True, 9, 512, 0),
        (torch.bfloat16, False, 8, 2048, 2),  # the library has to convert
        (torch.bfloat16, False, 9, 2048, 0),
        (torch.float16, False, 16, 2048, 2),
        (torch.float16, False, 17, 64, 0),
        (torch.float64, False, 1, 64, 0),
    ],
)
def test_the_number_of_parts(dtype, dots, rows, width, expected):
    processor = Processor(cache=48 << 10, dots=frozenset([dtype] if dots else []))
    x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(64, width, dtype=dtype)
    assert halves(x, weight.t(), processor) == expected


def test_a_smaller_cache_has_room_for_fewer_rows():
    x, weight = torch.empty(4, 1536), torch.empty(64, 1536)
    assert halves(x, weight.t(), Processor(32 << 10, frozenset())) == 2


def test_columns_that_cannot_be_halved_and_those_that_lie_apart():
    processor = Processor(48 << 10, frozenset())
    assert halves(torch.empty(1, 64), torch.empty(33, 64).t(), processor) == 1
    assert halves(torch.empty(1, 64), torch.empty(64, 32), processor) == 1
    assert halves(torch.empty(2, 64), torch.empty(64, 32), processor) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2])
def test_scores_in_half_precision(rows, dtype):
    queries, keys = torch.randn(3, rows, 64).to(dtype), torch.randn(3, 9, 64).to(dtype)
    traced, left = spelled(lambda q, k: torch.bmm(q, k.transpose(1, 2)), queries, keys)
    exact, made = queries.double() @ keys.double().transpose(1, 2), traced(queries, keys)
    assert left == 0
    assert (made.dtype, made.stride()) == (dtype, (9 * rows, 9, 1))
    assert (made.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (torch.randn(3, 2, 64), torch.randn(3, 9, 64).transpose(1, 2)),
        (torch.randn(3, 3, 64).bfloat16(), torch.randn(3, 9, 64).bfloat16().transpose(1, 2)),
        (torch.randn(3, 2, 9).bfloat16(), torch.randn(3, 9, 64).bfloat16()),  # probabilities and values
    ],
)
def test_other_batches_are_left_alone(queries, keys):
    assert spelled(torch.bmm, queries, keys)[1] == 1


def test_not_on_a_gpu():
    x, weight = torch.empty(1, 64, device="meta"), torch.empty(64, 64, device="meta")
    assert halves(x, weight.t(), Processor.here()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_read_in_their_own_dtype(dtype):
    """Nothing is called, neither the library nor a conversion, and no matrix is made in float32."""
    x, weight = torch.randn(1, 64).to(dtype), torch.randn(96, 64).to(dtype)
    options = {"post_grad_custom_pre_pass": compat.graph_pass(uuid.uuid4().bytes, spell_out)}
    _, codes = run_and_get_code(torch.compile(torch.nn.functional.linear, options=options), x, weight)
    body = codes[-1][codes[-1].index("def call(") : codes[-1].index("def get_args")]
    assert not re.findall(r"extern_kernels|torch\.ops\.(aten|prims)|copy_\(", body)
    assert "empty_strided_cpu" in body
    assert not re.findall(r"empty_strided_cpu\(\((?:64, 96|96, 64)\)", body)


def test_a_row_of_something_larger():
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
def test_every_new_node_says_what_it_is(rows):
    """Of the strides too: the operators that follow were traced for those of the product."""
    traced, left = spelled(torch.nn.functional.linear, torch.randn(rows, 48), torch.randn(32, 48))
    made = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert left == 0
    assert all(node.meta["val"].shape is not None for node in made)
    assert made[-1].meta["val"].shape == (rows, 32)
    assert made[-1].meta["val"].stride() == (32, 1)
