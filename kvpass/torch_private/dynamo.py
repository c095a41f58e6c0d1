"""Use private names of Dynamo: its settings, its notes on graph inputs, its counters, and how it calls a backend."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import logging
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.errors import UnreadableGraph
from kvpass.torch_private.inductor import Compiled
from kvpass.versions import untested_version

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger("kvpass.dynamo")

COMPARISONS = {f"__{name}__": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
"""The operators of comparison methods: torch 2.11 records x == 0 as a method call, later versions as an operator."""


def never_compile_alone(function: Any) -> None:
    """Keep Dynamo from compiling a function as a separate frame; Dynamo may still inline the function.

    One code object of `__torch_function__` serves every operation, and Dynamo has run the code compiled for one
    operation for another.  In a function that Dynamo runs uncompiled it compiles what is called instead: `is_traced`
    would be a frame of its own, in which the answer is yes.
    """
    _set_action("SKIP", (function.__code__, is_traced.__code__, is_exported.__code__))


def compile_again(error: BaseException) -> None:
    """Let Dynamo compile the functions again in which an error was raised, as it may skip them from then on.

    Dynamo skips a function if the user's code raises an error at a place behind which it cannot continue a graph.  It
    notes that at the function's code, which all models of a class share, and runs it uncompiled in every later call.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    ours = ("kvpass", "torch")  # some of these functions are skipped on purpose
    _set_action("DEFAULT", (x.f_code for x in frames if x.f_globals.get("__name__", "").partition(".")[0] not in ours))


def _set_action(name: str, codes: Iterable[types.CodeType]) -> None:
    """Set what Dynamo does with frames of some code objects, an entry of its `FrameAction`."""
    frames: Any = torch._dynamo.eval_frame
    strategy = frames.FrameExecStrategy(getattr(frames.FrameAction, name), frames.FrameAction.DEFAULT)
    for code in codes:
        frames.set_code_exec_strategy(code, strategy)


def is_traced() -> bool:
    """Return whether Dynamo or torch.export is tracing the caller.

    This asks Dynamo, because torch.compiler.is_compiling() is also true while another thread compiles.
    """
    return torch.compiler.is_dynamo_compiling() or is_exported()


def is_exported() -> bool:
    """Return whether torch.export traces in this thread; torch's own flag covers the whole process.

    Without Dynamo it records by modes, which belong to one thread.
    """
    if not torch.compiler.is_exporting():
        return False
    from torch import overrides
    from torch.utils import _python_dispatch

    function_modes: Any = overrides._get_current_function_mode_stack
    of_export = (type(mode).__module__.startswith("torch._export") for mode in function_modes())
    return any(of_export) or _python_dispatch.any_torch_dispatch_mode_on_stack()


def mark_dynamic_dim(tensor: Tensor, dim: int) -> None:
    """Mark a dimension as dynamic for Dynamo, which saves one static trace."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def is_dynamic_dim(tensor: Tensor, dim: int) -> bool:
    """Return whether a dimension is marked by `mark_dynamic_dim`."""
    return dim in getattr(tensor, "_dynamo_weak_dynamic_indices", ())


def mark_static_dim(tensor: Tensor, dim: int) -> None:
    """Mark a dimension as static for Dynamo, even if it had other sizes in earlier calls."""
    torch._dynamo.mark_static(tensor, dim)


def mark_static_address(buffer: Tensor) -> None:
    """Mark a buffer's address as static, so that CUDA graphs may write to the buffer."""
    torch._dynamo.mark_static_address(buffer, guard=False)


def constant_in_traces(function: F) -> F:
    """Decorate a function: Dynamo calls it while it traces, and takes the result for a constant without a guard."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's own decorator imports Dynamo
    return function


def is_traced_for(backend: Any) -> bool:
    """Return whether Dynamo traces for this backend or a backend of kvpass, in `constant_in_traces` functions.

    Args:
        backend: the backend of the running call of kvpass, or None; it decides if torch does not show its backend.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output: Any = InstructionTranslator.current_tx().output
    if not hasattr(output, "compiler_fn"):
        return backend is not None
    traced_for = output.compiler_fn
    return _strictness(traced_for) is not None or any(each is backend for each in _wrapped_backends(traced_for))


def break_graph(reason: str) -> None:
    """Break the graph where Dynamo traces the caller; with fullgraph=True that is an error of torch."""
    torch._dynamo.graph_break(msg=reason)


