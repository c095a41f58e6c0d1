"""Provide Inductor with templates of C++ kernels: products of a few rows, with the operations that Inductor fuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

COLUMNS = 32
"""Columns of a product that a thread computes before it runs the operations that are fused into the kernel."""

KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
{library}
extern "C" {head}
{{
  #pragma omp parallel num_threads({threads})
  {{
    {buffer}
    #pragma omp for schedule(static)
    for (int64_t n_start = 0; n_start < {columns}; n_start += {block}) {{
      const int64_t n_end = std::min<int64_t>(n_start + {block}, {columns});
      kvpass::multiply<kvpass::{kind}, {count}>(
          &{rows}, &{matrix}, {stride}, {width}, n_end - n_start, &{output}, {output_stride});
      {fused}
    }}
  }}
}}
"""


@functools.cache
def use_row_template(op: Any, template: Callable[[torch.dtype, torch.dtype], tuple[str, str]]) -> None:
    """Make Inductor lower an operator (rows [R, K], matrix [N, K]) -> float32 [R, N] to a C++ kernel.

    Args:
        op: an overload.
        template: a function of the dtypes of rows and matrix, which returns C++ source and a kind of products in it.
            The source defines `kvpass::multiply<kind, R>(rows, matrix, stride of the matrix, K, columns, output, stride
            of the output)`, for rows without gaps and a matrix without gaps within its rows.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def lower(rows: Any, matrix: Any) -> Any:
        rows = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(rows))
        matrix = ir.ExternKernel.require_stride1(ir.ExternKernel.realize_input(matrix))
        shape = [rows.get_size()[0], matrix.get_size()[0]]
        layout = ir.FixedLayout(rows.get_device(), torch.float32, shape)
        inputs = [rows, matrix]
        render = functools.partial(_kernel, template(rows.get_dtype(), matrix.get_dtype()), inputs)
        buffer: Any = ir.CppTemplateBuffer
        return ir.TensorBox.create(buffer(layout, inputs, render, None, None))

    register_lowering(op, type_promotion_kind=None)(lower)


def _kernel(
    template: tuple[str, str],
    inputs: Sequence[Any],
    product: Any,
    flag_template_buffer_has_other_users: bool,
    epilogue_nodes: Sequence[Any],
) -> tuple[Any, Callable[[], str]]:
    """Return the kernel of a product, and a function that returns its source; Inductor names the last two arguments.

    Args:
        template: C++ source, and a kind of products in it.
        inputs: the rows and the matrix.
        product: the buffer of the product.
        flag_template_buffer_has_other_users: whether more than the fused operations read the product.
        epilogue_nodes: the fused operations.
    """
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
    from torch._inductor.utils import Placeholder, parallel_num_threads

    make: Any = CppTemplateKernel
    kernel = make(kernel_name=str(Placeholder.KERNEL_NAME), num_threads=parallel_num_threads())
    is_stored = flag_template_buffer_has_other_users or not epilogue_nodes
    return kernel, lambda: _source(kernel, template, inputs, product, is_stored, epilogue_nodes)


def _source(
    kernel: Any, template: tuple[str, str], inputs: Sequence[Any], product: Any, is_stored: bool, fused: Sequence[Any]
) -> str:
    """Return the C++ source of a kernel; `is_stored` is true if the product itself is a result."""
    (count, columns), (rows, matrix), (library, kind) = product.get_size(), inputs, template
    outputs = {"product": product} if is_stored else {}
    if fused:
        outputs["result"] = fused[-1]
    head = kernel.def_kernel(inputs={"rows": rows, "matrix": matrix}, outputs=outputs)
    buffer = "" if is_stored else kernel.define_stack_allocated_buffer("block", [count, COLUMNS])
    computed = product if is_stored else kernel.local_buffers["block"]
    text = KERNEL.format(
        library=library,
        kind=kind,
        head=head,
        threads=kernel.num_threads,
        buffer=buffer,
        columns=columns,
        block=COLUMNS,
        count=count,
        rows=kernel.index(rows, [0, 0]),
        matrix=kernel.index(matrix, ["n_start", 0]),
        stride=kernel.stride(matrix, 0),
        width=rows.get_size()[1],
        output="product[n_start]" if is_stored else "block[0]",
        output_stride=columns if is_stored else COLUMNS,
        fused=_fused_loops(kernel, product, computed, fused) if fused else "",
    )
    for placeholder, hook in kernel.render_hooks.items():
        text = text.replace(placeholder, hook())
    return text


def _fused_loops(kernel: Any, product: Any, computed: Any, fused: Sequence[Any]) -> str:
    """Return the loops of the fused operations over one block of columns, which is in `computed`."""
    from torch._inductor.codegen.cpp_gemm_template import gen_2d_view_of_epilogue_buf

    result, reindexers = gen_2d_view_of_epilogue_buf(fused[-1], product, [*fused], [], [None] * len(fused))
    is_whole = product.get_size()[1] % COLUMNS == 0  # a fixed number of columns makes loops without a rest
    end = f"n_start + {COLUMNS}" if is_whole else "n_end"
    to = kernel.slice_nd(result, [(), ("n_start", end)])
    if computed is product:
        block = kernel.slice_nd(product, [(), ("n_start", end)])
    else:
        block = computed if is_whole else kernel.slice_nd(computed, [(), (0, "n_end - n_start")])
    return str(kernel.store_output(to, block, product, [*fused], offsets=(0, "n_start"), reindexers=reindexers))
