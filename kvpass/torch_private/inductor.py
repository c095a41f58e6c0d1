"""Private names of Inductor: its settings, and compiling a graph with it."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg

from kvpass.torch_private.fake_tensors import is_fake
from kvpass.torch_private.symbolic_shapes import symbols

Compiled = Callable[..., Sequence[Any]]


Boxed = Callable[[list[Any]], Sequence[Any]]


FUSE_INTO_REDUCTIONS = {
    # A rotary embedding at read is one long pointwise expression over the slots.  Past these thresholds
    # Inductor would write it to memory, which is the copy of the slots that there must never be.
    "realize_opcount_threshold": 200,
    "realize_acc_reads_threshold": 32,
    "realize_reads_threshold": 32,
}


FEWER_LAUNCHES = {
    # A step of one token is many small kernels, whose launches cost more than their work: those that do not
    # depend on each other, such as the rotations of query and key, are made one.  Generated Triton alone has this.
    "combo_kernels": True,
}


KEEP_THE_ORDER = {
    # Inductor moves a computation to where it is used first: attention would read the values after a merge has
    # rewritten one of them, and for that they would all be copied.
    "reorder_for_locality": False,
}


MOVES = ("-mmove-max=256", "-mstore-max=256")
"""Flags under which g++ copies a vector of AVX2 in one piece.

Inductor loads whole numbers by `memcpy` to an array on the stack, and the array as a vector.  g++ copies it in halves
by default on AMD's processors, and a processor cannot forward two stores to one load: it waits, at every load.
"""


def whole_vectors() -> dict[str, str]:
    """Settings of Inductor that add `MOVES`, where they apply and the user has not set that architecture: its own have
    no room for flags but this."""
    from torch._inductor import config

    fits = torch.backends.cpu.get_cpu_capability() == "AVX2"
    if not fits or getattr(config.cpp, "march", "") is not None or not _takes(MOVES):
        return {}
    return {"cpp.march": " ".join(["native", *MOVES])}


@functools.cache
def _takes(flags: tuple[str, ...]) -> bool:
    """Whether Inductor's compiler of C++ knows these flags."""
    compiler = cpp_compiler()
    if compiler is None:  # Inductor says so when it needs one
        return False
    return subprocess.run([compiler, *flags, "-E", "-x", "c++", os.devnull], capture_output=True).returncode == 0


def cpp_compiler() -> str | None:
    """Return the compiler of C++ that Inductor takes, None if it finds none that starts."""
    from torch._inductor import cpp_builder, exc

    try:
        compiler = str(cpp_builder.get_cpp_compiler())
        subprocess.run([compiler, "--version"], capture_output=True, check=True)
    except (exc.InvalidCxxCompiler, OSError, subprocess.CalledProcessError):
        return None
    return compiler


CHECKS_TOO_EARLY = torch.__version__ < "2.13"
"""Whether Inductor writes the check of a place that is counted before the place itself, which is no C++ (in 2.11)."""


def write_out(graph: fx.Graph, node: fx.Node, strides: Sequence[int | fx.Node]) -> fx.Node:
    """A new node with the value of one of an operator graph, which Inductor writes to a buffer with these strides.

    A strided view would have it written too, but over whatever strides Inductor chose for it.
    """
    from torch._inductor.inductor_prims import force_stride_order

    value = node.meta["val"]
    made = graph.call_function(force_stride_order, (node, list(strides)))
    made.meta["val"] = value.as_strided(value.shape, map_arg(tuple(strides), lambda stride: stride.meta["val"]))
    return made


def materialized(x: Tensor) -> Tensor:
    """The same numbers, dense, which the compiler computes once and reads from memory; traced, and run as it is.

    It would else compute pointwise expressions, such as the cosines of an embedding, anew wherever they are
    read: in the innermost loop over slots, heads and dimensions.
    """
    from torch._inductor.inductor_prims import force_stride_order

    x = x.contiguous()
    if symbols(x):  # a strided view is of whatever strides the compiler chose, which are others then
        forced: Tensor = force_stride_order(x, list(x.stride()))
        return forced
    return x.as_strided(x.shape, x.stride())


def l1_cache_bytes() -> int:
    """Bytes of a core's first data cache; the usual 32 KiB where torch does not know."""
    return int(_capabilities().get("l1d_cache_size", 0)) or 32 << 10


def dot_products() -> frozenset[torch.dtype]:
    """The dtypes of half precision that this processor has dot products of, which torch's libraries use."""
    known = _capabilities()
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    return frozenset(dtype for dtype, any_of in names.items() if any(known.get(name) for name in any_of))


def _capabilities() -> dict[str, Any]:
    """What torch knows of the processor; older versions do not tell."""
    asked = getattr(torch.cpu, "get_capabilities", dict)
    return dict(asked())


def inductor(gm: fx.GraphModule, examples: Sequence[Any], patches: dict[str, Any]) -> Compiled:
    """Compile with Inductor under the given configuration."""
    from torch._inductor.compile_fx import compile_fx

    with _tracing(examples) as inputs:
        return cast(Compiled, compile_fx(gm, inputs, config_patches=patches))


@contextlib.contextmanager
def _tracing(examples: Sequence[Any]) -> Iterator[list[Any]]:
    """The examples as a compiler expects them: within Dynamo as they are, outside of it as static fakes, or as the
    fakes that they are already.

    Inductor's caches on disk serve only what is compiled with an environment of shapes, even if it stays empty.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if TracingContext.try_get() is not None:
        yield list(examples)
        return
    made = next((e.fake_mode for e in examples if is_fake(e)), None)
    if made is not None:
        with tracing(TracingContext(made)):
            yield list(examples)
        return
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        yield [mode.from_tensor(e, static_shapes=True) if isinstance(e, Tensor) else e for e in examples]


def inductor_seconds() -> tuple[float, float]:
    """Seconds that Inductor has taken in this process so far, and of the C++ compiler that it starts."""
    from torch._dynamo.utils import compilation_time_metrics as spent

    return sum(spent.get("compile_fx_inner", ())), sum(spent.get("compile_file", ()))


def inductor_mode(mode: str) -> dict[str, Any]:
    """The configuration behind a mode of torch.compile; raises RuntimeError for an unknown one."""
    from torch._inductor import list_mode_options

    options: dict[str, Any] = list_mode_options(mode)
    return options


def inductor_options() -> set[str]:
    """The names of all of Inductor's settings."""
    from torch._inductor import config

    return set(config.get_config_copy())


def graph_pass(digest: bytes, rewrite: Callable[[fx.Graph], None]) -> Any:
    """A pass over the graph of aten's operators that Inductor lowers; `digest` is put into the key of its caches."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> bytes:
            return digest

    return GraphPass()