@functools.cache
def untraced(function: F) -> F:
    """Return a function that Dynamo does not trace, even where code that Dynamo has compiled calls it."""
    disable: Any = torch.compiler.disable
    return cast(F, disable(function))


def tables_of_modules(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries of the attributes, parameters, buffers and modules of all modules of a model.

    They show later replacements.
    """
    return [entries for x in model.modules() for entries in (vars(x), x._parameters, x._buffers, x._modules)]


def is_of_module(node: fx.Node) -> bool:
    """Return whether a graph input is a parameter or a buffer of a module."""
    return node.op == "placeholder" and "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def check_notes(graph: fx.Graph, examples: Sequence[Any]) -> None:
    """Raise UnreadableGraph if a torch newer than all tested ones describes graph inputs in another way.

    Without these notes weights would count as arguments, and attention would not be found.
    """
    inputs = zip(graph.find_nodes(op="placeholder"), examples, strict=False)
    nodes = {node: type(example) for node, example in inputs if isinstance(example, Tensor)}
    weights = [node for node, kind in nodes.items() if issubclass(kind, torch.nn.Parameter)]
    without_examples = nodes and not any("example_value" in node.meta for node in nodes)
    if (without_examples or (weights and not any(map(is_of_module, weights)))) and untested_version("torch"):
        raise UnreadableGraph(
            f"torch {torch.__version__} is newer than the tested versions, and describes the inputs of graphs in a way "
            "that kvpass does not know; use a version that `kvpass doctor` lists as tested"
        )


def is_attribute_of_module(node: fx.Node) -> bool:
    """Return whether a graph input is a tensor of a module: a parameter, a buffer or any other attribute."""
    source = getattr(node, "_dynamo_source", None)
    return is_of_module(node) or (source is not None and source.guard_source.is_unspecialized_nn_module())


def outlives_calls(node: fx.Node) -> bool:
    """Return whether a graph input is a tensor of a module, a closure or a global variable."""
    source = getattr(node, "_dynamo_source", None)
    return is_attribute_of_module(node) or (source is not None and not _is_of_call(source))


_OF_FUNCTIONS = ("ClosureSource", "DefaultsSource", "LocalCellSource")
"""Dynamo's sources of the contents of a function object."""


def _is_of_call(source: Any) -> bool:
    """Return whether a source of Dynamo's begins at an argument or another local variable."""
    chain = [source]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    of_function = any(type(x).__name__ in _OF_FUNCTIONS or getattr(x, "is_derefed_cell_contents", False) for x in chain)
    return bool(source.guard_source.is_local()) and not of_function


def as_new_input(node: fx.Node, example: Tensor, *, in_place: bool) -> None:
    """Describe a placeholder that Dynamo does not know; `in_place` buffers keep their address."""
    node.meta["example_value"] = example
    node._dynamo_source = None
    if in_place:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def release_source_lines() -> None:
    """Drop the lines of source files that Dynamo has read for stack traces: 10 MiB for a model of transformers.

    Later readers read the file again.  Code without a file, such as a notebook's, stays.
    """
    for name, entry in linecache.cache.copy().items():  # collected graphs remove their code from it at any allocation
        if len(entry) == 4 and os.path.isfile(entry[3]):
            linecache.cache.pop(name, None)


def compile_lock() -> contextlib.AbstractContextManager[Any]:
    """Return Dynamo's own lock: tracing patches Python functions of the whole process, so threads take turns."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


MAX_TRIES = 100
"""The number of times that a call is tried while other threads compile."""


def between_compilations(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch.compile so that its calls wait until no other thread compiles.

    While one thread compiles, torch mistakes the calls of all threads for calls that FX traces, and refuses them before
    anything has run.
    """

    def run(*arguments: Any, **named: Any) -> Any:
        for _ in range(MAX_TRIES):
            with compile_lock():
                pass
            try:
                return call(*arguments, **named)
            except RuntimeError as error:
                if not _is_refused_as_traced(error):
                    raise
        return call(*arguments, **named)

    return run


def _is_refused_as_traced(error: RuntimeError) -> bool:
    """Return whether torch refused the outermost compiled call of a traceback because FX seems to trace it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    wrappers = [frame for frame in frames if frame.f_code.co_name == "compile_wrapper"]
    return "using FX to symbolically trace" in str(error) and wrappers == frames[-1:]


MAX_GRAPHS = {"recompile_limit": 256, "accumulated_recompile_limit": 1024}
"""The numbers of graphs that torch may compile of a function for a kvpass backend; torch's default is 8."""


_OTHER_SETTINGS = ("skip_nnmodule_hook_guards", "fail_on_recompile_limit_hit")
"""Other settings: ignore hooks that are added later; raise an error at the recompile limit."""


class _SetByKvpass(int):
    """The value of a torch setting that kvpass has set, with the value before."""

    before: Any

    @classmethod
    def instead_of(cls, before: Any, value: int) -> _SetByKvpass:
        ours = cls(value)
        ours.before = before
        return ours


def register_settings() -> None:
    """Register kvpass's Dynamo settings for every compilation for a kvpass backend.

    The recompile limit counts the graphs of all backends of a function, and torch checks it before it calls a backend,
    so a backend cannot raise it.  torch calls the hook that is registered here before the check.
    """
    from torch._dynamo import utils

    if _apply_settings not in (utils.get_hook_for_recompile_user_context() or ()):
        utils.register_hook_for_recompile_user_context(_apply_settings)


def _apply_settings() -> str:
    """Set Dynamo's settings for the compilation that is about to begin, and restore them at its end."""
    from torch._dynamo.callback import callback_handler

    restore_settings()  # of a refused compilation, which has no end
    config, strict = torch._dynamo.config, _current_strictness()
    if strict is None:
        return ""
    if restore_settings not in callback_handler.end_callbacks:  # torch._dynamo.reset() removes it
        callback_handler.register_end_callback(restore_settings)
    limits = {name: max(getattr(config, name), most) for name, most in MAX_GRAPHS.items()}
    fails = strict and not config.suppress_errors  # torch does not allow both
    for name, value in (limits | {"skip_nnmodule_hook_guards": False, "fail_on_recompile_limit_hit": fails}).items():
        setattr(config, name, _SetByKvpass.instead_of(getattr(config, name), value))
    return "kvpass"


def restore_settings(_: object = None) -> None:
    """Restore the settings of Dynamo that `_apply_settings` has changed in this thread."""
    config: Any = torch._dynamo.config
    for name in (*MAX_GRAPHS, *_OTHER_SETTINGS):
        if isinstance(set_to := getattr(config, name), _SetByKvpass):
            setattr(config, name, set_to.before)


def _current_strictness() -> bool | None:
    """Return the `strict` of the current compilation's kvpass backend; None if the backend is not kvpass's."""
    # torch passes the hook no arguments: the backend is a local variable of one of the functions that call it.
    callers = [frame.f_locals for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 4)]
    compilers = [each["compiler_fn"] for each in callers if each.get("compiler_fn") is not None]
    if not compilers:
        _note_unknown_backend()
    return next((strict for each in compilers if (strict := _strictness(each)) is not None), None)


