"""Collect the private names of torch and triton that emission without a GPU needs.

docs/testing.md lists the tested releases. The package imports nothing from here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Properties:
    """Properties of a GPU that Inductor reads, with an H100's values."""

    name, type, gcnArchName, uuid = "a GPU that is not there", "cuda", "", "none"
    major, minor, warp_size, multi_processor_count = 9, 0, 32, 132
    total_memory, L2_cache_size, regs_per_multiprocessor = 80 << 30, 50 << 20, 65536
    max_threads_per_multi_processor, max_threads_per_block = 2048, 1024
    shared_memory_per_block, shared_memory_per_block_optin, shared_memory_per_multiprocessor = 49152, 232448, 233472
    clock_rate, memory_clock_rate, memory_bus_width = 1980000, 2619000, 5120


def _constant(value: Any) -> staticmethod[..., Any]:
    return staticmethod(lambda *args, **kwargs: value)


def _interface() -> type:
    """Return a device interface that answers queries but runs nothing."""
    from torch._dynamo.device_interface import CudaInterface

    worker = dict(get_device_properties=_constant(_Properties), current_device=_constant(0), set_device=_constant(None))
    answers = dict(
        Worker=type("Worker", (), worker), is_available=_constant(True), current_device=_constant(0),
        device_count=_constant(1), get_compute_capability=_constant(90), get_device_properties=_constant(_Properties),
        is_triton_capable=_constant(True), raise_if_triton_unavailable=_constant(None),
        is_bf16_supported=_constant(True), synchronize=_constant(None), get_raw_stream=_constant(0),
    )  # fmt: skip
    return type("NoCuda", (CudaInterface,), answers)


def _driver() -> Any:
    """Return a Triton driver that names a target and launches nothing."""
    from triton.backends.compiler import GPUTarget

    shared = dict(max_shared_mem=_Properties.shared_memory_per_block_optin, multiprocessor_count=132, warpSize=32)
    answers = dict(
        utils=type("utils", (), dict(get_device_properties=_constant(shared))),
        get_current_target=_constant(GPUTarget("cuda", 90, 32)), get_current_device=_constant(0),
        get_active_torch_device=_constant(torch.device("cuda", 0)), get_current_stream=_constant(0),
        get_device_interface=_constant(None),
    )  # fmt: skip
    return type("NoDriver", (), answers)()


def _forget_answers() -> None:
    """Clear torch's caches about the machine's devices."""
    from torch._inductor import utils
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    remembered = [*vars(_triton).values(), *vars(utils).values(), inspect.unwrap(DeviceProperties.create)]
    for function in remembered:
        clear = getattr(function, "cache_clear", None)
        if callable(clear):
            clear()


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Make Inductor and Triton believe in one GPU inside the context; nothing can run on it."""
    import triton
    from torch._dynamo import device_interface

    device_interface.init_device_reg()
    registered, names = device_interface.device_interfaces, ("cuda", "cuda:0")
    before = {name: registered.get(name) for name in names}
    answers = dict(
        get_device_properties=_Properties, get_device_capability=(9, 0), current_device=0, device_count=1,
        is_bf16_supported=True,
    )  # fmt: skip
    real = {name: getattr(torch.cuda, name) for name in answers}
    active = dict(vars(triton.runtime.driver))
    try:
        _forget_answers()
        for name in names:
            device_interface.register_interface_for_device(name, _interface())
        for name, answer in answers.items():
            setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
        triton.runtime.driver.set_active(_driver())
        with torch.inference_mode(False), torch.no_grad(), _WithoutGuards():
            yield
    finally:
        vars(triton.runtime.driver).update(active)
        for name, function in real.items():
            setattr(torch.cuda, name, function)
        for name, interface in before.items():
            registered.pop(name, None) if interface is None else registered.update({name: interface})
        _forget_answers()


class _WithoutGuards(TorchFunctionMode):
    """Replaces tensor methods that would switch to the tensor's device, which does not exist."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].device.type == "cuda" and func in _BY_OPERATORS:
            return _BY_OPERATORS[func](*args)
        if (
            func is not torch.device and _no_fakes()
        ):  # Inductor folds constants and the rewrite places weights, both with real tensors on the CPU
            args = tuple("cpu" if _elsewhere(arg) else arg for arg in args)
            kwargs = {name: "cpu" if _elsewhere(arg) else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _elsewhere(device: Any) -> bool:
    return isinstance(device, (torch.device, str)) and str(device).startswith("cuda")


def _no_fakes() -> bool:
    from torch._guards import active_fake_mode

    return active_fake_mode() is None


def _getitem(x: Tensor, index: Any) -> Tensor:
    """Compute x[index] by operators, without boolean tensors."""
    index = index if isinstance(index, tuple) else (index,)
    counted = sum(part is not None and part is not Ellipsis for part in index)
    dim, chosen = 0, {}
    for part in index:
        if part is Ellipsis:
            dim += x.ndim - counted - dim + sum(p is None for p in index[: index.index(Ellipsis)])
        elif part is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(part, slice):
            x, dim = _sliced(x, dim, part), dim + 1
        elif isinstance(part, int):
            x, counted = torch.ops.aten.select.int(x, dim, part), counted - 1
        else:
            chosen[dim], dim = part if isinstance(part, Tensor) else torch.tensor(part, device=x.device), dim + 1
    if not chosen:
        return x
    picked: Tensor = torch.ops.aten.index.Tensor(x, [chosen.get(d) for d in range(max(chosen) + 1)])
    return picked


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else torch.clone(x, memory_format=torch.contiguous_format)


_BY_OPERATORS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__invert__: torch.ops.aten.bitwise_not.default,
    Tensor.copy_: torch.ops.aten.copy_.default,
    Tensor.contiguous: _contiguous,
}


