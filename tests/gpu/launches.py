"""Record the Triton launches of a function without launching: kernels with the sizes that it chose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.gpu import torch_private
from tests.gpu.binaries import Binary, compiled

_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32",
    torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
_ALIGNED = [["tt.divisibility", 16]]  # holds for torch's allocations; Triton specialises on multiples of 16


@dataclasses.dataclass(frozen=True)
class Launched:
    """One launch.

    Attributes:
        function: the kernel.
        grid: number of programs in each dimension.
        arguments: arguments by name, with tensors without data.
        warps, stages: launch options of Triton.
    """

    function: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    @property
    def programs(self) -> int:
        """Return the number of programs in all dimensions."""
        count = 1
        for size in self.grid:
            count *= size
        return count

    def binary(self, target: str) -> Binary:
        """Compile the kernel for these arguments.

        Raises:
            KernelError: the kernel does not compile.
        """
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.function.params):
            value = self.arguments[parameter.name]
            signature[parameter.name] = "constexpr" if parameter.is_constexpr else _kind(value)
            if parameter.is_constexpr:
                constants[parameter.name] = value
            elif isinstance(value, Tensor) or value % 16 == 0:
                attributes[(index,)] = _ALIGNED
        how = dict(num_warps=self.warps, num_stages=self.stages)
        return compiled(self.function, signature, constants, target, attributes=attributes, **how)


def _kind(value: Any) -> str:
    return _POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"


def launched(function: Callable[..., Any], *arguments: Any, **given: Any) -> list[Launched]:
    """Call a function on tensors of device "meta", and return its launches on a GPU."""
    with torch_private.recorded_launches() as noted:
        function(*arguments, **given)
    return [
        Launched(kernel, grid, names, options.get("num_warps", 4), options.get("num_stages", 3))
        for kernel, grid, names, options in noted
    ]