def _strictness(compiler: Any) -> bool | None:
    """Return the `strict` of a kvpass backend or, for a backend by name, of torch.compile's options; else None."""
    options: dict[str, Any] = {}
    for backend in _wrapped_backends(compiler):
        if any(str(each.__module__).partition(".")[0] == "kvpass" for each in (backend, *type(backend).__mro__)):
            return bool(getattr(backend, "strict", options.get("strict", True)))
        options = (getattr(backend, "kwargs", None) or {}).get("options") or options
    return None


@functools.cache
def _note_unknown_backend() -> None:
    """Log once that torch does not show which backend a compilation is for."""
    log.warning(
        "torch %s calls kvpass's hook where no frame has the backend of the compilation, so torch's own limits of "
        "recompilation hold; raise torch._dynamo.config.recompile_limit if graphs are refused",
        torch.__version__,
    )


def backend_of(compiled: Any) -> Any:
    """Return the backend that a module or function was compiled with, if torch still shows it, else None."""
    compiled = getattr(compiled, COMPILED_CALL, None) or compiled
    compiled = getattr(compiled, "call", compiled)  # of a caller of kvpass
    context = getattr(compiled, "dynamo_ctx", None)
    found = getattr(context, "callback", None)
    if context is None and getattr(compiled, "__closure__", None):
        cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__, strict=True))
        found = cells["callback"].cell_contents if "callback" in cells else None
    return next(reversed(list(_wrapped_backends(found))), None)


def _wrapped_backends(backend: Any) -> Iterator[Any]:
    """Yield a backend and the backends that it wraps, outermost first."""
    while backend is not None:
        yield backend
        backend = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)


def tracing_attributes_as_symbols(names: set[str]) -> contextlib.AbstractContextManager[Any]:
    """Trace integer attributes of these names as symbols already in the first trace, inside the context."""
    config: Any = torch.compiler.config  # a module whose type torch changes
    chosen = [each for each in (config.dynamic_sources, rf".*\.({'|'.join(sorted(names))})$") if each]
    context: contextlib.AbstractContextManager[Any] = config.patch(dynamic_sources=",".join(chosen))
    return context


