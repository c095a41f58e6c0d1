"""Choose the program that serves given arguments."""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.lowering.replay.program import Program
from kvpass.lowering.replay.recording import record
from kvpass.torch_private import generated_code, inductor

MOST_PROGRAMS = 4  # of one piece of compiled code, for different shapes of arguments

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _shape(tensor: Tensor) -> Shape:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _is_plain(argument: Any) -> bool:
    """Check whether an argument is no tensor, or a plain strided tensor."""
    if not isinstance(argument, Tensor):
        return True
    return type(argument) in generated_code.PLAIN_TENSORS and argument.layout == torch.strided


class Replayed:
    """A replacement of compiled code that records the first run for each argument shape and repeats it later.

    Results get memory of their own in every run, as without a recording.  Memory between kernels is shared by the runs
    of a program, so a run in a second thread at the same time uses the compiled code itself.  So does code that a
    program cannot repeat.
    """

    def __init__(self, run: inductor.Compiled) -> None:
        self._run = run
        self._programs: dict[Any, Program | None] = {}
        self._last: _Served | None = None
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        if not self._lock.acquire(blocking=False):
            return self._run(*arguments)
        try:
            if self._last is None or not self._last.serves(arguments):
                self._last = _Served(arguments) if all(map(_is_plain, arguments)) else None
            return self._run(*arguments) if self._last is None else self._repeated(self._last, arguments)
        finally:
            self._lock.release()

    def _repeated(self, served: _Served, arguments: Sequence[Any]) -> Sequence[Any]:
        if served.key not in self._programs and sys.getprofile() is None:
            return self._recorded(served.key, arguments)
        program = self._programs.get(served.key)
        if program is None:
            return self._run(*arguments)
        return program.run(served.tensors_of(arguments), served.addresses)

    def _recorded(self, key: Any, arguments: Sequence[Any]) -> Sequence[Any]:
        results, program = record(self._run, arguments)
        while len(self._programs) >= MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        self._programs[key] = program
        return results


class _Served:
    """The last arguments, without references that keep them alive.

    Attributes:
        key: the properties that a program depends on: shapes, numbers, and inference mode.
        addresses: the address of each tensor among the last arguments.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        tensors = [index for index, each in enumerate(arguments) if isinstance(each, Tensor)]
        numbers = [index for index, each in enumerate(arguments) if not isinstance(each, Tensor)]
        self.tensors_of, self._numbers_of = _picking(tensors), _picking(numbers)
        self._numbers = self._numbers_of(arguments)
        given = self.tensors_of(arguments)
        self._shapes = [_shape(each) for each in given]
        self._seen = [weakref.ref(each) for each in given]
        self.addresses = _addresses(given)
        self._infers = torch.is_inference_mode_enabled()
        self.key = (tuple(self._shapes), self._numbers, self._infers)

    def serves(self, arguments: Sequence[Any]) -> bool:
        """Check whether the program for the earlier arguments serves these.

        A tensor that is the same object at the same address still has its shape.
        """
        if self._numbers_of(arguments) != self._numbers or torch.is_inference_mode_enabled() != self._infers:
            return False
        given = self.tensors_of(arguments)
        before, self.addresses = self.addresses, _addresses(given)
        moved = before != self.addresses
        changed = [
            index
            for index, each in enumerate(given)
            if self._seen[index]() is not each or (moved and before[index] != self.addresses[index])
        ]
        if any(_shape(given[index]) != self._shapes[index] for index in changed):
            return False
        for index in changed:
            self._seen[index] = weakref.ref(given[index])
        return True


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _picking(indices: list[int]) -> Any:
    """Return a function that returns the arguments at some indices as a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda arguments: tuple(arguments[index] for index in indices)
