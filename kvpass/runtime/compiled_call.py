"""Calls of a model that kvpass compiled itself, with a check that no returned cache grows.

Where torch gives up on a function, because of its recompile limit or because it cannot continue after a graph break,
the function runs uncompiled and torch does not call the backend.  The same happens where torch.compile is turned off,
and where a module inside the model is called by itself.  The check reads the outputs of the call to find these cases.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.cache.handle import Handle
from kvpass.cache_names import takes_a_cache
from kvpass.errors import UnsupportedGraph
from kvpass.runtime import layer_regions
from kvpass.runtime.layer_regions import LayerRegions
from kvpass.torch_private import dynamo, tensors

UNCOMPILED = (
    "the model returned an ordinary cache, which grows: torch ran the attention, or the update of the "
    "cache, uncompiled. Look for what breaks the graph with TORCH_LOGS=graph_breaks,recompiles, such as a "
    "function under torch.compiler.disable or a break within a loop, or pass strict=False. If torch has warned that it "
    "hit config.recompile_limit, for any backend, it runs the function uncompiled until torch._dynamo.reset()"
)
MANY_GRAPHS = (
    "torch.compile has made as many graphs of the model as it may, and would run it uncompiled, where the cache grows: "
    "see with TORCH_LOGS=recompiles what changes from call to call, or begin anew with torch._dynamo.reset()"
)
APART = (
    "this model of kvpass.compile runs in graphs of its own, as another backend would let its cache grow: leave out "
    "fullgraph=True, or compile the outer function by torch.compile(..., backend=kvpass.backend(...))"
)
SHALLOW = (
    "this model is a shallow copy (copy.copy) of one that kvpass compiled, and is not compiled itself: use "
    "copy.deepcopy, or kvpass.compile on the copy"
)
BATCHES = (
    "transformers' continuous batching keeps all requests in a paged cache of its own, which kvpass does not bound: "
    "use kvpass.DecodeLoop(model, ..., rows=N) and its add(), or an uncompiled model"
)

_RUNNING: contextvars.ContextVar[Any] = contextvars.ContextVar("_RUNNING", default=None)
"""The backend of the compiled model that runs in this context, whose own call checks the cache; None without one."""


class CompiledCall:
    """Caller of a compiled model, with a check that the cache is bounded.

    Attributes:
        call: the callable from torch.compile; None before the first call of a copied or unpickled model.
        strict: whether an ordinary cache that grows is an error.
        model: the module that `call` runs; None for other callables.
        backend: the backend of `model`, set only if `model` was compiled in place.
        regions: the regions of the model's layers, which are active while the model is called.
        parameter_names: the parameter names of the model's forward, or of `call` if `model` is None.
    """

    def __init__(
        self,
        call: Callable[..., Any] | None,
        strict: bool,
        model: Any = None,
        backend: Any = None,
        regions: LayerRegions | None = None,
    ) -> None:
        self.call, self.strict, self.model, self.backend = call, strict, model, backend
        self.regions = regions or LayerRegions()
        self.parameter_names = cache_names.parameter_names(call if model is None else model)
        dynamo.never_compile_alone(CompiledCall.__call__)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the model.

        Raises:
            UnsupportedGraph: kvpass does not support the kind of cache, or the model ran uncompiled.
        """
        if self.call is not None and _is_part_of_trace(self.model, arguments, named):
            return self.call(*arguments, **named)
        return dynamo.untraced(CompiledCall.run)(self, arguments, named)

    def run(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the model, which is no part of a graph that Dynamo traces."""
        if self.call is None:
            return self._recompile()(*arguments, **named)
        reason = dynamo.reason_uncompiled()
        if reason is not None and self.strict:
            raise UnsupportedGraph(
                f"{reason}, so the model would run uncompiled and its cache would grow: leave it out, or pass "
                "strict=False"
            )
        if reason is not None and self.model is not None:  # a frame that torch skips once is never compiled again
            return dynamo.uncompiled_call(self.model)(*arguments, **named)
        for value in (*arguments, *named.values()):
            _check_kind(getattr(value, "self_attention_cache", value))
        arguments = tuple(as_contiguous_tokens(value) for value in arguments)
        named = {
            name: as_contiguous_tokens(value)
            for name, value in cache_names.rename_cache(named, self.parameter_names).items()
        }
        values = (*arguments, *named.values())
        cache = next((value for value in values if _has_handles(value)), None)
        before = _ordinary_caches(values) if self.strict else []
        with _length_context(cache, values), _counter_context(cache), _running(self.backend):
            result = self.regions.run(dynamo.between_compilations(self.call), arguments, named)
        if self.strict and (_have_grown(before) or returns_growing_cache(result)):
            raise UnsupportedGraph(UNCOMPILED)
        return result

    def _recompile(self) -> CompiledCall:
        """Compile a copied or unpickled model with the settings of the original."""
        if dynamo.compiled_call(self.model) is not self:
            raise UnsupportedGraph(SHALLOW)
        return _compile_module(self.model, self.backend, self.strict, self.regions)

    def for_copies(self) -> CompiledCall:
        """Return the caller for a copy of the model; `model` becomes the copy when both are copied together."""
        return CompiledCall(None, self.strict, self.model, self.backend, self.regions)


class WatchedCall:
    """Caller of a module inside of a compiled model, with a check that no cache grows in a direct call.

    Attributes:
        model: the module.
        model_name: the class name of the compiled model.
        compiled_model: a weak reference to the compiled model, if known; nothing is checked once another backend
            compiles it.
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
        """Call the module, which is no part of a graph that Dynamo traces."""
        call = dynamo.uncompiled_call(self.model)
        if _RUNNING.get() or self._is_compiled_by_others():
            return call(*arguments, **named)
        before = _ordinary_caches((*arguments, *named.values()))
        result = call(*arguments, **named)
        if _have_grown(before) or returns_growing_cache(result):
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


def _is_part_of_trace(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether Dynamo traces this call into a graph of kvpass, or into one of another backend without a cache.

    Elsewhere the graph that Dynamo traces breaks at the call.
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
        state = type(model).__getstate__(model)
        if not isinstance(state, dict) or dynamo.compiled_call(model) is not self.caller:
            return state
        caller = self.caller.for_copies()
        return {**state, dynamo.COMPILED_CALL: caller, "__getstate__": _GetState(caller)}


def _refuse_batches(*_: Any, **__: Any) -> Any:
    """Stand in for methods that generate with a cache of their own."""
    raise UnsupportedGraph(BATCHES)


def _compile_module(model: torch.nn.Module, backend: Any, strict: bool, regions: LayerRegions) -> CompiledCall:
    """Compile one module in place and return its caller; `regions` are those of the model's layers."""
    model.compile(backend=backend)
    caller = CompiledCall(dynamo.compiled_call(model), strict, model, backend, regions)
    _install_caller(model, caller)
    for name in ("generate_batch", "init_continuous_batching"):
        if strict and hasattr(type(model), name):
            model.__dict__[name] = _refuse_batches
        elif model.__dict__.get(name) is _refuse_batches:  # from an earlier compilation with strict=True
            del model.__dict__[name]
    return caller


def _unwatch(model: torch.nn.Module) -> None:
    """Remove the watching calls from the modules of a model."""
    for module in model.modules():
        if isinstance(dynamo.compiled_call(module), WatchedCall):
            dynamo.set_compiled_call(module, None)
            module.__dict__.pop("__getstate__", None)


def compile_in_place(model: torch.nn.Module, backend: Callable[..., Any], strict: bool) -> None:
    """Compile the modules of a model that users call, with a backend of kvpass or a wrapper of one.

    With `strict`, modules inside of the model refuse to run uncompiled on a growing cache.
    """
    _unwatch(model)
    compiled, shared = _modules_to_compile(model), layer_regions.install_regions(model)
    for called in compiled:
        _compile_module(called, backend, strict, shared)
    for inner in _modules_to_watch(model, compiled) if strict else ():
        _install_caller(inner, WatchedCall(inner, type(model).__name__, model))


def _install_caller(model: torch.nn.Module, caller: CompiledCall | WatchedCall) -> None:
    dynamo.set_compiled_call(model, caller)
    model.__dict__["__getstate__"] = _GetState(caller)


@contextlib.contextmanager
def _running(backend: Any) -> Iterator[None]:
    """Mark that a compiled model runs inside, and turn torch's recompile limit error into `UnsupportedGraph`.

    A compilation that torch refuses to begin has no end at which Dynamo's settings would be restored.
    """
    outermost = not _RUNNING.get()
    token = _RUNNING.set(backend or True)
    try:
        yield
    except Exception as error:
        if dynamo.is_recompile_limit_error(error):
            raise UnsupportedGraph(MANY_GRAPHS) from error
        raise
    finally:
        _RUNNING.reset(token)
        if outermost:
            dynamo.restore_settings()


def _length_context(cache: Any, arguments: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """Return a context that traces a call after a prompt of one token for any cache length.

    Encoder-decoders have prompts of one token.  The new tokens [B, 1] keep a static length of 1, because models branch
    on it.
    """
    key = next(iter(_key_tensors(cache)), None)  # of the first layer
    if not isinstance(key, Handle) or key.shape[key.token_dim] != 1:
        return contextlib.nullcontext()
    for tokens in (
        value for value in arguments if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == 1
    ):
        tensors.mark_static_dimension(tokens, 1)
    return dynamo.tracing_one_as_symbol()


def _counter_context(cache: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that traces a cache's own token counts as symbols, such as those of sliding-window layers.

    Dynamo takes an integer for a constant until it has seen another value.  If an image in the prompt broke the graph,
    the first step would be traced for this one length, and its graph could not tell a position from a constant.
    """
    layers = getattr(cache, "layers", None)
    one_of_each = {type(layer): layer for layer in layers} if isinstance(layers, list) else {}
    names = {name for layer in one_of_each.values() for name in _counter_names(layer)}
    return dynamo.tracing_attributes_as_symbols(names) if names else contextlib.nullcontext()


def _counter_names(layer: Any) -> list[str]:
    """Return the attribute of a layer that counts the tokens seen, if its keys do not show that count.

    The keys are shorter than the count once tokens are evicted.  The list is empty if two attributes have that value,
    because one of them may be the window, which does not change.
    """
    keys = getattr(layer, "keys", None)
    if not isinstance(keys, Handle) or keys.shape[keys.token_dim] == keys.length:
        return []
    # type() instead of isinstance(), because True equals 1
    names = [name for name, value in vars(layer).items() if type(value) is int and value == keys.length]
    return names if len(names) == 1 else []


def _check_kind(cache: Any) -> None:
    """Raise UnsupportedGraph for a cache that offloads layers or quantizes rows by itself."""
    layers = getattr(cache, "layers", None)
    kinds = {type(layer).__name__ for layer in layers} if isinstance(layers, list) else set()
    if getattr(cache, "offloading", False):
        raise UnsupportedGraph(
            "an offloaded cache moves layers between devices, and slots stay where they are, as they do not grow: "
            "leave out cache_implementation='offloaded'"
        )
    if any("Quantized" in kind for kind in (*kinds, type(cache).__name__)):
        raise UnsupportedGraph(
            "a quantized cache stores rows in its own way: leave out cache_implementation='quantized', and pass "
            "kv_dtype='int8' or 'int4' to kvpass"
        )


def as_contiguous_tokens(argument: Any) -> Any:
    """Return an argument, tokens [B, n] as a contiguous tensor that is not a view.

    Chunks of a prompt arrive as slices of a longer tensor.  Dynamo traces a slice anew for its strides, which a slice
    of a single row keeps even when it is contiguous, and for the tensor that it views.
    """
    if not isinstance(argument, Tensor) or argument.ndim != 2:
        return argument
    if argument.stride() == (argument.shape[1], 1) and not tensors.is_view(argument):
        return argument
    return argument.clone(memory_format=torch.contiguous_format)


def returns_growing_cache(output: Any) -> bool:
    """Return whether a model's output has a cache with keys of four dimensions that are not handles."""
    return any(ordinary_keys(cache) > 0 for cache in _caches(output))


def _caches(output: Any) -> Iterator[Any]:
    """Yield the caches in a model's output: entries with a cache's name, cache objects, and key-value pairs."""
    if isinstance(output, (tuple, list)):
        named = [("", value) for value in output]
    else:
        named = list(output.items() if isinstance(output, Mapping) else getattr(output, "__dict__", {}).items())
    for name, value in named:
        pairs = isinstance(value, (tuple, list)) and bool(value) and isinstance(value[0], (tuple, list))
        if pairs or name in (cache_names.OLD, cache_names.NEW) or _is_cache_object(value):
            yield value


def _is_cache_object(value: Any) -> bool:
    """Return whether a value is a cache object, which has `layers` itself or in its `self_attention_cache`."""
    return not isinstance(value, (Tensor, torch.nn.Module)) and isinstance(
        getattr(getattr(value, "self_attention_cache", value), "layers", None), list
    )


def _ordinary_caches(arguments: tuple[Any, ...]) -> list[tuple[Any, int]]:
    """Return the cache objects among arguments that hold no handles, each with its number of stored tokens."""
    objects = [value for value in arguments if _is_cache_object(value)]
    return [(value, ordinary_keys(value)) for value in objects if not _has_handles(value)]


def _have_grown(caches: list[tuple[Any, int]]) -> bool:
    """Return whether one of the caches stores more tokens than before."""
    return any(ordinary_keys(cache) > before for cache, before in caches)


def ordinary_keys(cache: Any) -> int:
    """Return the keys of all heads and layers of a cache; 0 for a cache of kvpass."""
    counts = [key.shape[1] * key.shape[2] for key in _key_tensors(cache) if key.ndim == 4]  # in either order
    return 0 if _has_handles(cache) else sum(counts)


def _has_handles(value: Any) -> bool:
    """Return whether an argument, under any name, is a cache whose keys are handles."""
    return not isinstance(value, Tensor) and any(isinstance(key, Handle) for key in _key_tensors(value))


def _key_tensors(cache: Any) -> list[Tensor]:
    """Return the key tensor of each layer: the first tensor of a tuple, or the attribute `keys`."""
    decoder = getattr(cache, "self_attention_cache", cache)
    layers = getattr(decoder, "layers", decoder)
    if not isinstance(layers, (list, tuple)):
        return []
    holders = [layer[0] if isinstance(layer, (list, tuple)) and layer else layer for layer in layers]
    keys = [holder if isinstance(holder, Tensor) else getattr(holder, "keys", None) for holder in holders]
    return [key for key in keys if isinstance(key, Tensor)]


def _modules_to_compile(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules to compile in place: the model, its base model, and inner modules that generate on a cache.

    A call of a compiled model runs its inner modules in its graph.  The `generate` of one model often runs an inner
    model instead, with a cache of that inner model: BLIP-2 calls its language model's, Bark calls three models in a
    row.  Wrappers, such as those of PEFT, of value heads and of distributed training, hand out the model that they
    wrap.
    """
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else None
    found = [model, *([base] if isinstance(base, torch.nn.Module) else [])]
    found += [module for module in model.modules() if _generates(module)]
    return list({id(module): module for module in found}.values())


def _modules_to_watch(model: torch.nn.Module, others: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the other modules whose forward takes a cache, without members of module lists such as layers."""
    known = {id(module) for module in others}
    paths = [(path.split("."), module) for path, module in model.named_modules() if id(module) not in known]
    return [module for path, module in paths if takes_a_cache(module) and not any(part.isdigit() for part in path)]


def _generates(module: torch.nn.Module) -> bool:
    """Return whether a module has a `generate` and a forward that may take a cache."""
    if not callable(getattr(module, "generate", None)):
        return False
    return takes_a_cache(module) or cache_names.takes_any_keyword(module)
