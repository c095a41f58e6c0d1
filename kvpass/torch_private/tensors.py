"""Use private names of tensors: subclasses, views, shared memory, and fake tensors with tracing."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.torch_private.symbolic_shapes import SymbolicSizes, symbols

METADATA_METHODS = frozenset(
    [
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr",
        "type", "get_device", "has_names", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
        "is_inference", "is_same_size", "is_pinned", "is_shared", "_is_view", "untyped_storage",
        "is_conj", "is_neg", "_is_zerotensor",
        "__len__", "__repr__", "__hash__", "__format__", "__dir__",
    ]
)  # fmt: skip
"""Tensor methods that read only metadata such as shape and dtype.

torch versions differ in which ones they call on a tensor subclass.  2.11 calls them while Dynamo inspects the inputs
of a graph, before it reports that it compiles.
"""


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, which may be fake, share one storage."""
    return storage_number(one) == storage_number(other)


def storage_number(tensor: Tensor) -> int:
    """Return a number of a tensor's storage, which tensors with the same storage have too."""
    return int(tensor.untyped_storage()._cdata)


def write_count(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements in row-major order, for any dtype."""
    here = tensor.detach().cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.nbytes)


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Treat tensor subclasses as plain tensors inside the context."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def without_torch_functions() -> contextlib.AbstractContextManager[None]:
    """Disable `__torch_function__` of tensor subclasses and of function modes, such as a default device, inside.

    Inside of `without_torch_function`, Dynamo dispatches on a mode again, so a traced `__torch_function__` recurses
    without end.
    """
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def with_torch_function() -> contextlib.AbstractContextManager[None]:
    """Enable `__torch_function__` of subclasses inside, also where Dynamo has disabled it around a graph."""
    context: contextlib.AbstractContextManager[None] = torch._C._EnableTorchFunction()
    return context


def is_wrapper(value: Any) -> bool:
    """Return whether a tensor's class wraps other tensors, as quantised weights do.

    Dynamo does not look into the operations of such a class.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def inner_tensors(wrapper: Any) -> tuple[dict[str, Tensor], Any]:
    """Return a wrapper's tensors by name, and the other values that its class needs to make it again."""
    names, context = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}, context


def inner_names(value: Any) -> list[str]:
    """Return the dotted names of the tensors in a wrapper, in the order in which compiled code takes them.

    Any other value has none.
    """
    if not is_wrapper(value):
        return []
    inner, _ = inner_tensors(value)
    names: list[str] = []
    for name, part in inner.items():
        names += [f"{name}.{deeper}" for deeper in inner_names(part)] or [name]
    return names


def strided_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors in a wrapper, at any depth, or a plain tensor itself, without sparse ones."""
    if not is_wrapper(tensor):
        return [tensor] if tensor.layout == torch.strided else []
    return [part for inner in inner_tensors(tensor)[0].values() for part in strided_tensors(inner)]


def map_inner_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a wrapper around `function` of each inner tensor, at any depth; for a plain tensor its result."""
    if not is_wrapper(value):
        return function(value)
    inner, context = inner_tensors(value)
    parts = {name: map_inner_tensors(function, part) for name, part in inner.items()}
    return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())


def is_distributed(value: Any) -> bool:
    """Return whether a tensor is a part of a tensor that several processes share."""
    distributed = sys.modules.get("torch.distributed.tensor")  # which makes them
    return distributed is not None and isinstance(value, distributed.DTensor)


def was_inlined(value: Any) -> bool:
    """Return whether Dynamo traces through the `__torch_function__` of a tensor's class.

    Dynamo's graphs then have a plain tensor.
    """
    plain = (Tensor.__torch_function__, torch.nn.Parameter.__torch_function__)
    return isinstance(value, Tensor) and type(value).__torch_function__ not in plain and not is_wrapper(value)


def as_plain(value: Tensor) -> Tensor:
    """Return the same data as a plain Tensor."""
    with without_torch_function():
        return value.as_subclass(Tensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another one; torch.compile guards on this."""
    return tensor._is_view()


def is_fake(value: Any) -> bool:
    """Return whether a value is a fake tensor, which has no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def propagate(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on example values, some of which may be real tensors such as constants."""
    modes = [arg.fake_mode for arg in args if is_fake(arg)]
    if not modes:
        return function(*args)
    real = [isinstance(arg, Tensor) and not is_fake(arg) for arg in args]
    with modes[0] as mode:  # the function may make tensors
        return function(*(mode.from_tensor(x, static_shapes=True) if r else x for x, r in zip(args, real, strict=True)))


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Compute with real tensors inside the context, even while Dynamo is tracing."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        yield


@contextlib.contextmanager
def fake_mode(dynamic_sizes: SymbolicSizes | None = None) -> Iterator[Callable[[Any], Any]]:
    """Enter a mode in which tensors have no data; yield a function that makes static fakes of real tensors.

    Args:
        dynamic_sizes: the dynamic sizes of the fakes that a function traced inside receives.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = dynamic_sizes.mode if dynamic_sizes else FakeTensorMode()
    with torch.inference_mode(False), torch.no_grad(), mode:
        yield lambda x: mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) and not is_fake(x) else x


def trace(function: Callable[..., Any], examples: Sequence[Any]) -> fx.GraphModule:
    """Trace a function into an aten graph; call inside `fake_mode` with its tensors or sizes.

    Symbolic examples need Python's dispatcher, without which some operators read the numbers behind dynamic sizes; see
    `CompiledParts`.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    if not any(map(symbols, examples)):
        return make_fx(function)(*examples)
    with enable_python_dispatcher():
        return make_fx(function)(*examples)


class UnwrappedSubclasses:
    """Convert the arguments of one graph from tensor subclasses to the tensors that the graph expects.

    Dynamo traces through the `__torch_function__` of some classes, a handle's among them: their tensors are plain
    tensors in the graph.  In that case it turns `__torch_function__` off around the graph, for all tensors.  But
    quantized weights that wrap tensors define their operations in `__torch_function__`, and the graph's operations rely
    on them.  So the runtime turns it on again inside, and passes tensors of the traced classes as plain tensors.
    """

    def __init__(self, handles: Iterable[int] = ()) -> None:
        """Prepare the conversion; `handles` are the indices of arguments that are handles and never reach the graph."""
        self._handles = set(handles)
        self._inlined: list[int] | None = None

    def __call__(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with tensors of classes that Dynamo traced through as plain tensors.

        The argument indices are found once, as Dynamo guards on the classes.
        """
        if self._inlined is None:
            given = enumerate(arguments)
            self._inlined = [index for index, x in given if index not in self._handles and was_inlined(x)]
        if not self._inlined:
            return arguments
        result = list(arguments)
        for index in self._inlined:
            result[index] = as_plain(result[index])
        return tuple(result)