def _sliced(x: Tensor, dim: int, part: slice) -> Tensor:
    if part == slice(None):
        return x
    sliced: Tensor = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
    return sliced


_NOTHING_MEASURED = {"fx_graph_cache": False, "shape_padding": False}
"""Settings that stop Inductor from timing padded operands of products, which needs a GPU."""


class _Done(BaseException):
    """Carries generated code out of the compiler; not an Exception, so that no handler wraps it."""


def generated(rewritten_gm: fx.GraphModule, examples: Sequence[Any], patches: dict[str, Any]) -> str:
    """Return the Python module that Inductor generates for a graph of fake GPU tensors; inside `pretended_gpu`."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    generate = GraphLowering.codegen

    def stop(self: Any) -> Any:
        raise _Done(generate(self)[0])

    GraphLowering.codegen = stop  # type: ignore[method-assign]
    try:
        with config.patch({**_NOTHING_MEASURED, **patches}):
            compile_fx(rewritten_gm, list(examples))
    except _Done as done:
        code = done.args[0]
        return str(getattr(code, "value", code))
    finally:
        GraphLowering.codegen = generate  # type: ignore[method-assign]
    raise AssertionError("Inductor generated no code")


def fake_gpu_mode() -> Any:
    """Return a mode in which tensors on a GPU have shapes and no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(x: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def on_gpu(fake: Tensor) -> Tensor:
    """Return a fake tensor on the GPU with the mode, strides and symbolic sizes of another."""
    with fake.fake_mode:  # type: ignore[attr-defined]
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cuda")
    return made


def tuned(source: str, name: str, folder: str) -> Any:
    """Return a kernel from generated source, with the configurations that Inductor would try.

    It works inside `pretended_gpu`.

    Returns:
        Inductor's autotuner: `fn`, `configs`, `triton_meta`, `inductor_meta`.
    """
    path = Path(folder) / f"{name[:60]}.py"
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return next(value for value in vars(module).values() if hasattr(value, "triton_meta"))


def cubin(
    function: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    attributes: Any,
    capability: int,
    **options: Any,
) -> tuple[str, bytes, int]:
    """Return a kernel's PTX for one GPU, its machine code as ptxas assembles it, and its shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature=signature, constexprs=known, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return built.asm["ptx"], built.asm["cubin"], int(built.metadata.shared)


def wrap_interpreted() -> None:
    """Let torch 2.11 call an interpreted kernel directly, because it has no wrapper for one."""
    torch.library.wrap_triton = lambda kernel: kernel


def assembler(capability: int) -> str:
    """Return the path of the ptxas that triton uses for a GPU; triton has an older and a newer one."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(capability).path)


def disassembler() -> str:
    """Return the path of nvdisasm."""
    from triton import knobs

    return str(knobs.nvidia.nvdisasm.path)


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[tuple[Any, tuple[int, ...], dict[str, Any], dict[str, Any]]]]:
    """Record launches of Triton kernels instead of launching: function, grid, arguments by name, and options."""
    from triton.runtime.jit import JITFunction

    noted: list[tuple[Any, tuple[int, ...], dict[str, Any], dict[str, Any]]] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        noted.append((self, tuple(grid), arguments, options))

    run, wrap = JITFunction.run, torch.library.wrap_triton
    JITFunction.run = note
    torch.library.wrap_triton = lambda kernel: kernel
    try:
        yield noted
    finally:
        JITFunction.run = run
        torch.library.wrap_triton = wrap
