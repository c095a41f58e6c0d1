"""Private names of fake tensors, and tracing with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.torch_private.symbolic_shapes import SymbolicSizes, symbols


def is_fake(value: Any) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)


def propagate(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Run a function on example values, some of which may be real tensors such as constants."""
    from torch._subclasses.fake_tensor import FakeTensor

    modes = [arg.fake_mode for arg in args if isinstance(arg, FakeTensor)]
    real = [isinstance(arg, Tensor) and not isinstance(arg, FakeTensor) for arg in args]
    if not modes or not any(real):
        return function(*args)
    return function(*(modes[0].from_tensor(a, static_shapes=True) if r else a for a, r in zip(args, real, strict=True)))


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Compute with real tensors inside the context, even while Dynamo is tracing."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        yield


@contextlib.contextmanager
def fake_mode(open_sizes: SymbolicSizes | None = None) -> Iterator[Callable[[Any], Any]]:
    """Enter a mode in which tensors have no data; yield a function that makes static fakes of real tensors.

    Args:
        open_sizes: the dynamic sizes of the fakes that a function traced inside receives.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = open_sizes.mode if open_sizes else FakeTensorMode()
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
