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
    """Return whether an argument is a plain strided tensor, or no tensor."""
    if not isinstance(argument, Tensor):
        return True
    return type(argument) in generated_code.PLAIN_TENSORS and argument.layout == torch.strided


class Replayed:
    """A replacement of compiled code that records the first run for each argument shape and repeats it later.

    Results get new memory in every run, as without a recording.  The runs of a program share memory between kernels, so
    a concurrent run in a second thread uses the compiled code itself.  So does code that a program cannot repeat.
    """

    def __init__(self, run: inductor.Compiled) -> None:
        self.compiled = run
        self._programs: dict[Any, Program | None] = {}
        self._last_key: _ArgumentKey | None = None
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        if not self._lock.acquire(blocking=False):
            return self.compiled(*arguments)
        try:
            if self._last_key is None or not self._last_key.serves(arguments):
                self._last_key = _ArgumentKey(arguments) if all(map(_is_plain, arguments)) else None
            return self.compiled(*arguments) if self._last_key is None else self._repeat(self._last_key, arguments)
        finally:
            self._lock.release()

    def _repeat(self, key: _ArgumentKey, arguments: Sequence[Any]) -> Sequence[Any]:
        if key.key not in self._programs and sys.getprofile() is None:
            return self._record(key.key, arguments)
        program = self._programs.get(key.key)
        if program is None:
            return self.compiled(*arguments)
        return program.run(key.tensors_of(arguments), key.addresses)

    def _record(self, key: Any, arguments: Sequence[Any]) -> Sequence[Any]:
        results, program = record(self.compiled, arguments)
        while len(self._programs) >= MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        self._programs[key] = program
        return results


class _ArgumentKey:
    """The last arguments, without references that keep them alive.

    Attributes:
        key: the properties that a program depends on: shapes, numbers, and inference mode.
        addresses: the address of each tensor among the last arguments.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        tensors = [index for index, argument in enumerate(arguments) if isinstance(argument, Tensor)]
        numbers = [index for index, argument in enumerate(arguments) if not isinstance(argument, Tensor)]
        self.tensors_of, self._numbers_of = _getter(tensors), _getter(numbers)
        self._numbers = self._numbers_of(arguments)
        current = self.tensors_of(arguments)
        self._shapes = [_shape(argument) for argument in current]
        self._last_tensors = [weakref.ref(argument) for argument in current]
        self.addresses = _addresses(current)
        self._inference_mode = torch.is_inference_mode_enabled()
        self.key = (tuple(self._shapes), self._numbers, self._inference_mode)

    def serves(self, arguments: Sequence[Any]) -> bool:
        """Return whether the program for the earlier arguments serves these.

        A tensor that is the same object at the same address still has its shape.
        """
        if self._numbers_of(arguments) != self._numbers or torch.is_inference_mode_enabled() != self._inference_mode:
            return False
        current = self.tensors_of(arguments)
        earlier, self.addresses = self.addresses, _addresses(current)
        moved = earlier != self.addresses
        changed = [
            index
            for index, tensor in enumerate(current)
            if self._last_tensors[index]() is not tensor or (moved and earlier[index] != self.addresses[index])
        ]
        if any(_shape(current[index]) != self._shapes[index] for index in changed):
            return False
        for index in changed:
            self._last_tensors[index] = weakref.ref(current[index])
        return True


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _getter(indices: list[int]) -> Any:
    """Return a function that returns the arguments at some indices as a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda arguments: tuple(arguments[index] for index in indices)
