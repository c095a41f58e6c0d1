"""Use private names of Inductor: its settings, and compiling a graph, or its parts one by one without its wrappers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import os
import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.errors import KVPassWarning
from kvpass.torch_private.symbolic_shapes import expression, symbols
from kvpass.torch_private.tensors import inner_names, is_distributed, is_fake, is_wrapper, share_memory
from kvpass.versions import untested_version

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

NO_SIZE_CHECKS = {
    # For static sizes: with symbols, torch 2.15 defines some of them only beside these checks.
    # Without these checks in Python a step of 30 layers takes up to a millisecond less.  Dynamo compares the sizes and
    # strides of weights in each call, a `DecodeLoop` before it repeats steps, and slots have the sizes of their layout.
    "size_asserts": False,
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


def vector_move_flags() -> dict[str, str]:
    """Return the Inductor settings that add `MOVES`, where the flags apply.

    They replace `cpp.march`, the only setting that passes flags on, and only if the user has not set it.
    """
    from torch._inductor import config

    fits = torch.backends.cpu.get_cpu_capability() == "AVX2"
    if not fits or getattr(config.cpp, "march", "") is not None or not _compiler_accepts(MOVES):
        return {}
    return {"cpp.march": " ".join(["native", *MOVES])}


def targets_this_processor() -> bool:
    """Return whether Inductor compiles C++ for all instructions of this processor, as it does by default."""
    from torch._inductor import config

    march = getattr(config.cpp, "march", None)
    return march is None or march.split()[:1] == ["native"]


@functools.cache
def _compiler_accepts(flags: tuple[str, ...]) -> bool:
    """Return whether Inductor's C++ compiler knows these flags."""
    compiler = cpp_compiler()
    if compiler is None:  # Inductor reports this when it needs the compiler
        return False
    return subprocess.run([compiler, *flags, "-E", "-x", "c++", os.devnull], capture_output=True).returncode == 0


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor uses, or None if none starts."""
    from torch._inductor import cpp_builder

    try:
        compiler = str(cpp_builder.get_cpp_compiler())
        subprocess.run([compiler, "--version"], capture_output=True, check=True)
    except (RuntimeError, OSError, subprocess.CalledProcessError):  # Inductor's own error is a RuntimeError
        return None
    return compiler


CHECKS_TOO_EARLY = torch.__version__ < "2.13"
"""True if Inductor emits the check of a computed index before the index itself, which is invalid C++ (in 2.11)."""


def to_buffer(x: Tensor) -> Tensor:
    """Return the same numbers in a dense buffer, to which Inductor writes them; traceable.

    A strided view would force a buffer too, but it would apply to the strides that Inductor chose.
    """
    from torch._inductor.inductor_prims import force_stride_order

    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, size * strides[0])
    return cast(Tensor, force_stride_order(x, strides))


def materialize(x: Tensor) -> Tensor:
    """Return the same numbers as a dense tensor that the compiler computes once and reads from memory.

    Otherwise the compiler recomputes pointwise expressions, such as the cosines of an embedding, in the innermost loop
    over slots, heads and dimensions.  Traceable, and runs eagerly.
    """
    from torch._inductor.inductor_prims import force_stride_order

    x = x.contiguous()
    if symbols(x):  # the compiler's strides are unknown then, and a strided view would apply to them
        return cast(Tensor, force_stride_order(x, list(x.stride())))
    return x.as_strided(x.shape, x.stride())


def inductor(gm: fx.GraphModule, examples: Sequence[Any], patches: dict[str, Any]) -> Compiled:
    """Compile a graph with Inductor under the given configuration."""
    from torch._inductor.compile_fx import compile_fx

    with _without_mixed_warning(), _tracing(examples) as inputs:
        run: Any = compile_fx(gm, inputs, config_patches=patches)
    if leading := [*gm.parameters(), *gm.buffers()]:  # which it puts before the arguments, see `exported_code`
        run.leading = leading
    return cast(Compiled, run)


def outside_of_traces() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which graphs are compiled separately from the graph that Dynamo traces."""
    from torch._guards import tracing

    return tracing(None)


