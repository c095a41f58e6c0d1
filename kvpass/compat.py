"""Every private name of torch that kvpass relies on, in one place.

docs/testing.md says which releases of torch were tried.  Nothing else in the package imports from a private module.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg

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


METHODS = (
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.bound_sympy",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symintnode",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.deserialize_symexpr",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.replace",
    "torch.fx.experimental.symbolic_shapes.SymExprPrinter.doprint",
    "torch._inductor.output_code.CompiledFxGraph.current_callable",
    "torch._inductor.output_code.CompiledFxGraph.output_strides",
    "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor",
    "torch._inductor.config.combo_kernels",
    "torch._inductor.config.realize_acc_reads_threshold",
    "torch._inductor.config.realize_opcount_threshold",
    "torch._inductor.config.realize_reads_threshold",
    "torch._inductor.config.reorder_for_locality",
)
"""Methods, fields and settings that stand nowhere else in this file under their full names."""


SIZE = torch.ops.aten.sym_size.int
"""A dimension of a tensor, as a node that is a size."""


NEURAL = torch._C._nn
"""Where torch.nn.functional has some of its functions from, under which names Dynamo records them."""


COMPARISONS = {f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
"""Dynamo of torch 2.11 records x == 0 as a call of the method, and later ones as one of the operator of this name."""


QUESTIONS = frozenset(
    [
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr",
        "type", "get_device", "has_names", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
        "is_inference", "is_same_size", "is_pinned", "is_shared", "_is_view", "untyped_storage",
        "is_conj", "is_neg", "_is_zerotensor",
        "__len__", "__repr__", "__hash__", "__format__", "__dir__",
    ]
)  # fmt: skip
"""Methods of a tensor that read nothing but shape, dtype and the like.

Which of them torch asks a tensor of a class of its own differs between versions, and 2.11 does so while Dynamo looks at
the inputs of a graph, before it says that it compiles.
"""


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


def written_out(x: Tensor) -> Tensor:
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


def first_cache() -> int:
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


def is_sdpa(node: fx.Node) -> bool:
    """A call of torch.nn.functional.scaled_dot_product_attention."""
    return node.op == "call_function" and node.target is torch.nn.functional.scaled_dot_product_attention


def mutates(node: fx.Node) -> bool:
    """A call of an aten operator that writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_operator(node: fx.Node) -> bool:
    """A call of one of aten's operators, or of one of our own."""
    return isinstance(node.target, torch._ops.OpOverload)


def is_fake(value: Any) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)


def passes_on(node: fx.Node) -> list[fx.Node]:
    """The arguments of an operator whose memory it writes to or gives, as its schema says."""
    schema = node.target._schema  # type: ignore[union-attr]
    places = [(place, argument.name) for place, argument in enumerate(schema.arguments) if argument.alias_info]
    given = [node.args[p] if p < len(node.args) else node.kwargs.get(name) for p, name in places]
    flat = [part for each in given for part in (each if isinstance(each, (list, tuple)) else (each,))]
    return [part for part in flat if isinstance(part, fx.Node)]


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, which may be fake, have one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def changes_nothing(node: fx.Node) -> bool:
    """torch's usage logging, and gradients that are turned on and off, in a graph that nobody needs gradients of."""
    return is_log_only(node) or (node.op == "call_function" and node.target is torch._C._set_grad_enabled)


def is_collective(node: fx.Node) -> bool:
    """Whether processes exchange tensors in a call, as Dynamo and the tracer of operators record it."""
    family, _, name = str(node.target).partition(".")
    return node.op == "call_function" and family.strip("_").startswith("c10d") and not name.startswith("wait_tensor")


def all_reduced(x: Tensor, how: str, group: str) -> Tensor:
    """The "sum" or "max" of what the processes of a group, by its name, have; can be traced, and run as it is."""
    operators = torch.ops._c10d_functional
    return cast(Tensor, operators.wait_tensor(operators.all_reduce(x, how, group)))


def sets_a_mode(node: fx.Node) -> bool:
    """One of the pair of calls between which autocasting is on or off."""
    pair = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
    return node.op == "call_function" and node.target in pair


def is_batching(node: fx.Node) -> bool:
    """A call into the machinery of vmap, which Dynamo leaves in graphs, and which other calls go through."""
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and module.startswith(("torch._C._functorch", "torch._functorch"))


