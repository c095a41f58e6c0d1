"""Read the kernels, launches and allocations of a module that Inductor generated."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterator

import torch


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of the generated module, in the order of the code.

    Attributes:
        name: name of a generated kernel, or of a library operator such as `extern_kernels.mm`.
        generated: whether it is a kernel of the module.
        arguments: source of the arguments.
    """

    name: str
    generated: bool
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A memory allocation of the generated module."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def kernels(source: str) -> dict[str, str]:
    """Return the Triton source of each kernel, by name."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and _called(node.value) == "async_compile.triton":
            assert isinstance(node.value, ast.Call)
            assert isinstance(node.targets[0], ast.Name)
            text = node.value.args[1]
            assert isinstance(text, ast.Constant)
            found[node.targets[0].id] = str(text.value)
    return found


def launches(source: str) -> list[Launch]:
    """Return every launch of the module's `call`."""
    ours, found = kernels(source), []
    for call in _calls(source):
        name = _called(call)
        arguments = tuple(ast.unparse(argument) for argument in call.args)
        if name.endswith(".run") and name[:-4] in ours:
            found.append(Launch(name[:-4], True, arguments))
        elif name.startswith(("extern_kernels.", "torch.ops.", "aten.", "inductor_ops.")):
            found.append(Launch(name, False, arguments))
    return found


def allocations(source: str) -> list[Allocation]:
    """Return every allocation of the module's `call` on the GPU."""
    found = []
    for call in _calls(source):
        if _called(call) == "empty_strided_cuda":
            shape, _, dtype = call.args
            name = ast.unparse(dtype).removeprefix("torch.")
            found.append(Allocation(tuple(ast.literal_eval(shape)), getattr(torch, name)))
    return found


def _calls(source: str) -> Iterator[ast.Call]:
    """Yield the calls within the function `call`, in the order of the code."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name == "call":
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            yield from sorted(calls, key=lambda node: (node.lineno, node.col_offset))
            return


def _called(node: ast.expr) -> str:
    """Return the name of a called function, empty for anything else."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""
