"""Recordings of compiled code, to run again on other arguments.

A recording describes memory by *bases*: zero, the tensors among the arguments, blocks of memory between kernels, and
the results of operators.  Each argument of a kernel is a base and an offset, so other arguments change nothing but the
bases.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.lowering.replay.launcher import launch
from kvpass.torch_private import generated_code

NOWHERE = 0  # the base of numbers, and of memory that is never replaced


@dataclasses.dataclass(frozen=True)
class ArgumentView:
    """A tensor in the memory of a base, `behind` bytes after the start of the base's tensor."""

    base: int
    behind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def in_base(base: int, behind: int, tensor: Tensor) -> ArgumentView:
        """Return a view with the properties of a tensor, at this offset of a base."""
        return ArgumentView(base, behind, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of the base's tensor."""
        at_once = not self.behind and tensor.dtype == self.dtype
        if at_once and tensor.shape == self.shape and tensor.stride() == self.strides:
            return tensor
        first = tensor.storage_offset() * tensor.element_size() + self.behind
        if tensor.dtype == self.dtype:
            return tensor.as_strided(self.shape, self.strides, first // self.dtype.itemsize)
        made = torch.empty(0, dtype=self.dtype, device="cpu")
        return made.set_(tensor.untyped_storage(), first // self.dtype.itemsize, self.shape, self.strides)


class MemoryMap:
    """The bases of one run.

    Attributes:
        tensors: the tensor of each base; addresses: the address at which each starts.
    """

    def __init__(self, count: int) -> None:
        self.tensors: list[Tensor | None] = [None] * count
        self.addresses = array("q", bytes(8 * count))

    def put(self, base: int, tensor: Tensor) -> None:
        """Set the tensor of a base."""
        self.tensors[base] = tensor
        self.addresses[base] = tensor.data_ptr()

    def find(self, what: Any) -> Any:
        """Return the tensor for a view, and anything else unchanged."""
        if not isinstance(what, ArgumentView):
            return what
        tensor = self.tensors[what.base]
        assert tensor is not None
        return what.of(tensor)


class ProgramPart(Protocol):
    """A part of a program that runs at once."""

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
        made: the bases of those results that are not written into arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[int]

    def settle(self, memory: MemoryMap, bases: Collection[int]) -> None:
        """Look up the tensors of bases that stay the same, once."""

        def found(what: Any) -> Any:
            return memory.find(what) if isinstance(what, ArgumentView) and what.base in bases else what

        self.args, self.kwargs = fx.node.map_aggregate((self.args, self.kwargs), found)

    def run(self, memory: MemoryMap) -> None:
        args = [self._found(memory, each) for each in self.args]
        results = self.function(*args, **{name: self._found(memory, each) for name, each in self.kwargs.items()})
        for base, result in zip(self.made, _tensors(results), strict=True) if self.made else ():
            memory.put(base, result)

    def _found(self, memory: MemoryMap, what: Any) -> Any:
        """Return an argument with tensors in place of views; lists of tensors are rare."""
        if isinstance(what, ArgumentView):
            return memory.find(what)
        return fx.node.map_aggregate(what, memory.find) if isinstance(what, (tuple, list)) else what


def _tensors(results: Any) -> Sequence[Tensor]:
    return (results,) if isinstance(results, Tensor) else results


@dataclasses.dataclass
class Program:
    """Compiled code for arguments of certain shapes, without its Python.

    Attributes:
        parts: the parts to run, in order.
        results: the results, with views in place of tensors.
        inputs: the number of tensors among the arguments, whose bases are 1 to `inputs`.
        blocks: for each base that is memory between kernels, its bytes.
        fresh: the blocks that hold results and get new memory in every run.
        kept: tensors that kernels read and that only the program may hold.
    """

    parts: list[ProgramPart]
    results: list[Any]
    inputs: int
    blocks: dict[int, int]
    fresh: frozenset[int]
    count: int
    kept: list[Tensor]

    def __post_init__(self) -> None:
        self.memory = MemoryMap(self.count)
        self._nothing: list[None] = [None] * self.inputs
        self._passing = {*range(self.inputs + 1, self.count)} - self.blocks.keys() | self.fresh
        lasting = self.blocks.keys() - self.fresh
        for base in lasting:
            self.memory.put(base, self._block(base))
        for part in self.parts:
            part.settle(self.memory, lasting)

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
            for base in self.fresh:
                memory.put(base, self._block(base))
            with generated_code.without_modes():
                for part in self.parts:
                    part.run(memory)
                return [memory.find(result) for result in self.results]
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Release all tensors that a run received or returned."""
        self.memory.tensors[1 : self.inputs + 1] = self._nothing
        for base in self._passing:
            self.memory.tensors[base] = None
