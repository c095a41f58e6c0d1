"""Run recordings of compiled code again on other arguments.

A recording describes memory by *bases*: zero, the tensors among the arguments, blocks of memory between kernels, and
the results of operators.  Each argument of a kernel is a base and an offset, so other arguments change only the bases.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.torch_private import generated_code

NO_BASE = 0  # the base of numbers, and of memory that is never replaced


@dataclasses.dataclass(frozen=True)
class ArgumentView:
    """A tensor in the memory of a base, `offset` bytes after the start of the base's tensor."""

    base: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def in_base(base: int, offset: int, tensor: Tensor) -> ArgumentView:
        """Return a view with the properties of a tensor, at this offset of a base."""
        return ArgumentView(base, offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def apply_to(self, tensor: Tensor) -> Tensor:
        """Return the view of the base's tensor."""
        same_memory = not self.offset and tensor.dtype == self.dtype
        if same_memory and tensor.shape == self.shape and tensor.stride() == self.strides:
            return tensor
        first_byte = tensor.storage_offset() * tensor.element_size() + self.offset
        if tensor.dtype == self.dtype:
            return tensor.as_strided(self.shape, self.strides, first_byte // self.dtype.itemsize)
        view = torch.empty(0, dtype=self.dtype, device="cpu")
        return view.set_(tensor.untyped_storage(), first_byte // self.dtype.itemsize, self.shape, self.strides)


class MemoryMap:
    """The bases of one run.

    Attributes:
        tensors: the tensor of each base.
        addresses: the address at which each tensor starts.
    """

    def __init__(self, count: int) -> None:
        self.tensors: list[Tensor | None] = [None] * count
        self.addresses = array("q", bytes(8 * count))

    def put(self, base: int, tensor: Tensor) -> None:
        """Set the tensor of a base."""
        self.tensors[base] = tensor
        self.addresses[base] = tensor.data_ptr()

    def find(self, argument: Any) -> Any:
        """Return the tensor of a view, and anything else unchanged."""
        if not isinstance(argument, ArgumentView):
            return argument
        tensor = self.tensors[argument.base]
        assert tensor is not None
        return argument.apply_to(tensor)


class ProgramPart(Protocol):
    """A part of a program that runs in one call."""

    def settle(self, memory: MemoryMap, bases: Collection[int]) -> None: ...
    def run(self, memory: MemoryMap) -> None: ...


class KernelCalls:
    """Consecutive kernel calls."""

    def __init__(self) -> None:
        self.calls, self.arguments = array("q"), array("q")
        self.count = 0

    def add(self, address: int, words: Sequence[tuple[int, int]]) -> None:
        """Add a call whose arguments are words, each a base and an offset."""
        self.calls.extend((address, len(self.arguments) // 2, len(words)))
        self.arguments.extend(part for word in words for part in word)
        self.count += 1

    def settle(self, memory: MemoryMap, bases: Collection[int]) -> None:
        """Do nothing: the launcher looks up bases."""

    def run(self, memory: MemoryMap) -> None:
        calls, arguments, bases = (words.buffer_info()[0] for words in (self.calls, self.arguments, memory.addresses))
        launch(calls, self.count, arguments, bases)


@dataclasses.dataclass
class OperatorCall:
    """A torch operator between kernels, such as a matrix product of a library.

    Attributes:
        function: the operator.
        args, kwargs: its arguments, with views in place of tensors.
        outputs: the bases of those results that are not written into arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[int]

    def settle(self, memory: MemoryMap, bases: Collection[int]) -> None:
        """Look up the tensors of bases that stay the same, once."""

        def lookup(argument: Any) -> Any:
            return memory.find(argument) if isinstance(argument, ArgumentView) and argument.base in bases else argument

        self.args, self.kwargs = fx.node.map_aggregate((self.args, self.kwargs), lookup)

    def run(self, memory: MemoryMap) -> None:
        args = [self._look_up(memory, arg) for arg in self.args]
        results = self.function(*args, **{name: self._look_up(memory, arg) for name, arg in self.kwargs.items()})
        for base, result in zip(self.outputs, _tensors(results), strict=True) if self.outputs else ():
            memory.put(base, result)

    def _look_up(self, memory: MemoryMap, argument: Any) -> Any:
        """Return an argument with tensors in place of views; lists of tensors are rare."""
        if isinstance(argument, ArgumentView):
            return memory.find(argument)
        return fx.node.map_aggregate(argument, memory.find) if isinstance(argument, (tuple, list)) else argument


def _tensors(results: Any) -> Sequence[Tensor]:
    return (results,) if isinstance(results, Tensor) else results


@dataclasses.dataclass
class Program:
    """Compiled code for arguments of certain shapes, without its Python.

    Attributes:
        parts: the parts to run, in order.
        results: the results, with views in place of tensors.
        inputs: the number of tensors among the arguments, whose bases are 1 to `inputs`.
        blocks: the bytes of each base that is memory between kernels.
        result_blocks: the blocks that hold results and get new memory in every run.
        count: the number of bases.
        held_tensors: tensors that kernels read and that only the program may hold.
    """

    parts: list[ProgramPart]
    results: list[Any]
    inputs: int
    blocks: dict[int, int]
    result_blocks: frozenset[int]
    count: int
    held_tensors: list[Tensor]

    def __post_init__(self) -> None:
        self.memory = MemoryMap(self.count)
        self._no_inputs: list[None] = [None] * self.inputs
        self._transient = {*range(self.inputs + 1, self.count)} - self.blocks.keys() | self.result_blocks
        permanent = self.blocks.keys() - self.result_blocks
        for base in permanent:
            self.memory.put(base, self._block(base))
        for part in self.parts:
            part.settle(self.memory, permanent)

    def _block(self, base: int) -> Tensor:
        return torch.empty(self.blocks[base], dtype=torch.uint8, device="cpu")

    def run(self, tensors: Sequence[Tensor], addresses: list[int]) -> list[Any]:
        """Return the results of the compiled code for these tensors; not thread-safe.

        Args:
            addresses: the address at which each tensor starts.
        """
        memory = self.memory
        memory.tensors[1 : self.inputs + 1] = tensors
        memory.addresses[1 : self.inputs + 1] = array("q", addresses)
        try:
            for base in self.result_blocks:
                memory.put(base, self._block(base))
            with generated_code.without_modes():
                for part in self.parts:
                    part.run(memory)
                return [memory.find(result) for result in self.results]
        finally:
            self._release()

    def _release(self) -> None:
        """Release all tensors that a run received or returned."""
        self.memory.tensors[1 : self.inputs + 1] = self._no_inputs
        for base in self._transient:
            self.memory.tensors[base] = None


COUNTS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The argument counts with which a function may be called; the first sufficient one is used.

Arguments are words, so the caller removes spare ones from the stack and the function never reads them.
"""
MOST_ARGUMENTS = COUNTS[-1]
MESSAGE_BYTES = 1024  # of an error's text
CALL_WORDS = 3  # words per call: address, index of its first argument, number of arguments


def source() -> str:
    """Return C++ code that calls functions whose arguments are all 64-bit words, pointers and numbers.

    An argument is two words: the index of a base and an offset from it.  An exception ends the calls and becomes a
    message, because no exception may pass through a caller that is not C++.
    """
    cases = "\n".join(f"      {'else ' * (i > 0)}if (call[2] <= {n}) {_call(n)};" for i, n in enumerate(COUNTS))
    return f"""
#include <cstdint>
#include <cstdio>
#include <exception>
typedef int64_t word;

static void launch_all(const word* calls, word count, const word* arguments, const word* bases) {{
  word a[{MOST_ARGUMENTS}] = {{}};
  for (const word* call = calls; call != calls + {CALL_WORDS} * count; call += {CALL_WORDS}) {{
    const word* values = arguments + 2 * call[1];
    for (word i = 0; i < call[2]; ++i) a[i] = bases[values[2 * i]] + values[2 * i + 1];
{cases}
  }}
}}

extern "C" int launch(const word* calls, word count, const word* arguments, const word* bases, char* message) {{
  try {{
    launch_all(calls, count, arguments, bases);
    return 0;
  }} catch (const std::exception& error) {{
    std::snprintf(message, {MESSAGE_BYTES}, "%s", error.what());
  }} catch (...) {{
    std::snprintf(message, {MESSAGE_BYTES}, "an exception of unknown type in a compiled kernel");
  }}
  return 1;
}}
"""


def _call(count: int) -> str:
    types, values = ", ".join(["word"] * count), ", ".join(f"a[{i}]" for i in range(count))
    return f"reinterpret_cast<void (*)({types})>(call[0])({values})"


@functools.cache
def _library() -> Callable[..., int]:
    launch = generated_code.cpp_library(source()).launch
    launch.argtypes, launch.restype = [*[ctypes.c_int64] * 4, ctypes.c_char_p], ctypes.c_int
    function: Callable[..., int] = launch
    return function


def launch(calls: int, count: int, arguments: int, bases: int) -> None:
    """Call functions of machine code, one after the other; other Python threads run meanwhile.

    Args:
        calls, arguments, bases: addresses of arrays of 64-bit words, as `source` reads them.
        count: the number of calls.

    Raises:
        RuntimeError: a function threw a C++ exception; the functions after it did not run.
    """
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    if _library()(calls, count, arguments, bases, message):
        raise RuntimeError(message.value.decode(errors="replace"))
