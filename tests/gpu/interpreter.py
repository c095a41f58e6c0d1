"""Run generated Triton modules on CPU tensors through Triton's interpreter, and record memory accesses.

Triton decides at import whether it interprets, so the interpreter is a separate process: `python -m
tests.gpu.interpreter` reads requests from its input and writes answers to its output, both pickled.
`Interpreter` starts a process and sends requests to it.

This module adds what the interpreter lacks: functions of `libdevice`, and products of bfloat16 numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
import struct
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import KVPassError
from tests.gpu import torch_private

NEAREST = 1.5 * 2**23  # added to a smaller float32 number, it leaves no bits for a fraction


class InterpreterError(KVPassError, RuntimeError):
    """The interpreter could not run a generated module; the text is the worker's traceback."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Memory accesses of one launch.

    Attributes:
        name: the kernel or the library's operator.
        read, written: distinct bytes.
        loaded, stored: bytes of these in inputs of the module, by the number of the input.
    """

    name: str
    read: int
    written: int
    loaded: dict[int, int]
    stored: dict[int, int]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Outputs of a module, its inputs after the run, and the traffic of each launch."""

    outputs: list[Any]
    inputs: list[Any]
    traffic: list[Traffic]


class Interpreter:
    """A process in which Triton interprets; a context manager, or closed when the program ends."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))  # the process can import the same modules
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-m", "tests.gpu.interpreter"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def run(self, source: str, inputs: Sequence[Any]) -> StepResult:
        """Run a generated module on copies of CPU tensors.

        Raises:
            InterpreterError: the module could not be run.
        """
        answer: StepResult = self._ask("module", source, list(inputs))
        return answer

    def call(self, path: str, *arguments: Any) -> Any:
        """Call a function "module:name" in the process, for example one that launches kernels on CPU tensors.

        Raises:
            InterpreterError: the function raised.
        """
        return self._ask("call", path, arguments)

    def _ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        _send(self.process.stdin, request)
        right, answer = _receive(self.process.stdout)
        if not right:
            raise InterpreterError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(pipe: Any, message: Any) -> None:
    data = pickle.dumps(message)
    pipe.write(struct.pack("q", len(data)) + data)
    pipe.flush()


def _receive(pipe: Any) -> Any:
    header = pipe.read(8)
    if len(header) < 8:
        raise InterpreterError("the interpreting process has ended")
    return pickle.loads(pipe.read(struct.unpack("q", header)[0]))


# -- inside the process ----------------------------------------------------------------------------------


class _Watch:
    """Collects the addresses of a launch's loads and stores."""

    def __init__(self) -> None:
        self.loads: list[Any] = []
        self.stores: list[Any] = []

    def note(self, into: list[Any], pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        into.append((pointers.data[mask.data.astype(bool)].ravel(), size))


_watch = _Watch()


def _prepare() -> None:
    """Patch the interpreter: add missing functions, and report memory accesses."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _watch.note(_watch.loads, pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _watch.note(_watch.stores, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = watched_load
    InterpreterBuilder.create_masked_store = watched_store
    InterpreterBuilder.create_dot = _dot
    torch_private.wrap_interpreted()
    _stub_inductor()


def _dot(self: Any, a: Any, b: Any, accumulator: Any, *_: Any) -> Any:
    """Multiply in the accumulator's precision, for operands of any dtype."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    product = np.matmul(_numbers(a), _numbers(b)).astype(accumulator.data.dtype)
    return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def _numbers(handle: Any) -> Any:
    """Return the values of a handle as float32; the interpreter stores bfloat16 as bits."""
    import numpy as np

    if str(handle.dtype.scalar) != "bf16":
        return handle.data.astype(np.float32)
    return (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class _Libdevice(types.ModuleType):
    """The functions of libdevice that Inductor calls, in Triton's language."""

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl

        special = {
            "tanh": lambda x: 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0,
            "pow": lambda x, y: tl.exp(y * tl.log(x)),
            "isnan": lambda x: x != x,
            "isinf": lambda x: tl.abs(x) == float("inf"),
            "log1p": lambda x: tl.log(1.0 + x),
            "expm1": lambda x: tl.exp(x) - 1.0,
            "nearbyint": lambda x: (x + NEAREST) - NEAREST,
            "trunc": lambda x: tl.where(x < 0, tl.ceil(x), tl.floor(x)),
        }
        return special[name] if name in special else getattr(tl, name)


def _stub_inductor() -> None:
    """Replace imports of generated modules that need a GPU."""
    import torch._inductor.async_compile as async_compile
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    replaced: list[tuple[Any, str, Any]] = [
        (async_compile.AsyncCompile, "triton", _loaded),
        (async_compile.AsyncCompile, "wait", lambda self, scope: None),
        (triton_helpers, "libdevice", _Libdevice("libdevice")),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        (torch._C._dynamo.guards, "_empty_strided_cuda", _empty),
        (torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext()),
        (torch.cuda, "set_device", lambda index: None),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    for name in ("pointwise", "reduction", "persistent_reduction", "user_autotune", "foreach"):
        setattr(triton_heuristics, name, _described)


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def _described(size_hints: Any = None, **meta: Any) -> Callable[[Any], _Kernel]:
    """Replace Inductor's decorators."""
    return lambda function: _Kernel(function, size_hints, meta)


def _loaded(self: Any, name: str, source: str, device_str: str = "cuda") -> _Kernel:
    """Replace `AsyncCompile.triton`: make a kernel from its source."""
    import linecache

    path = f"/kvpass/{name}.py"  # the interpreter looks up a function's source by its file
    namespace: dict[str, Any] = {"__name__": name, "__file__": path}
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    exec(compile(source, path, "exec"), namespace)
    return next(value for value in namespace.values() if isinstance(value, _Kernel))


ELEMENTS = 1 << 14
"""Elements for each program of a generated kernel: many, because the interpreter's time is per program."""


class _Kernel:
    """An interpreted kernel with the launch interface of generated code."""

    def __init__(self, function: Any, size_hints: Any, meta: dict[str, Any]) -> None:
        self.function, self.hints, self.meta = function, size_hints, meta

    def run(self, *arguments: Any, stream: Any = None, **_: Any) -> None:
        global _watch
        _watch = _Watch()
        signature = self.meta["triton_meta"]["signature"]
        constants = dict(self.meta["triton_meta"].get("constants", {}))
        names = [name for name, kind in signature.items() if kind != "constexpr" and name not in constants]
        given = dict(zip(names, arguments, strict=False))
        extra = arguments[len(names) :]
        blocks = {} if extra or self._is_custom() else self._blocks(signature, given)
        grid = tuple(extra) if self._is_custom() else self._grid(given, blocks)
        self.function[grid](**given, **constants, **blocks)
        _record.launched(self.meta["inductor_meta"]["kernel_name"], _watch)

    def _is_custom(self) -> bool:
        return bool(self.meta.get("custom_kernel"))

    def _blocks(self, signature: dict[str, str], given: dict[str, Any]) -> dict[str, int]:
        """Return large block sizes, so that reductions take few iterations."""
        wanted = [name for name, kind in signature.items() if kind == "constexpr" and name.endswith("BLOCK")]
        sizes = self._sizes(given)
        room, blocks = ELEMENTS, {}
        reduced = [n for name, n in sizes.items() if name.startswith("r")]
        inside = [_above(n) for n in reduced if not any(name.startswith("R") for name in wanted)]
        room = max(1, room // max(1, math.prod(inside)))
        for name in sorted(wanted, key=lambda name: not name.startswith("R")):
            blocks[name] = max(1, min(_above(sizes[name.removesuffix("BLOCK").lower()]), room))
            room = max(1, room // blocks[name])
        return blocks

    def _sizes(self, given: dict[str, Any]) -> dict[str, int]:
        """Return the size of each dimension, "x", "y", "r0_"; for a combo kernel the largest of its parts."""
        sizes = {name.removesuffix("numel"): int(n) for name, n in given.items() if name.endswith("numel")}
        for name, n in self._combined.items():
            dimension, of_one, _ = name.partition("numel_")
            if of_one and n is not None:
                sizes[dimension] = max(int(n), sizes.get(dimension, 1))
        return sizes

    @property
    def _combined(self) -> dict[str, Any]:
        meta: dict[str, Any] = self.meta["inductor_meta"].get("combo_grid_meta") or {}
        return meta

    def _grid(self, given: dict[str, Any], blocks: dict[str, int]) -> tuple[int, ...]:
        kind = self.meta["inductor_meta"]["grid_type"]
        if kind in ("SequentialComboKernelGrid", "RoundRobinComboKernelGrid"):
            return self._combined_grid(kind, blocks)
        if kind not in ("Grid1D", "Grid2D", "Grid3D"):
            raise NotImplementedError(f"a grid of kind {kind}")
        sizes = self._sizes(given)
        return tuple(-(-sizes[x] // blocks[f"{x.upper()}BLOCK"]) for x in "xyz"[: int(kind[4])])

    def _combined_grid(self, kind: str, blocks: dict[str, int]) -> tuple[int, ...]:
        """Return the grid of a combo kernel, whose parts run in sequence or interleaved."""
        meta, count = self._combined, self._combined["num_kernels"]
        if any(name.startswith("ynumel") for name in meta):
            raise NotImplementedError(f"a grid of kind {kind} in two dimensions")
        block = {**(meta["default_config"] or {}), **blocks}.get("XBLOCK", 1)
        programs = [-(-meta[f"xnumel_{i}"] // (1 if meta[f"no_x_dim_{i}"] else block)) for i in range(count)]
        return (sum(programs) if kind.startswith("Sequential") else max(programs) * count,)


def _above(number: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, number - 1).bit_length()


class _Record:
    """Traffic of a module's launches, and the inputs that they access."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.traffic: list[Traffic] = []
        self.spans = [(x.data_ptr(), x.data_ptr() + _extent(x)) if isinstance(x, Tensor) else (0, 0) for x in inputs]

    def launched(self, name: str, watch: _Watch) -> None:
        read, loaded = self._touched(watch.loads)
        written, stored = self._touched(watch.stores)
        self.traffic.append(Traffic(name, read, written, loaded, stored))

    def _touched(self, noted: list[Any]) -> tuple[int, dict[int, int]]:
        """Return the number of distinct bytes, and the bytes in each input."""
        import numpy as np

        by_size: dict[int, list[Any]] = {}
        for addresses, size in noted:
            by_size.setdefault(size, []).append(addresses)
        total, of_inputs = 0, dict[int, int]()
        for size, addresses in by_size.items():
            distinct = np.unique(np.concatenate(addresses))
            total += size * len(distinct)
            for i, (start, end) in enumerate(self.spans):
                inside = int(np.count_nonzero((distinct >= start) & (distinct < end)))
                if inside:
                    of_inputs[i] = of_inputs.get(i, 0) + size * inside
        return total, of_inputs

    def called(self, name: str, arguments: Sequence[Any], made: Sequence[Any]) -> None:
        """Record a library operator, which reads its arguments completely."""
        given, results = ([x for x in some if isinstance(x, Tensor)] for some in (arguments, made))
        whole = {i: x.nbytes for x in given for i, (a, b) in enumerate(self.spans) if a <= x.data_ptr() < b}
        read, written = (sum(x.nbytes for x in some) for some in (given, results))
        self.traffic.append(Traffic(name, read, written, whole, {}))


def _extent(x: Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    return (
        (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size() if x.numel() else 0
    )


_record = _Record([])


def _run_module(source: str, inputs: list[Any]) -> StepResult:
    global _record
    _record = _Record(inputs)
    namespace: dict[str, Any] = {"__name__": "generated", "__file__": "generated.py"}
    exec(compile(source, "generated.py", "exec"), namespace)
    namespace["extern_kernels"] = _Extern(namespace["extern_kernels"])
    namespace["device"] = lambda *args, **kwargs: torch.device("cpu")
    outputs = namespace["call"](list(inputs))
    return StepResult(list(outputs), inputs, _record.traffic)


class _Extern:
    """Inductor's names for library operators, recording reads and writes."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            _record.called(name, args, [kwargs.get("out", result)])
            return result

        return call


def _call_function(path: str, arguments: Any) -> Any:
    import importlib

    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def _serve() -> None:
    """Answer requests until the input ends."""
    pipe_in, pipe_out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of kernels must not mix with the answers
    _prepare()
    torch.set_num_threads(1)
    while True:
        try:
            kind, what, arguments = _receive(pipe_in)
        except InterpreterError:
            return
        try:
            with torch.no_grad():
                answer = _run_module(what, arguments) if kind == "module" else _call_function(what, arguments)
            _send(pipe_out, (True, answer))
        except Exception:
            _send(pipe_out, (False, traceback.format_exc()))


if __name__ == "__main__":
    # imported under its own name, so that pickled objects can be loaded there
    from tests.gpu import interpreter

    interpreter._serve()
