"""Multiply a few rows with a matrix by a C++ kernel that reads each weight once.

It serves decode steps of up to `MAX_ROWS` rows on processors with AVX2 or AVX-512.  It keeps several columns of sums
in registers, where the compiler's loops have one sum per row.  Inductor compiles it as a template, so operations on the
product, such as a bias, an activation or a residual sum, run on each block while it is in the cache.
"""

from __future__ import annotations

import functools
import importlib.resources
import warnings

import torch
from torch import Tensor

from kvpass.errors import KVPassWarning
from kvpass.torch_private import cpp_templates, inductor, processor, symbolic_shapes, tensors
from kvpass.versions import untested_version

MAX_ROWS = {torch.float32: 12, torch.bfloat16: 16, torch.float16: 16, torch.int8: 16, torch.uint8: 16}
"""The largest number of rows for which the kernel is used, by the dtype of the matrix.

They come from `python -m benchmarks row_products`, like `row_products.LIMITS`; with more rows the library is faster.
The kernel for AVX2 was timed on a processor that also has AVX-512, with all libraries kept to AVX2.
"""

CACHE_LINE = 64  # bytes
NAMES = {
    torch.float32: "float",
    torch.bfloat16: "at::BFloat16",
    torch.float16: "at::Half",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
}
"""The dtypes of matrices, and their names in C++."""

torch.library.define("kvpass::row_products", "(Tensor rows, Tensor matrix) -> Tensor")


@torch.library.impl("kvpass::row_products", "CPU")
def row_products(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows [R, K] with the rows of a matrix [N, K], with sums in float32.

    Inductor does not call this function: it compiles the kernel instead.

    Returns:
        The products, float32 [R, N].
    """
    return torch.nn.functional.linear(rows.float(), matrix.float())


@functools.partial(torch.library.register_fake, "kvpass::row_products")
def _fake(rows: Tensor, matrix: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrix.shape[0], dtype=torch.float32)


def fits(rows: Tensor, matrix: Tensor) -> bool:
    """Return whether the kernel can multiply these rows [R, K] with this matrix [K, N]."""
    if matrix.dtype not in NAMES or symbolic_shapes.symbols(matrix):
        return False
    is_stored_by_columns = matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0]
    is_whole = rows.shape[1] * matrix.element_size() % CACHE_LINE == 0
    return is_stored_by_columns and is_whole and rows.shape[0] <= MAX_ROWS[matrix.dtype]


def multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows [R, K] with a matrix [K, N] for which `fits`, to float32 [R, N]; traceable."""
    cpp_templates.use_row_template(torch.ops.kvpass.row_products.default, _template)
    product: Tensor = torch.ops.kvpass.row_products(rows, matrix.permute(1, 0))
    return product


@functools.cache
def is_compiled() -> bool:
    """Return whether Inductor compiles the kernel; warn once if a torch newer than all tested ones does not."""
    if not untested_version("torch"):
        return True
    try:
        with tensors.real_tensors():  # Dynamo may trace a graph
            right, why = _is_right(), "the results are wrong"
    except Exception as error:  # from changed names and signatures
        right, why = False, str(error).partition("\n")[0]
    if not right:
        message = f"steps on a CPU are slower, as torch {torch.__version__} does not compile kvpass's products: {why}"
        warnings.warn(message, KVPassWarning, stacklevel=2)
    return right


def _is_right() -> bool:
    """Compare a product, and one with an operation fused into it, with torch's."""
    rows, matrix = torch.arange(128.0, device="cpu").view(2, 64) / 128, torch.ones(40, 64, device="cpu")
    with tensors.fake_mode() as fake:
        gm = tensors.trace(lambda x, y: [multiply(x, y.t()), multiply(x, y.t()).neg()], [fake(rows), fake(matrix)])
    with inductor.outside_of_traces():
        product, negated = inductor.inductor(gm, [rows, matrix], {})(rows, matrix)
    wanted = rows @ matrix.t()
    return torch.allclose(product, wanted) and torch.allclose(negated, -wanted)


def uses_dot_products(rows: torch.dtype, matrix: torch.dtype) -> bool:
    """Return whether the processor multiplies pairs of these dtypes; otherwise rows must be in float32."""
    return rows == matrix == torch.bfloat16 and torch.bfloat16 in processor.dot_products()


@functools.cache
def _template(rows: torch.dtype, matrix: torch.dtype) -> tuple[str, str]:
    """Return C++ source, and the kind of products in it for rows and a matrix of these dtypes."""
    source = importlib.resources.files(__package__).joinpath("row_kernel.cpp").read_text()
    return source, "DotProducts" if rows == torch.bfloat16 else f"Products<{NAMES[matrix]}>"