def batching_kind(node: fx.Node) -> Literal["begins", "ends", "prepares", "maps"] | None:
    """Return what a call does for a region of vmap: begin it, end it, prepare for any, or map tensors in or out."""
    if not is_batching(node):
        return None
    name = node.target.__name__  # type: ignore[union-attr]
    if name.endswith("_increment_nesting"):
        return "begins"
    if name.endswith("_decrement_nesting"):
        return "ends"
    return "prepares" if name == "lazy_load_decompositions" else "maps"


def is_log_only(node: fx.Node) -> bool:
    """torch's own usage logging, which Dynamo leaves in graphs."""
    return node.target is torch._C._log_api_usage_once


def never_a_frame_of_its_own(function: Any) -> None:
    """Keep Dynamo from compiling a function that uncompiled code calls; one that it inlines is another matter.

    A `__torch_function__` serves every operation with one piece of code, and what was compiled for one of them
    was seen to run for another.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Tensor subclasses behave as plain tensors inside."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def without_torch_functions() -> contextlib.AbstractContextManager[None]:
    """Neither tensor subclasses nor function modes, such as a default device, intercept operations inside.

    Dynamo dispatches on a mode again inside of `without_torch_function`, so a traced `__torch_function__` never ends.
    """
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def with_torch_function() -> contextlib.AbstractContextManager[None]:
    """Tensor subclasses have their say inside, also where Dynamo has turned that off around a graph."""
    context: contextlib.AbstractContextManager[None] = torch._C._EnableTorchFunction()
    return context


def is_wrapper(value: Any) -> bool:
    """A tensor of a class that wraps others, as quantised weights are; Dynamo does not look into its operations."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def was_inlined(value: Any) -> bool:
    """A tensor of a class whose `__torch_function__` Dynamo has traced through: in its graphs it is a plain tensor."""
    plain = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return isinstance(value, Tensor) and type(value).__torch_function__ not in plain and not is_wrapper(value)


def as_plain(value: Tensor) -> Tensor:
    """The same data as a tensor of no class of its own."""
    with without_torch_function():
        return value.as_subclass(Tensor)


def mark_growing(handle: Tensor, dim: int = 2) -> None:
    """Tell Dynamo that a dimension changes from call to call, which saves one wasted static trace."""
    torch._dynamo.maybe_mark_dynamic(handle, dim)


def mark_in_place(buffer: Tensor) -> None:
    """Tell the compiler that the buffer keeps its address, so that CUDA graphs may write to it."""
    torch._dynamo.mark_static_address(buffer, guard=False)


def parts_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Where the modules of a model keep their parameters, buffers and modules; each follows what is replaced."""
    return [held for x in model.modules() for held in (x._parameters, x._buffers, x._modules)]


def is_of_module(node: fx.Node) -> bool:
    """An input of a graph that is a parameter or a buffer of a module."""
    return node.op == "placeholder" and "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def expression(value: torch.SymInt) -> Any:
    """The sympy expression behind a symbolic size."""
    return value.node.expr


def at_hand(size: Any) -> int:
    """A size, or what an open one is in the call that it was made for."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def known_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal wherever the guards that Dynamo has set hold."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one == other)


def decided(size: torch.SymInt) -> sympy.Expr:
    """A size without the maxima and minima that the ranges decide which Dynamo has guarded."""
    env = size.node.shape_env

    def never_above(one: sympy.Expr, other: sympy.Expr) -> bool:
        return bool(env.bound_sympy(one - other).upper <= 0)

    def without(parts: tuple[sympy.Expr, ...], drops: Callable[[sympy.Expr, sympy.Expr], bool]) -> list[sympy.Expr]:
        left = list(parts)
        for part in parts:
            if any(drops(part, other) for other in left if other is not part):
                left.remove(part)
        return left

    whole = expression(size)
    for part in list(sympy.preorder_traversal(whole)):
        if part.func.__name__ == "Max":
            left = without(part.args, never_above)
        elif part.func.__name__ == "Min":
            left = without(part.args, lambda one, other: never_above(other, one))
        else:
            continue
        whole = whole.xreplace({part: part.func(*left)})
    return whole


def may_be(size: Any, number: int) -> bool:
    """Whether the ranges that Dynamo has guarded allow a size to be this number."""
    if not isinstance(size, torch.SymInt):
        return bool(size == number)
    allowed = size.node.shape_env.bound_sympy(expression(size))
    return bool(allowed.lower <= number <= allowed.upper)


