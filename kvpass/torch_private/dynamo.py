"""Private names of Dynamo: its settings, what it notes on inputs of a graph, and how it calls a backend."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.torch_private.inductor import Compiled

COMPARISONS = {f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
"""Dynamo of torch 2.11 records x == 0 as a call of the method, and later ones as one of the operator of this name."""


def never_a_frame_of_its_own(function: Any) -> None:
    """Keep Dynamo from compiling a function that uncompiled code calls; one that it inlines is another matter.

    A `__torch_function__` serves every operation with one piece of code, and what was compiled for one of them
    was seen to run for another.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)


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


def as_new_input(node: fx.Node, example: Tensor, *, in_place: bool) -> None:
    """Describe a placeholder that Dynamo knows nothing of; `in_place` buffers keep their address."""
    node.meta["example_value"] = example
    node._dynamo_source = None
    if in_place:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def one_at_a_time() -> contextlib.AbstractContextManager[Any]:
    """Dynamo's own lock: tracing patches functions of Python for the whole process, so threads take turns."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


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


def note_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace, if there is one (TORCH_TRACE)."""
    described = {"name": name, "encoding": "string"}
    torch._logging._internal.trace_structured("artifact", metadata_fn=lambda: described, payload_fn=text)
