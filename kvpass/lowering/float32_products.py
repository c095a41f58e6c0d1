"""Multiply matrices of 16 bits in float32, on a CPU whose libraries have no products of 16 bits.

Without AVX-512 torch multiplies bfloat16 and float16 by its own loops, at a sixth of the speed of float32, and a
prompt takes six times as long.  Here the weights are converted to float32 in blocks and multiplied by the library, so
there is no float32 copy of a large matrix in memory.  Sums are in float32, and a result is rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvpass.torch_private import generated_code, processor

BLOCK = 1 << 22
"""The most weights that are converted at a time, which take 16 MiB."""

MIN_ROWS = 4
"""The fewest rows for which conversion takes less time than torch's loops, which read each weight once for each row.

On two cores with AVX2, in bfloat16 and with weights of SmolLM2-135M from memory, conversion takes 2.2 of the loops'
time with one row and 1.1 with three.  It takes 0.90 with four, 0.55 with eight and 0.20 with 64.
"""

FEW_ROWS = 128
"""The number of rows up to which x W' is computed as (W x')': 0.65 of the time for 32 rows, 1.1 for 1,024."""

torch.library.define("kvpass::float32_product", "(Tensor rows, Tensor matrix, Tensor? bias) -> Tensor")


@torch.library.impl("kvpass::float32_product", "CPU")
def float32_product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows [R, K] with a matrix [K, N], with sums in float32.

    Args:
        rows: the rows, of 16 bits.
        matrix: the matrix, of 16 or 8 bits.
        bias: numbers that are added before rounding, of a shape that can be expanded to [R, N]; or None.

    Returns:
        The products [R, N] in the dtype of the rows.
    """
    count, columns = rows.shape[0], matrix.shape[1]
    product = rows.new_empty(count, columns)
    with generated_code.without_modes():
        added = None if bias is None else bias.float().expand(count, columns)
        if count < MIN_ROWS and matrix.dtype == rows.dtype and added is None:
            return torch.mm(rows, matrix, out=product)
        converted, block = rows.float(), max(1, BLOCK // max(1, matrix.shape[0]))
        for start in range(0, columns, block):
            part = slice(start, start + block)
            weights = matrix[:, part].float()  # [K, n]
            sums = torch.mm(weights.T, converted.T).T if count <= FEW_ROWS else torch.mm(converted, weights)
            product[:, part] = sums if added is None else sums.add_(added[:, part])
    return product


@functools.partial(torch.library.register_fake, "kvpass::float32_product")
def _fake(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], matrix.shape[1])


def is_faster(dtype: torch.dtype) -> bool:
    """Return whether products of many rows in a dtype are faster in float32 on this processor."""
    return dtype in (torch.bfloat16, torch.float16) and dtype not in processor.library_products()


class InFloat32(TorchFunctionMode):
    """Multiply in float32 where that is faster, in graphs that run uncompiled and without gradients."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a linear layer whose operands are plain tensors."""
        if func is torch.nn.functional.linear and not types and not torch.is_grad_enabled():
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W' + b for x [..., K] and weights [N, K]."""
    same = x.dtype == weight.dtype and x.device.type == weight.device.type == "cpu"
    if not same or weight.ndim != 2 or not is_faster(x.dtype) or torch.is_autocast_enabled("cpu"):
        return torch.nn.functional.linear(x, weight, bias)
    product: Tensor = torch.ops.kvpass.float32_product(x.reshape(-1, x.shape[-1]), weight.T, bias)
    return product.view(*x.shape[:-1], weight.shape[0])