@contextlib.contextmanager
def _tracing(examples: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the examples as a compiler expects them.

    Within Dynamo they stay unchanged.  Outside of it fakes keep their mode, and real tensors become static fakes.
    Inductor's caches on disk work only with a shape environment, even an empty one.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if TracingContext.try_get() is not None:
        yield list(examples)
        return
    result = next((e.fake_mode for e in examples if is_fake(e)), None)
    if result is not None:
        with tracing(TracingContext(result)):
            yield list(examples)
        return
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        yield [mode.from_tensor(e, static_shapes=True) if isinstance(e, Tensor) else e for e in examples]


@contextlib.contextmanager
def _without_mixed_warning() -> Iterator[None]:
    """Leave out the compiler's warning of mixed half precisions.

    Scales of codes are bfloat16 in models of float16 too, and all arithmetic is in float32.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")
        yield


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

    return dict(list_mode_options(mode))


def inductor_options() -> set[str]:
    """Return the names of all Inductor settings."""
    from torch._inductor import config

    return set(config.get_config_copy())


GRAPH_PASS = "post_grad_custom_pre_pass"
"""The setting of Inductor that takes the function of `graph_pass`."""


def graph_pass(digest: bytes, rewrite: Callable[[fx.Graph], None]) -> Any:
    """Return a pass over Inductor's aten graph; `digest` becomes part of the cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> bytes:
            return digest

    return GraphPass()


NEEDS_THE_WHOLE = (
    "cpp_wrapper", "fx_wrapper", "freezing", "aot_inductor_mode.compile_standalone", "triton.cudagraphs",
)  # fmt: skip
"""Inductor settings under which a graph is compiled as a whole: with them parts are untested, or not faster."""


def allows_parts(patches: dict[str, Any]) -> bool:
    """Return whether the configuration and these patches have every setting of `NEEDS_THE_WHOLE`, and enable none."""
    from torch._inductor import config

    now = config.get_config_copy()
    return not any(patches.get(name, now.get(name, True)) for name in NEEDS_THE_WHOLE)


class WithLeading:
    """Compiled code whose first arguments are the tensors of a module."""

    def __init__(self, run: Any, leading: Sequence[Tensor]) -> None:
        self.__wrapped__, self.leading = run, list(leading)

    def __call__(self, arguments: list[Any]) -> Any:
        return self.__wrapped__(*arguments)


class _OnInnerTensors:
    """Call compiled code with the plain tensors inside its arguments, which must be wrapped like the examples.

    torch's own wrapper flattens every argument in each call, which takes longer than a small product of matrices.
    """

    def __init__(self, run: Boxed, examples: Sequence[Any]) -> None:
        self._run = run
        self._getters = [operator.attrgetter(*names) if (names := inner_names(x)) else None for x in examples]

    def __call__(self, arguments: list[Any]) -> Any:
        plain = [*itertools.chain.from_iterable(map(_inner, self._getters, arguments))]
        arguments.clear()  # the code frees each argument after its last use
        return self._run(plain)


def _inner(getter: Callable[[Any], Any] | None, argument: Any) -> Sequence[Any]:
    inner = argument if getter is None else getter(argument)
    return inner if isinstance(inner, tuple) else (inner,)


@dataclasses.dataclass(frozen=True)
class CompiledParts:
    """The compiler of parts of one graph, each as a separate graph.

    Attributes:
        examples: the graph's arguments, as fake tensors and symbolic sizes.
        mode: the fake tensor mode of the examples.
    """

    examples: list[Any]
    mode: Any

    def compile(
        self, module: fx.GraphModule, operands: Sequence[Any], patches: dict[str, Any]
    ) -> tuple[Boxed, list[Any]] | None:
        """Compile a part with Inductor.

        Returns:
            The compiled function, which empties the list of arguments that it gets, and fakes of its results, with the
            strides that Inductor chose.  None if the part returns anything but plain tensors and sizes, or if the code
            or its wrappers are of an unknown kind.
        """
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx

        result, views = self._results(module, operands)
        if not all(isinstance(value, (Tensor, torch.SymInt)) and not is_wrapper(value) for value in result):
            return None
        with tracing(TracingContext(self.mode)):  # AOTAutograd writes to it
            run: Any = compile_fx(module, operands, config_patches=patches)
        leading = [*module.parameters(), *module.buffers()]
        subclasses = [value for value in (*operands, *leading) if is_wrapper(value)]
        wrappers, code = _unwrap(run, bool(subclasses))
        if code is None or len(code.output_strides or ()) != len(result):
            return None
        outputs_with_strides = zip(result, views, code.output_strides, strict=True)
        given = [value if view else self._strided(value, strides) for value, view, strides in outputs_with_strides]
        if leading:  # compile_fx puts these before the arguments
            return WithLeading(run, leading), given
        if any(views) or any(map(symbols, (*result, *subclasses))) or any(map(is_distributed, subclasses)):
            # The wrapper marks sizes of results as dynamic, and passes on sizes of subclasses.
            return cast(Boxed, next(wrapper for wrapper in wrappers if _name(wrapper) != "forward")), given
        run = cast(Boxed, code.current_callable)
        return _OnInnerTensors(run, operands) if subclasses else run, given

    def _results(self, module: fx.GraphModule, operands: Sequence[Any]) -> tuple[list[Any], list[bool]]:
        """Return fakes of a part's results, and for each whether it shares memory with an operand or another result.

        Dynamo and AOTAutograd run operators on fakes under Python's dispatcher.  Without it a few operators read the
        numbers behind symbolic sizes, and the code would serve these numbers alone.
        """
        from torch._dispatch.python import enable_python_dispatcher

        with torch.inference_mode(False), torch.no_grad(), self.mode, enable_python_dispatcher():
            result = list(module(*operands))
        tensors = [value for value in (*operands, *result) if isinstance(value, Tensor)]
        return result, [
            isinstance(value, Tensor) and sum(share_memory(value, other) for other in tensors) > 1 for value in result
        ]

    def _strided(self, value: Any, strides: Sequence[str] | None) -> Any:
        """Return a fake without shared memory, with the strides that Inductor recorded if there are any."""
        if not isinstance(value, Tensor) or strides is None:
            return value
        chosen = [self.mode.shape_env.deserialize_symexpr(stride) for stride in strides]
        return self._like(value.shape, chosen, value)

    def fresh_values(self, values: Sequence[Any], renamed: Mapping[Any, Any]) -> list[Any]:
        """Return fake tensors and sizes like the given ones, without shared memory and with some symbols renamed."""
        return [
            self._like(self._sizes(value.shape, renamed), self._sizes(value.stride(), renamed), value)
            if isinstance(value, Tensor)
            else self._sizes([value], renamed)[0]
            for value in values
        ]

    def _sizes(self, sizes: Sequence[Any], renamed: Mapping[Any, Any]) -> list[Any]:
        from torch.fx.experimental.symbolic_shapes import SymExprPrinter

        def with_new_symbols(size: Any) -> Any:
            if symbols(size).isdisjoint(renamed):
                return size
            text = SymExprPrinter().doprint(expression(size).xreplace(renamed))
            return self.mode.shape_env.deserialize_symexpr(text)

        return [with_new_symbols(size) for size in sizes]

    def _like(self, shape: Sequence[Any], strides: Sequence[Any], value: Tensor) -> Tensor:
        with torch.inference_mode(False), self.mode:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def on_cpu(values: Iterable[Any]) -> bool:
    """Return whether all tensors among the values are on a CPU."""
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


def as_operand(placeholder: fx.Node, node: fx.Node, value: Any) -> None:
    """Describe a placeholder that stands for a node of another graph."""
    placeholder.meta = {"example_value": value}
    if "tensor_dict" in node.meta:
        placeholder.meta["tensor_dict"] = node.meta["tensor_dict"]
    placeholder._dynamo_source = getattr(node, "_dynamo_source", None)


_WRAPPERS = ("forward", "runtime_wrapper", "SerializableCompiledFunction")
_SUBCLASS_WRAPPER = "inner_fn"
"""The wrapper that unwraps tensor subclasses; in torch 2.11 other wrappers have this name too."""


def _unwrap(run: Any, subclasses: bool) -> tuple[list[Any], Any]:
    """Return the wrappers around Inductor's code, outermost first, and the code, or None for unknown wrappers.

    Each wrapper has the function that it wraps as `__wrapped__`.  The outer ones, named forward, take arguments one
    by one and so keep them alive; the others take a list, which they empty.

    Args:
        subclasses: whether an argument of the code is a tensor subclass, which one of the wrappers unwraps.
    """
    from torch._inductor.output_code import CompiledFxGraph

    chain = [run]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    *wrappers, code = chain
    others = [_name(wrapper) for wrapper in wrappers if _name(wrapper) not in _WRAPPERS and not _is_idle(wrapper)]
    if others == [_SUBCLASS_WRAPPER] * subclasses and isinstance(code, CompiledFxGraph) and code.current_callable:
        return wrappers, code
    if untested_version("torch"):
        _warn_of_unknown_wrappers()
    return wrappers, None


@functools.cache
def _warn_of_unknown_wrappers() -> None:
    """Warn once in a process that graphs are compiled whole, because this version of torch wraps code differently."""
    message = (
        f"kvpass compiles graphs whole, which takes longer for many layers: torch {torch.__version__} wraps compiled "
        "code in a way that kvpass does not know; results do not change, but please report it"
    )
    warnings.warn(message, KVPassWarning, stacklevel=2)


def _name(wrapper: Any) -> str:
    return str(getattr(wrapper, "__name__", type(wrapper).__name__))


def _is_idle(wrapper: Any) -> bool:
    """Return whether a wrapper only calls the code.

    torch 2.11 puts two such wrappers around each graph: for effects, and for random numbers as arguments.
    """
    free = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    if free not in (("compiled_fn", "num_tokens"), ("compiled_fn", "runtime_metadata", "self")):
        return False
    state = wrapper.__closure__[1].cell_contents
    return state == 0 if isinstance(state, int) else not state.is_rng_op_functionalized


@contextlib.contextmanager
def compiling_parts(gm: fx.GraphModule, examples: Sequence[Any]) -> Iterator[CompiledParts]:
    """Yield the compiler of parts of a graph with these examples.

    Within Dynamo the examples are real tensors, and their fakes in the graph have a mode other than the context's; the
    two modes share their shape environment.
    """
    from torch._guards import TracingContext

    traced = TracingContext.try_get() is not None
    with _without_mixed_warning(), _tracing(examples) as inputs:
        placeholders = gm.graph.find_nodes(op="placeholder")
        fakes = [node.meta["example_value"] for node in placeholders] if traced else inputs
        yield CompiledParts(fakes, next(value.fake_mode for value in fakes if is_fake(value)))
