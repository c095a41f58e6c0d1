"""Every private name of torch that kvpass relies on, in one place.

Tested on torch 2.11 and 2.13.  Nothing else in the package imports from a private module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch import Tensor

Compiled = Callable[..., Sequence[Any]]


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


def write_out(graph: fx.Graph, node: fx.Node, strides: Sequence[int]) -> fx.Node:
    """A new node with the value of one of an operator graph, which Inductor writes to a buffer with these strides.

    A strided view would have it written too, but over whatever strides Inductor chose for it.
    """
    from torch._inductor.inductor_prims import force_stride_order

    value = node.meta["val"]
    made = graph.call_function(force_stride_order, (node, list(strides)))
    made.meta["val"] = value.as_strided(value.shape, strides)
    return made


def is_sdpa(node: fx.Node) -> bool:
    """A call of torch.nn.functional.scaled_dot_product_attention."""
    return node.op == "call_function" and node.target is torch.nn.functional.scaled_dot_product_attention


def mutates(node: fx.Node) -> bool:
    """A call of an aten operator that writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


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


def mark_growing(handle: Tensor, dim: int = 2) -> None:
    """Tell Dynamo that a dimension changes from call to call, which saves one wasted static trace."""
    torch._dynamo.maybe_mark_dynamic(handle, dim)


def mark_in_place(buffer: Tensor) -> None:
    """Tell the compiler that the buffer keeps its address, so that CUDA graphs may write to it."""
    torch._dynamo.mark_static_address(buffer, guard=False)


def expression(value: torch.SymInt) -> Any:
    """The sympy expression behind a symbolic size."""
    return value.node.expr


def known_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal wherever the guards that Dynamo has set hold."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one == other)


def copy_graph_module(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy that may be rewritten, and where each node of the original went.

    Dynamo goes on reading the original after a backend returns, so it must stay as it is.
    """
    graph = fx.Graph()
    moved: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, moved)
    graph.output(result)
    for node, copied in moved.items():
        if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(copy, name, getattr(gm, name))
    return copy, moved


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
def fake_mode() -> Iterator[Callable[[Tensor], Tensor]]:
    """A mode in which tensors have shapes and no data; yields what makes a static fake of a real tensor."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode() as mode:
        yield lambda tensor: mode.from_tensor(tensor, static_shapes=True)


def trace(function: Callable[..., Any], examples: Sequence[Tensor]) -> fx.GraphModule:
    """The aten graph of a function; call inside `fake_mode` with its tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*examples)


def inductor(gm: fx.GraphModule, examples: Sequence[Any], patches: dict[str, Any]) -> Compiled:
    """Compile with Inductor under the given configuration."""
    from torch._inductor.compile_fx import compile_fx

    with _tracing(examples) as inputs:
        return cast(Compiled, compile_fx(gm, inputs, config_patches=patches))


@contextlib.contextmanager
def _tracing(examples: Sequence[Any]) -> Iterator[list[Any]]:
    """The examples as a compiler expects them: within Dynamo as they are, outside of it as static fakes.

    Inductor's caches on disk serve only what is compiled with an environment of shapes, even if it stays empty.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if TracingContext.try_get() is not None:
        yield list(examples)
        return
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        yield [mode.from_tensor(e, static_shapes=True) if isinstance(e, Tensor) else e for e in examples]


def inductor_mode(mode: str) -> dict[str, Any]:
    """The configuration behind a mode of torch.compile; raises RuntimeError for an unknown one."""
    from torch._inductor import list_mode_options

    options: dict[str, Any] = list_mode_options(mode)
    return options


def inductor_options() -> set[str]:
    """The names of all of Inductor's settings."""
    from torch._inductor import config

    return set(config.get_config_copy())


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
