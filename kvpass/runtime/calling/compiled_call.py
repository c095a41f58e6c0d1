"""Call a model that kvpass compiled itself, and check that no returned cache grows.

Where torch gives up on a function, because of its recompile limit or because it cannot continue after a graph break,
the function runs uncompiled and torch does not call the backend.  The same happens where torch.compile is turned off,
and where a module inside the model is called by itself.  The check reads the outputs of the call to find these cases.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.cache import model_cache
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.runtime.calling import model_arguments
from kvpass.runtime.calling.layer_regions import LayerRegions
from kvpass.torch_private import dynamo

UNCOMPILED = (
    "the model returned an ordinary cache, which grows: torch ran the attention, or the update of the cache, "
    "uncompiled, or the model attends without scaled_dot_product_attention and softmax. Look for what breaks the graph "
    "with TORCH_LOGS=graph_breaks,recompiles, such as a function under torch.compiler.disable or a break in a loop, or "
    "pass strict=False. If torch has warned that it hit config.recompile_limit, for any backend, it runs the "
    "function uncompiled until torch._dynamo.reset()"
)
MANY_GRAPHS = (
    "torch.compile has made its maximum of graphs of the model, and would run it uncompiled, where the cache grows: "
    "see with TORCH_LOGS=recompiles what changes from call to call, or start again with torch._dynamo.reset()"
)
WRONG_CACHE = (
    "the model cannot run this call on its cache, which has {} row(s) in {}: continue with as many rows and in this "
    "dtype, and pass `generate` all ids, those of cached tokens included; or begin a new conversation. {}"
)
APART = (
    "a model of kvpass.compile cannot be traced into another backend's graph, where its cache would grow: leave out "
    "fullgraph=True, or compile the outer function by torch.compile(..., backend=kvpass.backend(...))"
)
SHALLOW = (
    "this model is a shallow copy (copy.copy) of a model that kvpass compiled, and is not compiled itself: use "
    "copy.deepcopy, or kvpass.compile on the copy"
)
BATCHES = (
    "transformers' continuous batching keeps all requests in its own paged cache, which kvpass does not bound: "
    "use kvpass.DecodeLoop(model, ..., rows=N) and its add(), or an uncompiled model"
)

TOKEN_IDS = ("decoder_input_ids", "input_ids")
"""The names of arguments with the token ids that a decoder reads; the first one that is passed is read."""

_RUNNING: contextvars.ContextVar[Any] = contextvars.ContextVar("_RUNNING", default=None)
"""The backend of the compiled model that runs in this context and checks the cache; None if none runs."""


class CompiledCall:
    """Caller of a compiled model, with a check that the cache is bounded.

    Attributes:
        call: the callable from torch.compile; None before the first call of a copied or unpickled model.
        strict: whether an ordinary cache that grows is an error.
        model: the module that `call` runs.
        backend: the backend of `model`, set only if `model` was compiled in place.
        regions: the regions of the model's layers, which are active while the model is called.
        parameter_names, cache_keyword: the parameters of the model's forward, and the keyword of the cache.
    """

    def __init__(
        self,
        call: Callable[..., Any] | None,
        strict: bool,
        model: torch.nn.Module,
        backend: Any = None,
        regions: LayerRegions | None = None,
    ) -> None:
        self.call, self.strict, self.model, self.backend = call, strict, model, backend
        self.regions = regions or LayerRegions()
        self.parameter_names = tuple(model_access.forward_parameters(model))
        self.cache_keyword = model_access.cache_keyword(model)
        dynamo.never_compile_alone(CompiledCall.__call__)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the model.

        Raises:
            UnsupportedGraph: kvpass does not support the kind of cache, or the model ran uncompiled.
            CacheHandleError: the call does not fit its cache, for example because it has other rows.
        """
        if _is_part_of_trace(self.model, arguments, named):
            return dynamo.uncompiled_call(self.model)(*arguments, **named)
        return dynamo.untraced(CompiledCall.run)(self, arguments, named)

    def run(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the model, outside of the graphs that Dynamo traces."""
        if self.call is None:
            return self._recompile()(*arguments, **named)
        reason = dynamo.reason_uncompiled()
        if reason is not None and self.strict:
            raise UnsupportedGraph(
                f"{reason}, so the model would run uncompiled and its cache would grow: leave it out, or pass "
                "strict=False"
            )
        if reason is not None:  # a frame that torch skips once is never compiled again
            return dynamo.uncompiled_call(self.model)(*arguments, **named)
        named = model_access.rename_cache(named, self.parameter_names)
        if self._lacks_cache(arguments, named):
            named |= model_access.cache_arguments(self.model, model_access.empty_cache(self.model))
        passed = (*arguments, *named.values())
        for value in passed:
            model_arguments.check_kind(value)
        cache = next((value for value in passed if model_cache.has_handles(value)), None)
        values = tuple(map(model_arguments.as_contiguous_tokens, passed))
        tokens = self._new_tokens(arguments, named)
        values = model_arguments.with_dynamic_lengths(values, tokens, cache)
        arguments, named = values[: len(arguments)], dict(zip(named, values[len(arguments) :], strict=True))
        before = model_cache.ordinary_caches(values) if self.strict else []
        with (
            model_arguments.length_context(cache, values),
            model_arguments.counter_context(cache),
            _running(self.backend, cache, tokens),
        ):
            result = self.regions.run(dynamo.between_compilations(self.call), arguments, named)
        model_arguments.write_back(passed, values)
        if self.strict and (model_cache.have_grown(before) or model_cache.returns_growing_cache(result)):
            raise UnsupportedGraph(UNCOMPILED)
        return result

    def _lacks_cache(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return whether the model would make its cache; Dynamo traces an empty cache that is passed in less time."""
        keyword = self.cache_keyword
        free = keyword in self.parameter_names[len(arguments) :] and named.get(keyword) is None
        return free and model_access.makes_empty_cache(self.model, named)

    def _new_tokens(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the argument with the token ids that a decoder reads; None if there is none."""
        by_name = dict(zip(self.parameter_names, arguments, strict=False)) | named
        return next((by_name[name] for name in TOKEN_IDS if by_name.get(name) is not None), None)

    def _recompile(self) -> CompiledCall:
        """Compile a copied or unpickled model with the settings of the original."""
        if dynamo.compiled_call(self.model) is not self:
            raise UnsupportedGraph(SHALLOW)
        return compile_module(self.model, self.backend, self.strict, self.regions)

    def for_copies(self) -> CompiledCall:
        """Return the caller for a copy of the model; `model` becomes the copy when both are copied together."""
        return CompiledCall(None, self.strict, self.model, self.backend, self.regions)


class WatchedCall:
    """Caller of a module inside of a compiled model, with a check that no cache grows in a direct call.

    Attributes:
        model: the module.
        model_name: the class name of the compiled model.
        compiled_model: a weak reference to the compiled model, if known; nothing is checked after another backend
            compiled it.
    """

    def __init__(self, model: torch.nn.Module, model_name: str, compiled_model: torch.nn.Module | None = None) -> None:
        self.model, self.model_name = model, model_name
        self.compiled_model = None if compiled_model is None else weakref.ref(compiled_model)
        dynamo.never_compile_alone(WatchedCall.__call__)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the module.

        Raises:
            UnsupportedGraph: the module ran uncompiled and its cache has grown.
        """
        if (dynamo.is_traced() and self._is_compiled_by_others()) or _is_part_of_trace(self.model, arguments, named):
            return dynamo.uncompiled_call(self.model)(*arguments, **named)
        return dynamo.untraced(WatchedCall.run)(self, arguments, named)

    def run(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the module, outside of the graphs that Dynamo traces."""
        call = dynamo.uncompiled_call(self.model)
        if _RUNNING.get() or self._is_compiled_by_others():
            return call(*arguments, **named)
        before = model_cache.ordinary_caches((*arguments, *named.values()))
        result = call(*arguments, **named)
        if model_cache.have_grown(before) or model_cache.returns_growing_cache(result):
            inner = type(self.model).__name__
            raise UnsupportedGraph(
                f"{inner} was called by itself and ran uncompiled, so its cache grows: kvpass compiled the "
                f"{self.model_name} around it. Call that, or kvpass.compile the {inner}, or pass strict=False"
            )
        return result

    def _is_compiled_by_others(self) -> bool:
        model = None if self.compiled_model is None else self.compiled_model()
        return model is not None and not isinstance(dynamo.compiled_call(model), CompiledCall)

    def for_copies(self) -> WatchedCall:
        """Return the caller for a copy of the module."""
        return WatchedCall(self.model, self.model_name)


class RedirectedForward:
    """The `forward` of a compiled model, so that `model.forward(...)` does what `model(...)` does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(type(self.model).forward, self.model))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the class's `forward` inside of a call of the model, else call the model."""
        if dynamo.is_traced() or _RUNNING.get():
            return type(self.model).forward(self.model, *arguments, **named)
        return self.model(*arguments, **named)


def _is_part_of_trace(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether Dynamo may trace this call into a graph: one of kvpass, or another backend's without a cache.

    Otherwise the traced graph breaks at the call.
    """
    if not dynamo.is_traced():
        return False
    if _has_no_cache(model, arguments, named):
        return True
    if torch.compiler.is_dynamo_compiling() and _is_traced_for_kvpass():
        return True
    dynamo.break_graph(APART)
    return False


def _has_no_cache(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a call of a model, or of a module inside of one, passes no cache and makes none."""
    use_cache = named.get("use_cache")
    if use_cache is None:  # as for the encoder of an encoder-decoder
        use_cache = getattr(getattr(model, "config", None), "use_cache", True)
    if use_cache or any(x is True for x in arguments):  # one of them may be `use_cache`
        return False
    return all(x is None or isinstance(x, (Tensor, int, float, str)) for x in (*arguments, *named.values()))


@dynamo.constant_in_traces
def _is_traced_for_kvpass() -> bool:
    return dynamo.is_traced_for(_RUNNING.get())


class _GetState:
    """`__getstate__` of a compiled module: adds the module's caller, which torch leaves out of copies and pickles."""

    def __init__(self, caller: CompiledCall | WatchedCall) -> None:
        self.caller = caller

    def __call__(self) -> Any:
        model = self.caller.model
        state = type(model).__getstate__(model)  # type: ignore[no-untyped-call]
        if not isinstance(state, dict) or dynamo.compiled_call(model) is not self.caller:
            return state
        caller = self.caller.for_copies()
        return {**state, dynamo.COMPILED_CALL: caller, "__getstate__": _GetState(caller)}


def _refuse_batches(*_: Any, **__: Any) -> Any:
    """Replace methods that generate with their own kind of cache."""
    raise UnsupportedGraph(BATCHES)


def compile_module(model: torch.nn.Module, backend: Any, strict: bool, regions: LayerRegions) -> CompiledCall:
    """Compile one module in place and return its caller; `regions` are the regions of the model's layers."""
    forward = model.__dict__.get("forward")
    if dynamo.backend_of(forward) is not None:  # compiled by itself, it would run under its own backend
        model.__dict__["forward"] = dynamo.before_compilation(forward)
    model.compile(backend=backend)
    caller = CompiledCall(dynamo.compiled_call(model), strict, model, backend, regions)
    install_caller(model, caller)
    for name in ("generate_batch", "init_continuous_batching"):
        if strict and hasattr(type(model), name):
            model.__dict__[name] = _refuse_batches
        elif model.__dict__.get(name) is _refuse_batches:  # from an earlier compilation with strict=True
            del model.__dict__[name]
    return caller


def install_caller(model: torch.nn.Module, caller: CompiledCall | WatchedCall) -> None:
    dynamo.set_compiled_call(model, caller)
    model.__dict__["__getstate__"] = _GetState(caller)


@contextlib.contextmanager
def _running(backend: Any, cache: Any, tokens: Any) -> Iterator[None]:
    """Mark that a compiled model runs inside, and turn errors of Dynamo that kvpass can explain into its own.

    Args:
        cache: a cache of kvpass among the arguments, or None.
        tokens: the argument with the token ids, or None.

    Dynamo's settings are restored here too, because torch runs no end callback for a compilation that it refuses to
    begin.
    """
    outermost = not _RUNNING.get()
    token = _RUNNING.set(backend or True)
    try:
        yield
    except Exception as error:
        if dynamo.is_recompile_limit_error(error):
            raise UnsupportedGraph(MANY_GRAPHS) from error
        dynamo.compile_again(error)
        layout = None if cache is None else model_cache.caches_in(cache)[0].layout
        if layout is not None and (reason := _reason_unfit(error, layout.batch, tokens)):
            raise CacheHandleError(WRONG_CACHE.format(layout.batch, layout.dtype, reason)) from error
        raise
    finally:
        _RUNNING.reset(token)
        if outermost:
            dynamo.restore_settings()


def _reason_unfit(error: Exception, rows: int, tokens: Any) -> str | None:
    """Return why a call does not fit a cache with this many rows; None for an error of another kind.

    From torch 2.15 on Dynamo breaks the graph at an operation that fails, which then runs on the handles themselves.
    """
    if isinstance(error, CacheHandleError) and isinstance(tokens, torch.Tensor) and len(tokens) != rows:
        return f"The call has {len(tokens)} row(s)."
    return dynamo.reason_untraceable(error)
