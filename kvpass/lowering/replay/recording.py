"""Run compiled code once, record its calls, and repeat them for arguments of the same shapes.

During a recording, functions that record their arguments replace the kernels and the allocator in the modules that
Inductor wrote.  A mode of torch's dispatcher sees all other computation.  Inductor forgets modules that it wrote, or
writes none in Python, so the recording also checks every C function that is called: a function of a library that is
neither Python's nor torch's must be one of the replaced ones.  So a recording holds everything that ran, or there is no
program.

A block of memory is reused once only the recording holds it.  A program runs in the order of its recording, so two
tensors in one block are never alive at the same time in any later run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.lowering.replay.program import (
    MOST_ARGUMENTS,
    NO_BASE,
    ArgumentView,
    KernelCalls,
    OperatorCall,
    Program,
    ProgramPart,
)
from kvpass.torch_private import dynamo, generated_code, inductor

log = logging.getLogger("kvpass.replay")

UNREPEATABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
MOST_PROGRAMS = 4  # of one piece of compiled code, for different shapes of arguments


def record(run: inductor.Compiled, arguments: Sequence[Any]) -> tuple[Sequence[Any], Program | None]:
    """Run compiled code; return its results and a program of the run, or None if no program can be made.

    Args:
        arguments: its arguments; tensors among them must be plain strided tensors.
    """
    recording = _Recording([argument for argument in arguments if isinstance(argument, Tensor)])
    with dynamo.compile_lock(), recording.listening():  # else threads would replace each other's replacements
        results = run(*arguments)
    return results, recording.program(results)


class _Recording:
    """The calls recorded so far.

    Attributes:
        refusal: why the calls cannot be repeated by a program; "" if they can.
        blocks: memory between kernels, a tensor of bytes for each base.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        self.inputs = inputs
        self.refusal = ""
        self.parts: list[ProgramPart] = []
        self.kept: list[Tensor] = []
        self._results: list[Tensor] = []
        self.blocks: dict[int, Tensor] = {}
        self.count = len(inputs) + 1
        self._base_of = {id(each): base for base, each in enumerate(inputs, 1)}
        self._in_storage: dict[int, list[tuple[int, Tensor]]] = {}
        for base, each in enumerate(inputs, 1):
            self._register_storage(base, each)
        self._thread, self._allocating = threading.get_ident(), False
        self._allocator = generated_code.allocator()

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def _register_storage(self, base: int, tensor: Tensor) -> None:
        self._in_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((base, tensor))

    def _new_base(self, tensor: Tensor) -> int:
        base = self.count
        self.count += 1
        self._register_storage(base, tensor)
        self._base_of[id(tensor)] = base
        return base

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record the calls of this thread inside the context."""
        globals_ = [(scope, name, scope[name]) for scope in generated_code.generated_scopes() for name in list(scope)]
        exchanged = []
        try:
            for scope, name, value in globals_:
                replacement = self._replacement(name, value)
                if replacement:
                    exchanged.append((scope, name, value))
                    scope[name] = replacement
            with generated_code.watching_dispatch(self._on_operator), generated_code.watching_c_calls(self._on_c_call):
                yield
        finally:
            for scope, name, value in exchanged:
                scope[name] = value

    def _replacement(self, name: str, value: Any) -> Callable[..., Any] | None:
        """Return the replacement of a global of a generated module, or None to keep the global."""
        if name == generated_code.ALLOCATOR:
            return functools.partial(self._allocate, value)
        library = generated_code.kernel_library(value)
        return functools.partial(self._launch, value, library) if library else None

    def listens(self) -> bool:
        """Return whether to record the current call: not one of another thread or of the recording itself."""
        return threading.get_ident() == self._thread and not self._allocating

    def _on_c_call(self, caller: types.FrameType, function: Any) -> None:
        """Refuse the recording if a C function computes or allocates without being recorded."""
        foreign = generated_code.is_foreign(function)
        recorded = _Recording._launch if foreign else _Recording._allocate
        if (foreign or function is self._allocator) and caller.f_code is not recorded.__code__:
            self._refuse(f"{function} is called from {caller.f_code.co_name}")

    def _launch(self, kernel: Callable[..., Any], library: str, *args: Any) -> Any:
        if self.listens() and not self.refusal:
            self._record_kernel(library, args)
        return kernel(*args)

    def _record_kernel(self, library: str, args: Sequence[Any]) -> None:
        words = [self._word(arg) for arg in args]
        if not 0 < len(args) <= MOST_ARGUMENTS or None in words:
            self._refuse(f"a kernel has {len(args)} arguments, or one of an unknown kind")
            return
        if not self.parts or not isinstance(self.parts[-1], KernelCalls):
            self.parts.append(KernelCalls())
        part = self.parts[-1]
        assert isinstance(part, KernelCalls)
        part.add(_address(library), [word for word in words if word is not None])

    def _word(self, arg: Any) -> tuple[int, int] | None:
        """Return a kernel's argument as a base and an offset, or None if a program cannot express it."""
        if isinstance(arg, Tensor):
            view = self.view_of(arg)
            return (view.base, view.offset) if isinstance(view, ArgumentView) else None
        return (NO_BASE, arg) if type(arg) is int else None

    def view_of(self, tensor: Tensor) -> ArgumentView | None:
        """Return a tensor as a view of the base that holds its memory; None if several bases may."""
        base = self._base_of.get(id(tensor))
        if base is not None:
            return ArgumentView.in_base(base, 0, tensor)
        if tensor.layout != torch.strided:
            self.kept.append(tensor)  # opaque memory of a library, such as a packed weight
            return ArgumentView(NO_BASE, 0, tensor.dtype, tuple(tensor.shape), ())
        found = self._in_storage.get(tensor.untyped_storage().data_ptr(), [])
        if len(found) > 1 and tensor.numel():
            return None  # arguments that share memory in this run may not do so in the next
        if not found or not tensor.numel():
            self.kept.append(tensor)  # a constant from before the recording
            return ArgumentView.in_base(NO_BASE, tensor.data_ptr(), tensor)
        base, first = found[0]
        return ArgumentView.in_base(base, tensor.data_ptr() - first.data_ptr(), tensor)

    def _allocate(self, allocate: Callable[..., Tensor], shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        """Allocate memory for the generated code, in an unused block or a new one."""
        if not self.listens() or 0 in shape:
            return allocate(shape, strides, dtype)
        self._allocating = True
        try:
            size = dtype.itemsize * (1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))
            base, block = self._block(size)
            return ArgumentView(base, 0, dtype, shape, strides).apply_to(block)
        finally:
            self._allocating = False

    def _block(self, size: int) -> tuple[int, Tensor]:
        for base, block in reversed(self.blocks.items()):
            if block.numel() == size and not generated_code.is_shared(block):
                return base, block
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
        base = self._new_base(block)
        self.blocks[base] = block
        return base, block

    def _on_operator(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Record an operator that has run; views are recorded where they are used."""
        if self.listens() and not self.refusal and not function.is_view:
            self._record_operator(function, args, kwargs, results)

    def _record_operator(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        recorded = fx.node.map_aggregate((args, kwargs), self._as_view)
        if any(tag in function.tags for tag in UNREPEATABLE):
            self._refuse(f"the results of {function} depend on data")
        elif generated_code.writes_results(function):
            self.parts.append(OperatorCall(function, *recorded, outputs=[]))
        else:
            outputs = list(results) if isinstance(results, (tuple, list)) else [results]
            if not all(isinstance(output, Tensor) and output.layout == torch.strided for output in outputs):
                self._refuse(f"{function} returns something other than strided tensors")
                return
            self._results += outputs  # so that no later tensor reuses their memory
            self.parts.append(OperatorCall(function, *recorded, outputs=[self._new_base(output) for output in outputs]))

    def _as_view(self, argument: Any) -> Any:
        """Return a tensor as a view, and any other argument unchanged; refuse the recording if that is impossible."""
        if not isinstance(argument, Tensor):
            return argument
        view = self.view_of(argument)
        if view is None or view.base == NO_BASE:
            if view is None:
                self._refuse("arguments share memory, which they may not do in the next run")
            return argument
        return view

    def program(self, results: Sequence[Any]) -> Program | None:
        """Return a program of the recorded calls, or None if not all calls were recorded."""
        views = [self._as_view(result) for result in results]
        if self.refusal:
            log.info("a compiled step keeps Inductor's Python: %s", self.refusal)
            return None
        fresh = {result.base for result in views if isinstance(result, ArgumentView)} & self.blocks.keys()
        sizes = {base: block.numel() for base, block in self.blocks.items()}
        return Program(self.parts, views, len(self.inputs), sizes, frozenset(fresh), self.count, self.kept)


def _address(library: str) -> int:
    kernel = getattr(ctypes.CDLL(library), generated_code.KERNEL)
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    assert address is not None
    return address


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
        # A program writes to memory of its own, so a second thread runs the compiled code instead.
        if not self._lock.acquire(blocking=False):
            return self.compiled(*arguments)
        try:
            if self._last_key is None or not self._last_key.serves(arguments):
                self._last_key = _ArgumentKey(arguments) if all(map(_is_plain, arguments)) else None
            return self.compiled(*arguments) if self._last_key is None else self._repeat(self._last_key, arguments)
        finally:
            self._lock.release()

    def _repeat(self, key: _ArgumentKey, arguments: Sequence[Any]) -> Sequence[Any]:
        # A recording needs Python's one profiling hook, which a profiler may hold.
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
