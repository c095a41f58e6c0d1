"""Running compiled code once, and noting what it did.

While it runs, the kernels in the modules that Inductor wrote are exchanged for functions that note what they get, and
so is what these modules allocate memory with.  A mode of torch's dispatcher sees everything else that computes.  That
nothing ran past both is not taken for granted, as Inductor forgets modules that it wrote, or writes none in Python:
every function in C that is called is looked at, and one of a library that is neither Python's nor torch's must have
been exchanged.  So what is noted is all that ran, or there is no program.

A block of memory is used again once nothing but the recording holds it.  As a program runs in the order of its
recording, that is as right at every later run: two tensors in one block did not live at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.lowering.replay.launcher import MOST
from kvpass.lowering.replay.program import NOWHERE, ArgumentView, KernelCalls, OperatorCall, Program, ProgramPart
from kvpass.torch_private import dynamo, generated_code, inductor

UNREPEATABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def record(run: inductor.Compiled, arguments: Sequence[Any]) -> tuple[Sequence[Any], Program | None]:
    """What compiled code gives, and a program of it; None if there can be none.

    Args:
        arguments: tensors among them are numbers in memory with nothing around them.
    """
    recording = _Recording([each for each in arguments if isinstance(each, Tensor)])
    with dynamo.one_at_a_time(), recording.listening():  # or one thread would exchange what another has exchanged
        results = run(*arguments)
    return results, recording.program(results)


class _Recording:
    """What has run so far.

    Attributes:
        refused: whether something ran that a program cannot say.
        blocks: memory between kernels, each a tensor of bytes and its base.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        self.inputs = inputs
        self.refused = False
        self.parts: list[ProgramPart] = []
        self.kept: list[Tensor] = []
        self._held: list[Tensor] = []
        self.blocks: dict[int, Tensor] = {}
        self.count = len(inputs) + 1
        self._base_of = {id(each): base for base, each in enumerate(inputs, 1)}
        self._in_storage: dict[int, list[tuple[int, Tensor]]] = {}
        for base, each in enumerate(inputs, 1):
            self._begins_in(base, each)
        self._thread, self._apart = threading.get_ident(), False
        self._allocator = generated_code.allocator()

    def _begins_in(self, base: int, tensor: Tensor) -> None:
        """Know a base again by its storage."""
        self._in_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((base, tensor))

    def _new_base(self, tensor: Tensor) -> int:
        base = self.count
        self.count += 1
        self._begins_in(base, tensor)
        self._base_of[id(tensor)] = base
        return base

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, what this thread runs is noted."""
        found = [(scope, name, scope[name]) for scope in generated_code.generated_scopes() for name in list(scope)]
        exchanged = []
        try:
            for scope, name, value in found:
                instead = self._instead(name, value)
                if instead:
                    exchanged.append((scope, name, value))
                    scope[name] = instead
            with generated_code.watched(self._saw), generated_code.calls_watched(self._called):
                yield
        finally:
            for scope, name, value in exchanged:
                scope[name] = value

    def _instead(self, name: str, value: Any) -> Callable[..., Any] | None:
        """What takes the place of a global of a generated module; None if it stays."""
        if name == generated_code.ALLOCATOR:
            return functools.partial(self._allocate, value)
        library = generated_code.kernel_library(value)
        return functools.partial(self._launch, value, library) if library else None

    def listens(self) -> bool:
        """Whether what runs now is to be noted: another thread's is not, and our own allocations are not."""
        return threading.get_ident() == self._thread and not self._apart

    def _called(self, caller: types.FrameType, function: Any) -> None:
        """A function in C is called from Python: what computes or allocates past the recording ends it."""
        if generated_code.is_foreign(function):
            self.refused = self.refused or caller.f_code is not _Recording._launch.__code__
        elif function is self._allocator:
            self.refused = self.refused or caller.f_code is not _Recording._allocate.__code__

    def _launch(self, kernel: Callable[..., Any], library: str, *given: Any) -> Any:
        if self.listens() and not self.refused:
            self._note_kernel(library, given)
        return kernel(*given)

    def _note_kernel(self, library: str, given: Sequence[Any]) -> None:
        words = [self._word(each) for each in given]
        if not 0 < len(given) <= MOST or None in words:
            self.refused = True
            return
        if not self.parts or not isinstance(self.parts[-1], KernelCalls):
            self.parts.append(KernelCalls())
        part = self.parts[-1]
        assert isinstance(part, KernelCalls)
        part.add(_address(library), [word for word in words if word is not None])

    def _word(self, given: Any) -> tuple[int, int] | None:
        """What a kernel gets, as a base and a distance; None if a program cannot say it."""
        if isinstance(given, Tensor):
            view = self.view(given)
            return (view.base, view.behind) if isinstance(view, ArgumentView) else None
        return (NOWHERE, given) if type(given) is int else None

    def view(self, tensor: Tensor) -> ArgumentView | None:
        """A tensor that the code has, said by the base whose memory it is in; None if it may be of several."""
        base = self._base_of.get(id(tensor))
        if base is not None:
            return ArgumentView.in_base(base, 0, tensor)
        if tensor.layout != torch.strided:
            self.kept.append(tensor)  # a library's own, such as a packed weight: nobody looks into it
            return ArgumentView(NOWHERE, 0, tensor.dtype, tuple(tensor.shape), ())
        found = self._in_storage.get(tensor.untyped_storage().data_ptr(), [])
        if len(found) > 1 and tensor.numel():
            return None  # arguments that share memory now need not do so the next time
        if not found or not tensor.numel():
            self.kept.append(tensor)  # a constant, which was there before
            return ArgumentView.in_base(NOWHERE, tensor.data_ptr(), tensor)
        base, whole = found[0]
        return ArgumentView.in_base(base, tensor.data_ptr() - whole.data_ptr(), tensor)

    def _allocate(self, allocate: Callable[..., Tensor], shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        """Memory of the generated code's own, in a block that nothing holds any more, or in a new one."""
        if not self.listens() or 0 in shape:
            return allocate(shape, strides, dtype)
        self._apart = True
        try:
            size = dtype.itemsize * (1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))
            base, block = self._block(size)
            return ArgumentView(base, 0, dtype, shape, strides).of(block)
        finally:
            self._apart = False

    def _block(self, size: int) -> tuple[int, Tensor]:
        for base, block in reversed(self.blocks.items()):
            if block.numel() == size and not generated_code.is_shared(block):
                return base, block
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
        base = self._new_base(block)
        self.blocks[base] = block
        return base, block

    def _saw(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        """An operator has run that is no kernel: a view is seen where it is used."""
        if self.listens() and not self.refused and not function.is_view:
            self._note_operator(function, args, kwargs, results)

    def _note_operator(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        given = fx.node.map_aggregate((args, kwargs), self._said)
        if any(tag in function.tags for tag in UNREPEATABLE):
            self.refused = True
        elif generated_code.writes_results(function):
            self.parts.append(OperatorCall(function, *given, made=[]))
        else:
            made = list(results) if isinstance(results, (tuple, list)) else [results]
            if not all(isinstance(each, Tensor) and each.layout == torch.strided for each in made):
                self.refused = True
                return
            self._held += made  # so that no later tensor gets its memory and is taken for it
            self.parts.append(OperatorCall(function, *given, made=[self._new_base(each) for each in made]))

    def _said(self, what: Any) -> Any:
        if not isinstance(what, Tensor):
            return what
        view = self.view(what)
        if view is None or view.base == NOWHERE:
            self.refused = self.refused or view is None
            return what
        return view

    def program(self, results: Sequence[Any]) -> Program | None:
        """What was noted, if it is all that ran."""
        said = [self._said(result) for result in results]
        if self.refused:
            return None
        fresh = {result.base for result in said if isinstance(result, ArgumentView)} & self.blocks.keys()
        sizes = {base: block.numel() for base, block in self.blocks.items()}
        return Program(self.parts, said, len(self.inputs), sizes, frozenset(fresh), self.count, self.kept)


def _address(library: str) -> int:
    """Where a generated kernel's machine code is."""
    kernel = getattr(ctypes.CDLL(library), generated_code.KERNEL)
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    assert address is not None
    return address