def guarded(*values: Any) -> list[sympy.Expr]:
    """What Dynamo has asked of the symbols of a graph that are sizes, or are in the shapes of tensors, among these."""
    sizes = [size for x in values for size in (x.shape if isinstance(x, Tensor) else (x,))]
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    if symbolic is None:
        return []
    env = symbolic.node.shape_env
    return [env.replace(guard.expr) for guard in env.guards]  # in the symbols that sizes have by now


def empty_cache(model: Any) -> Any:
    """The cache that `generate` of transformers begins with; None for other models, which make their own.

    A model that makes it while Dynamo traces shows Dynamo the cache's own counts when they are above zero for the
    first time, and these are numbers in the graph then.
    """
    supports, config = getattr(model, "_supports_default_dynamic_cache", None), getattr(model, "config", None)
    if supports is None or not supports() or getattr(config, "is_encoder_decoder", False):
        return None
    from transformers import DynamicCache

    return DynamicCache(config=config.get_text_config(decoder=True))  # type: ignore[union-attr]


def copy_graph_module(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy that may be rewritten, and where each node of the original went.

    Dynamo goes on reading the original after a backend returns, so it must stay as it is.  Most copies never run as
    they are: the copy's code is made when it is asked for, as that takes as long as copying.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    graph = fx.Graph()
    moved: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, moved)
    graph.output(result)
    for node, copied in moved.items():
        if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    copy = _LazyGraphModule(gm, graph)
    copy.meta.update(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    return copy, moved


def code_of(gm: fx.GraphModule) -> Callable[..., Any]:
    """What runs a graph; that of a copy is made by now."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    _LazyGraphModule.force_recompile(gm)
    return gm.forward


def as_new_input(node: fx.Node, example: Tensor, *, in_place: bool) -> None:
    """Describe a placeholder that Dynamo knows nothing of; `in_place` buffers keep their address."""
    node.meta["example_value"] = example
    node._dynamo_source = None
    if in_place:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def propagate(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """What a function gives for example values; some of them may be real tensors, such as constants."""
    from torch._subclasses.fake_tensor import FakeTensor

    modes = [arg.fake_mode for arg in args if isinstance(arg, FakeTensor)]
    real = [isinstance(arg, Tensor) and not isinstance(arg, FakeTensor) for arg in args]
    if not modes or not any(real):
        return function(*args)
    return function(*(modes[0].from_tensor(a, static_shapes=True) if r else a for a, r in zip(args, real, strict=True)))


def one_at_a_time() -> contextlib.AbstractContextManager[Any]:
    """Dynamo's own lock: tracing patches functions of Python for the whole process, so threads take turns."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Operations inside compute, even where Dynamo is tracing around them."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        yield


@contextlib.contextmanager
def fake_mode(open_sizes: OpenSizes | None = None) -> Iterator[Callable[[Any], Any]]:
    """A mode in which tensors have shapes and no data; yields what makes a static fake of a real tensor.

    Args:
        open_sizes: those of fakes that are given to a function traced inside.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = open_sizes.mode if open_sizes else FakeTensorMode()
    with torch.inference_mode(False), torch.no_grad(), mode:
        yield lambda x: mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) and not is_fake(x) else x


def trace(function: Callable[..., Any], examples: Sequence[Any]) -> fx.GraphModule:
    """The aten graph of a function; call inside `fake_mode` with its tensors, or sizes.

    Under Python's dispatcher, as open sizes would else be asked for their numbers, see `Parts`.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    if not any(map(symbols, examples)):
        return make_fx(function)(*examples)
    with enable_python_dispatcher():
        return make_fx(function)(*examples)


class OpenSizes:
    """Sizes that stay symbols in a graph, whatever they are in the call at hand.

    What is traced for them holds for all numbers of which is true what was asked of them on the way: `hold`.

    Attributes:
        mode: in which tensors of such sizes are fake.
        symbols: of each size, as sympy has it.
        alike: those of them of which code for one may serve another: what is asked of one of them is asked of all.
    """

    def __init__(self, hints: Sequence[int], taken: set[str], alike: Collection[int] = ()) -> None:
        """
        Args:
            hints: what each is in the call at hand, 2 at least.
            taken: names of another graph's symbols, which must not be met.
            alike: the places of those that are alike.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self._env)
        self.mode.cache_enabled = False  # expressions of sizes hardly repeat: looking them up was a third of a trace
        self._names, self._taken = itertools.count(), taken
        self._held: dict[Any, bool] = {}
        self.symbols = [self._symbol(hint) for hint in hints]
        self.alike = frozenset(self.symbols[place] for place in alike)
        self._hints = dict(zip(self.symbols, hints, strict=True))

    def _symbol(self, hint: int) -> Any:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        while True:
            source = ConstantSource(f"kvpass_{next(self._names)}")
            symbol = self._env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            if str(symbol) not in self._taken:
                return symbol

    def size(self, expression: Any) -> Any:
        """The symbolic size that an expression of the symbols is, or a number."""
        if expression.is_Integer:
            return int(expression)
        return self._env.create_symintnode(expression, hint=int(expression.xreplace(self._hints)))

    def like(self, shape: Sequence[Any], strides: Sequence[Any] | None, **kind: Any) -> Tensor:
        """A fake tensor, dense if no strides are given."""
        with torch.inference_mode(False), self.mode:
            return torch.empty(shape, **kind) if strides is None else torch.empty_strided(shape, strides, **kind)

    def hold(self, numbers: Sequence[int]) -> bool:
        """Whether what was traced, and compiled since, serves these numbers."""
        kind = (tuple(numbers), len(self._env.guards))  # there are more after compiling
        if kind not in self._held:
            known = dict(zip(self.symbols, map(sympy.Integer, numbers), strict=True))
            asked = (answer for guard in self._env.guards for answer in self._answers(guard.expr, known))
            self._held[kind] = min(numbers) >= 2 and all(answer == sympy.true for answer in asked)
        return self._held[kind]

    def _answers(self, asked: Any, known: dict[Any, Any]) -> Iterator[Any]:
        """A question's answers: of a question about one of the sizes that are alike, those about all of them."""
        yield asked.xreplace(known)
        about = asked.free_symbols & self.alike
        if len(about) == 1:
            (one,) = about
            for number in {known[symbol] for symbol in self.alike}:
                yield asked.xreplace({**known, one: number})


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


NEEDS_THE_WHOLE = ("cpp_wrapper", "fx_wrapper", "freezing", "aot_inductor_mode", "triton.cudagraphs")
"""Settings of Inductor's under which a graph is not compiled in parts: not tried, or not worth it."""


def allows_parts(patches: dict[str, Any]) -> bool:
    """Whether none of `NEEDS_THE_WHOLE` is set, in the configuration or by these patches."""
    from torch._inductor import config

    now = config.get_config_copy()
    return not any(patches.get(name, now.get(name)) for name in NEEDS_THE_WHOLE)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Compiles parts of one graph, each as a graph of its own.

    Attributes:
        examples: what the graph is called with, as fake tensors and symbolic sizes.
        mode: of these.
    """

    examples: list[Any]
    mode: Any

    def compile(
        self, module: fx.GraphModule, operands: Sequence[Any], patches: dict[str, Any]
    ) -> tuple[Boxed, list[Any]] | None:
        """Compile a part with Inductor.

        Returns:
            What empties the list of arguments that it is given, and fakes of what it gives, with the strides that
            Inductor chose.  None if something other than tensors and sizes is given, or code and wrappers are of a
            kind that we do not know.
        """
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx

        made, views = self._results(module, operands)
        if not all(isinstance(value, (Tensor, torch.SymInt)) for value in made):
            return None
        with tracing(TracingContext(self.mode)):  # AOTAutograd writes to it
            run: Any = compile_fx(module, operands, config_patches=patches)
        wrappers, code = _unwrapped(run)
        if code is None or len(code.output_strides or ()) != len(made):
            return None
        laid_out = [None if view else strides for view, strides in zip(views, code.output_strides, strict=True)]
        given = [self._strided(value, strides) for value, strides in zip(made, laid_out, strict=True)]
        if any(True for _ in (*module.parameters(), *module.buffers())):  # these are put before the arguments
            return (lambda arguments: run(*arguments)), given
        if any(views) or any(map(symbols, made)):  # the wrapper marks sizes as dynamic on what is given
            return cast(Boxed, next(wrapper for wrapper in wrappers if _name(wrapper) != "forward")), given
        return cast(Boxed, code.current_callable), given

    def _results(self, module: fx.GraphModule, operands: Sequence[Any]) -> tuple[list[Any], list[bool]]:
        """Fakes of what a part gives, and which of them share memory with an operand or another one.

        Python's dispatcher is what Dynamo and AOTAutograd run operators on fakes under: without it a few of
        them ask for the numbers behind symbolic sizes, and the code would serve these alone.
        """
        from torch._dispatch.python import enable_python_dispatcher

        with torch.inference_mode(False), torch.no_grad(), self.mode, enable_python_dispatcher():
            made = list(module(*operands))
        tensors = [value for value in (*operands, *made) if isinstance(value, Tensor)]
        return made, [
            isinstance(value, Tensor) and sum(share_memory(value, other) for other in tensors) > 1 for value in made
        ]

    def _strided(self, value: Any, strides: Sequence[str] | None) -> Any:
        """A fake that shares no memory, with strides that Inductor wrote down, or its own."""
        if not isinstance(value, Tensor) or strides is None:
            return value
        chosen = [self.mode.shape_env.deserialize_symexpr(stride) for stride in strides]
        return self._like(value.shape, chosen, value)

    def fresh(self, values: Sequence[Any], renamed: Mapping[Any, Any]) -> list[Any]:
        """Fake tensors like others that share no memory with anything, and sizes, with other symbols for some."""
        return [
            self._like(self._sizes(value.shape, renamed), self._sizes(value.stride(), renamed), value)
            if isinstance(value, Tensor)
            else self._sizes([value], renamed)[0]
            for value in values
        ]

    def _sizes(self, sizes: Sequence[Any], renamed: Mapping[Any, Any]) -> list[Any]:
        from torch.fx.experimental.symbolic_shapes import SymExprPrinter

        def said(size: Any) -> Any:
            if symbols(size).isdisjoint(renamed):
                return size
            told = SymExprPrinter().doprint(expression(size).xreplace(renamed))
            return self.mode.shape_env.deserialize_symexpr(told)

        return [said(size) for size in sizes]

    def _like(self, shape: Sequence[Any], strides: Sequence[Any], value: Tensor) -> Tensor:
        with torch.inference_mode(False), self.mode:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def on_cpu(values: Iterable[Any]) -> bool:
    """Whether the tensors among them, if there are any, are on a CPU."""
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


def symbols(value: Any) -> set[Any]:
    """The symbols that a fake tensor's sizes and strides, or a size, are made of."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in expression(size).free_symbols}


def as_operand(placeholder: fx.Node, node: fx.Node, value: Any) -> None:
    """Describe a placeholder that stands for a node of another graph."""
    placeholder.meta = {"example_value": value}
    if "tensor_dict" in node.meta:
        placeholder.meta["tensor_dict"] = node.meta["tensor_dict"]
    placeholder._dynamo_source = getattr(node, "_dynamo_source", None)


def _unwrapped(run: Any) -> tuple[list[Any], Any]:
    """What is around Inductor's code, outermost first, and the code; None if it has wrappers that we do not know.

    Each wrapper names what it wraps, as functools has it.  The outer ones, called forward, take the arguments one by
    one and so keep them alive; the others take a list, which they empty.
    """
    from torch._inductor.output_code import CompiledFxGraph

    chain = [run]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    *wrappers, code = chain
    known = all(
        _name(wrapper) in ("forward", "runtime_wrapper", "SerializableCompiledFunction") for wrapper in wrappers
    )
    return wrappers, code if known and isinstance(code, CompiledFxGraph) and code.current_callable else None


def _name(wrapper: Any) -> str:
    return str(getattr(wrapper, "__name__", type(wrapper).__name__))


@contextlib.contextmanager
def in_parts(gm: fx.GraphModule, examples: Sequence[Any]) -> Iterator[Parts]:
    """What compiles the parts of a graph with these examples.

    Within Dynamo these are real tensors, and what stands for them in the graph has a mode that is not the context's:
    the two share their environment of shapes.
    """
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensor

    traced = TracingContext.try_get() is not None
    with _tracing(examples) as inputs:
        holders = gm.graph.find_nodes(op="placeholder")
        fakes = [node.meta["example_value"] for node in holders] if traced else inputs
        yield Parts(fakes, next(value.fake_mode for value in fakes if isinstance(value, FakeTensor)))


PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
KERNEL, ALLOCATOR = "kernel", "empty_strided_cpu"
"""What Inductor calls the function of each kernel for a CPU, and what its modules allocate memory with."""


def generated_scopes() -> list[dict[str, Any]]:
    """The globals of the modules that Inductor has written in this process."""
    from torch._inductor.codecache import PyCodeCache

    return [vars(module) for module in PyCodeCache.modules]


def kernel_library(value: Any) -> str | None:
    """The file of a kernel that Inductor generated for a CPU; None for anything else."""
    found = isinstance(value, types.BuiltinFunctionType) and value.__name__ == KERNEL
    return getattr(value.__self__, "__file__", None) if found else None


def is_foreign(function: Any) -> bool:
    """Whether it is a function of a library that is neither Python's nor torch's, such as one of Inductor's."""
    library = getattr(function, "__self__", None)
    if not isinstance(function, types.BuiltinFunctionType) or not isinstance(library, types.ModuleType):
        return False
    return library.__name__.partition(".")[0] not in {"torch", *sys.stdlib_module_names}


def allocator() -> Callable[..., Tensor]:
    """What `ALLOCATOR` is in the modules that Inductor writes."""
    guards: Any = torch._C._dynamo.guards
    return cast(Callable[..., Tensor], guards._empty_strided_cpu)


@contextlib.contextmanager
def calls_watched(see: Callable[[types.FrameType, Any], None]) -> Iterator[None]:
    """Inside, the functions in C that this thread calls from Python are told, each with the frame that calls it.

    Python has one place for whoever watches calls, which has to be free.
    """

    def told(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            see(frame, function)

    sys.setprofile(told)
    try:
        yield
    finally:
        sys.setprofile(None)


def cpp_library(source: str) -> ctypes.CDLL:
    """C++ as a library, compiled once for all processes."""
    from torch._inductor.codecache import CppCodeCache

    return cast(ctypes.CDLL, CppCodeCache.load(source))


def is_shared(tensor: Tensor) -> bool:
    """Whether anything but this tensor holds its memory."""
    holders = torch._C._storage_Use_Count
    alone = torch.empty(1, device="cpu")
    return holders(tensor.untyped_storage()._cdata) > holders(alone.untyped_storage()._cdata)


def watched(see: Callable[[Any, Any, Any, Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Inside, what torch's dispatcher runs is told, each with its arguments and results, when it has run."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = function(*args, **(kwargs or {}))
            see(function, args, kwargs or {}, results)
            return results

    return Watch()  # type: ignore[no-untyped-call]


def writes_results(operator: Any) -> bool:
    """Whether all that an operator gives is what it was given to write to."""
    given = [result.alias_info for result in operator._schema.returns]
    return bool(operator._schema.is_mutable) and all(alias is not None and alias.is_write for alias in given)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """What AOTAutograd's wrapper sets around compiled code: no gradients and no autocasting."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


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


MOST_GRAPHS = {"recompile_limit": 256, "accumulated_recompile_limit": 1024}
"""How many graphs torch may make of a function for a backend of kvpass; by default it gives up after 8."""

_WAYS = ("skip_nnmodule_hook_guards", "fail_on_recompile_limit_hit")
"""Further settings: whether hooks that are added later go unnoticed, and whether there is an error at the limit."""


class _Ours(int):
    """A setting of torch's as kvpass has set it, which knows what it was before."""

    before: Any

    @classmethod
    def instead_of(cls, before: Any, value: int) -> _Ours:
        ours = cls(value)
        ours.before = before
        return ours


def set_up_compilations() -> None:
    """Let torch compile with settings of ours whenever it is about to compile for a backend of kvpass.

    A limit of graphs counts those of all backends of a function, and is looked at before a backend is asked: a backend
    alone could not raise it.  torch calls what is registered here before it looks.
    """
    from torch._dynamo import utils

    if _with_our_settings not in (utils.get_hook_for_recompile_user_context() or ()):
        utils.register_hook_for_recompile_user_context(_with_our_settings)


def _with_our_settings() -> str:
    """Change Dynamo's settings for a compilation that is about to begin, and undo what an earlier one has changed."""
    config: Any = torch._dynamo.config
    for name in (*MOST_GRAPHS, *_WAYS):
        if isinstance(set_to := getattr(config, name), _Ours):
            setattr(config, name, set_to.before)
    backend = _backend_asked()
    if backend is None:
        return ""
    limits = {name: max(getattr(config, name), most) for name, most in MOST_GRAPHS.items()}
    fails = getattr(backend, "strict", True) and not config.suppress_errors  # torch allows one of both
    for name, value in (limits | {"skip_nnmodule_hook_guards": False, "fail_on_recompile_limit_hit": fails}).items():
        setattr(config, name, _Ours.instead_of(getattr(config, name), value))
    return "kvpass"


def _backend_asked() -> Any:
    """Return the backend of kvpass that the compilation at hand is for, or None."""
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return None
        backend = frame.f_locals.get("compiler_fn")
        while backend is not None:
            if any(str(each.__module__).partition(".")[0] == "kvpass" for each in (backend, *type(backend).__mro__)):
                return backend
            backend = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        frame = frame.f_back
    return None


def numbers_as_symbols(names: set[str]) -> contextlib.AbstractContextManager[Any]:
    """Inside, attributes of these names that are whole numbers are traced as symbols from the first time on."""
    config: Any = torch.compiler.config  # a module whose type torch changes
    chosen = [each for each in (config.dynamic_sources, rf".*\.({'|'.join(sorted(names))})$") if each]
    context: contextlib.AbstractContextManager[Any] = config.patch(dynamic_sources=",".join(chosen))
    return context


def one_like_other_sizes() -> contextlib.AbstractContextManager[Any]:
    """Inside, a size that changes from call to call is traced as a symbol even if it is one now."""
    from torch.fx.experimental import _config

    config: Any = _config  # a module whose type torch changes
    context: contextlib.AbstractContextManager[Any] = config.patch(backed_size_oblivious=True)
    return context


def is_view(tensor: torch.Tensor) -> bool:
    """Whether it shares the memory of another tensor, which torch.compile asks about as well."""
    return tensor._is_view()


def stays(tensor: torch.Tensor, dim: int) -> None:
    """Let torch.compile take the size of this dim as a fact, whatever it was in other calls."""
    torch._dynamo.mark_static(tensor, dim)


def is_last_graph() -> bool:
    """Whether the function that is being compiled will get no further graph from torch.compile."""
    from torch._guards import CompileContext

    now = CompileContext.current_compile_id()
    count = getattr(now, "frame_compile_id", None)
    return count is not None and count + 1 >= torch._dynamo.config.recompile_limit


def hooks_so_far() -> int:
    """Return how many hooks this process has registered, on whatever module."""
    from torch.utils.hooks import RemovableHandle

    return int(RemovableHandle.next_id)


def why_uncompiled() -> str | None:
    """Return what makes torch.compile run everything uncompiled now, or None."""
    from torch._dynamo import eval_frame
    from torch.utils import _python_dispatch

    if is_disabled():
        return "torch.compile is disabled (TORCH_COMPILE_DISABLE=1)"
    stance = eval_frame._stance
    if stance.stance in ("force_eager", "aot_eager_then_compile") or stance.backend is not None:
        return f"torch.compiler.set_stance({stance.stance!r}) is in force"
    if _python_dispatch.is_in_any_mode_without_ignore_compile_internals():
        return "a dispatch mode, such as FlopCounterMode, is active, under which torch.compile compiles nothing"
    return None


def is_disabled() -> bool:
    """Return whether torch.compile was turned off for the process."""
    return bool(torch._dynamo.config.disable) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def is_limit_of_graphs(error: BaseException) -> bool:
    """Return whether torch refuses to make another graph of a function."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


COMPILED_CALL = "_compiled_call_impl"
"""Where a module has what it is called by; torch leaves it out of copies and pickles."""


def compiled_call(model: torch.nn.Module) -> Any:
    """Return what a module is called by if it was compiled in place, or None."""
    return getattr(model, COMPILED_CALL)


def set_compiled_call(model: torch.nn.Module, call: Any) -> None:
    """Let a module be called by something else than its forward."""
    model.__dict__[COMPILED_CALL] = call


def uncompiled_call(model: torch.nn.Module) -> Callable[..., Any]:
    """Return what calls a module as if it had not been compiled, with its hooks."""
    return model._call_impl


def registered_backend(name: str) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """A torch.compile backend by its name."""
    from torch._dynamo.backends.registry import lookup_backend

    return cast(Callable[[fx.GraphModule, Sequence[Any]], Compiled], lookup_backend(name))


def graph_pass(digest: bytes, rewrite: Callable[[fx.Graph], None]) -> Any:
    """A pass over the graph of aten's operators that Inductor lowers; `digest` is put into the key of its caches."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> bytes:
            return digest

    return Pass()


def note_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace, if there is one (TORCH_TRACE)."""
    described = {"name": name, "encoding": "string"}
    torch._logging._internal.trace_structured("artifact", metadata_fn=lambda: described, payload_fn=text)
