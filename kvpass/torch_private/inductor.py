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
    # A rotary embedding at read is one long pointwise expression over the slots.  Below these thresholds Inductor
    # would write it to memory: a rotated copy of all slots.
    "realize_opcount_threshold": 200,
    "realize_acc_reads_threshold": 32,
    "realize_reads_threshold": 32,
}


FEWER_LAUNCHES = {
    # A step of one token is many small kernels, whose launches cost more than their work.  Independent kernels, such as
    # the rotations of query and key, become one.  Only generated Triton supports this.
    "combo_kernels": True,
}


KEEP_THE_ORDER = {
    # Inductor moves a computation to its first use.  Attention would then read the values after a merge has rewritten
    # one of them, and Inductor would copy all values to avoid this.
    "reorder_for_locality": False,
}


MOVES = ("-mmove-max=256", "-mstore-max=256")
"""g++ flags that copy an AVX2 vector in one piece.

Inductor loads integers by `memcpy` to an array on the stack, and the array as a vector.  By default g++ copies it in
halves on AMD processors.  A processor cannot forward two stores to one load, so every load stalls.
"""


def whole_vectors() -> dict[str, str]:
    """Return the Inductor settings that add `MOVES`, where the flags apply.

    They replace `cpp.march`, the only setting that passes flags on, and only if the user has not set it.
    """
    from torch._inductor import config

    fits = torch.backends.cpu.get_cpu_capability() == "AVX2"
    if not fits or getattr(config.cpp, "march", "") is not None or not _takes(MOVES):
        return {}
    return {"cpp.march": " ".join(["native", *MOVES])}


@functools.cache
def _takes(flags: tuple[str, ...]) -> bool:
    """Check whether Inductor's C++ compiler knows these flags."""
    compiler = cpp_compiler()
    if compiler is None:  # Inductor reports this when it needs the compiler
        return False
    return subprocess.run([compiler, *flags, "-E", "-x", "c++", os.devnull], capture_output=True).returncode == 0


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor uses, or None if none starts."""
    from torch._inductor import cpp_builder, exc

    try:
        compiler = str(cpp_builder.get_cpp_compiler())
        subprocess.run([compiler, "--version"], capture_output=True, check=True)
    except (exc.InvalidCxxCompiler, OSError, subprocess.CalledProcessError):
        return None
    return compiler


CHECKS_TOO_EARLY = torch.__version__ < "2.13"
"""Whether Inductor emits the check of a computed index before the index itself, which is invalid C++ (in 2.11)."""


def write_out(graph: fx.Graph, node: fx.Node, strides: Sequence[int | fx.Node]) -> fx.Node:
    """Add a node whose value Inductor writes to a buffer with these strides, to an aten graph.

    A strided view would force a buffer too, but it would apply to whatever strides Inductor chose.
    """
    from torch._inductor.inductor_prims import force_stride_order

    value = node.meta["val"]
    made = graph.call_function(force_stride_order, (node, list(strides)))
    made.meta["val"] = value.as_strided(value.shape, map_arg(tuple(strides), lambda stride: stride.meta["val"]))
    return made


def materialized(x: Tensor) -> Tensor:
    """Return the same numbers as a dense tensor that the compiler computes once and reads from memory.

    Otherwise the compiler recomputes pointwise expressions, such as the cosines of an embedding, in the innermost loop
    over slots, heads and dimensions.  Traceable, and runs eagerly.
    """
    from torch._inductor.inductor_prims import force_stride_order

    x = x.contiguous()
    if symbols(x):  # the compiler's strides are unknown then, and a strided view would apply to them
        forced: Tensor = force_stride_order(x, list(x.stride()))
        return forced
    return x.as_strided(x.shape, x.stride())


def l1_cache_bytes() -> int:
    """Return the bytes of a core's L1 data cache; the usual 32 KiB if torch does not know."""
    return int(_capabilities().get("l1d_cache_size", 0)) or 32 << 10


def dot_products() -> frozenset[torch.dtype]:
    """Return the half-precision dtypes with dot-product instructions here, which torch's libraries use."""
    known = _capabilities()
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    return frozenset(dtype for dtype, any_of in names.items() if any(known.get(name) for name in any_of))


def _capabilities() -> dict[str, Any]:
    """Return torch's facts about the processor; empty in older versions."""
    asked = getattr(torch.cpu, "get_capabilities", dict)
    return dict(asked())


def inductor(gm: fx.GraphModule, examples: Sequence[Any], patches: dict[str, Any]) -> Compiled:
    """Compile a graph with Inductor under the given configuration."""
    from torch._inductor.compile_fx import compile_fx

    with _tracing(examples) as inputs:
        run: Any = compile_fx(gm, inputs, config_patches=patches)
    if leading := [*gm.parameters(), *gm.buffers()]:  # which it puts before the arguments, see `exported_code`
        run.leading = leading
    return cast(Compiled, run)


@contextlib.contextmanager
def _tracing(examples: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the examples as a compiler expects them.

    Within Dynamo they stay as they are.  Outside of it fakes keep their mode, and real tensors become static fakes.
    Inductor's caches on disk work only with a shape environment, even an empty one.
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


def import_compiler() -> None:
    """Import the parts of Inductor that build C++ code, which a call of `torch.compile` imports later."""
    from torch._inductor import codecache, compile_fx, cpp_builder, cpu_vec_isa  # noqa: F401


def probe_vector_instructions() -> None:
    """Find out which vector instructions Inductor can use; it remembers them for the process."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list()


def inductor_seconds() -> tuple[float, float]:
    """Return the seconds that Inductor and its C++ compiler have taken in this process so far."""
    from torch._dynamo.utils import compilation_time_metrics as spent

    return sum(spent.get("compile_fx_inner", ())), sum(spent.get("compile_file", ()))


def inductor_mode(mode: str) -> dict[str, Any]:
    """Return the configuration of a torch.compile mode; raise RuntimeError for an unknown mode."""
    from torch._inductor import list_mode_options

    options: dict[str, Any] = list_mode_options(mode)
    return options


def inductor_options() -> set[str]:
    """Return the names of all Inductor settings."""
    from torch._inductor import config

    return set(config.get_config_copy())


def graph_pass(digest: bytes, rewrite: Callable[[fx.Graph], None]) -> Any:
    """Return a pass over Inductor's aten graph; `digest` becomes part of the cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> bytes:
            return digest

    return GraphPass()