def tracing_one_as_symbol() -> contextlib.AbstractContextManager[Any]:
    """Trace a dynamic size as a symbol even if it is one in this call, inside the context."""
    from torch.fx.experimental import _config

    config: Any = _config  # a module whose type torch changes
    context: contextlib.AbstractContextManager[Any] = config.patch(backed_size_oblivious=True)
    return context


def is_at_recompile_limit() -> bool:
    """Return whether the function being compiled reaches torch.compile's recompile limit with this graph."""
    from torch._guards import CompileContext

    now = CompileContext.current_compile_id()
    count = getattr(now, "frame_compile_id", None)
    return count is not None and count + 1 >= torch._dynamo.config.recompile_limit


def registered_hooks() -> int:
    """Return how many hooks this process has registered, on any module."""
    from torch.utils.hooks import RemovableHandle

    return int(RemovableHandle.next_id)


def reason_uncompiled() -> str | None:
    """Return the reason why torch.compile runs everything uncompiled now, or None."""
    from torch._dynamo import eval_frame
    from torch.utils import _python_dispatch

    if is_disabled():
        return "torch.compile is disabled (TORCH_COMPILE_DISABLE=1)"
    if is_exported():
        return "torch.export records the operations of the model"
    stance = eval_frame._stance
    if stance.stance in ("force_eager", "aot_eager_then_compile") or stance.backend is not None:
        return f"torch.compiler.set_stance({stance.stance!r}) is in force"
    if _python_dispatch.any_torch_dispatch_mode_on_stack():  # of this thread: another may be compiling
        return "a dispatch mode, such as FlopCounterMode, is active, under which torch.compile compiles nothing"
    return None


def is_disabled() -> bool:
    """Return whether torch.compile is turned off for the process."""
    return bool(torch._dynamo.config.disable) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def is_recompile_limit_error(error: BaseException) -> bool:
    """Return whether an error says that torch refuses to compile another graph of a function."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def reason_untraceable(error: BaseException) -> str | None:
    """Return torch's reason why an operation of a function fails on the arguments; None for another error."""
    from torch._dynamo.exc import TorchRuntimeError

    if not isinstance(error, TorchRuntimeError):
        return None
    text = str(error)
    return text.partition("got ")[2].partition("\n")[0] or text


COMPILED_CALL = "_compiled_call_impl"
"""The attribute with a module's compiled call; torch leaves it out of copies and pickles."""


def compiled_call(model: torch.nn.Module) -> Any:
    """Return the compiled call of a module that was compiled in place, or None."""
    return getattr(model, COMPILED_CALL)


def set_compiled_call(model: torch.nn.Module, call: Any) -> None:
    """Set the function that runs instead of a module's forward when it is called; None removes it.

    Dynamo goes from a call of a module straight to its forward, unless the instance has its own `__call__`.
    """
    model.__dict__[COMPILED_CALL] = call
    model.__dict__.pop("__call__", None)
    if call is not None:
        model.__dict__["__call__"] = functools.partial(_call_by_type, model)


def _call_by_type(model: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
    """Call a module, as `model(...)` does."""
    return type(model).__call__(model, *arguments, **named)


def before_compilation(compiled: Any) -> Any:
    """Return the model or function inside a torch.compile wrapper; return any other object unchanged."""
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        if (inner := getattr(compiled, name, None)) is not None:
            return before_compilation(inner)
    return compiled


def uncompiled_call(model: torch.nn.Module) -> Callable[..., Any]:
    """Return the uncompiled call of a module, hooks included."""
    return model._call_impl


def registered_backend(name: str) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Return a registered torch.compile backend by its name."""
    from torch._dynamo.backends.registry import lookup_backend

    return cast(Callable[[fx.GraphModule, Sequence[Any]], Compiled], lookup_backend(name))


def note_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace, if one is recorded (TORCH_TRACE)."""
    described = {"name": name, "encoding": "string"}
    torch._logging._internal.trace_structured("artifact", metadata_fn=lambda: described, payload_fn=text)


def compilation_count() -> int:
    """Return a number that changes with every compilation, including recompilations that Dynamo does not count."""
    from torch._dynamo.utils import counters  # takes seconds, so a process without a compilation skips it

    return sum(value for counter in counters.values() for value in counter.values())
