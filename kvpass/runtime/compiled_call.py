"""Calls of a model that kvpass compiled itself: none of them returns a cache that grows unseen.

Where torch gives a function up, because of its limit of graphs or because it cannot go on behind a graph break, the
function runs uncompiled and no backend is asked.  So it does where torch.compile is turned off, and so does a module
inside of the model that is called by itself.  What comes back shows it.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.cache.handle import Handle
from kvpass.errors import UnsupportedGraph
from kvpass.torch_private import dynamo, tensor_types

UNCOMPILED = (
    "the model returned an ordinary cache, which grows: torch ran the attention, or the update of the "
    "cache, uncompiled. Look for what breaks the graph with TORCH_LOGS=graph_breaks,recompiles, such as a "
    "function under torch.compiler.disable or a break within a loop, or pass strict=False"
)
MANY_GRAPHS = (
    "torch.compile has made as many graphs of the model as it may, and would run it uncompiled, where the cache grows: "
    "see with TORCH_LOGS=recompiles what changes from call to call, or begin anew with torch._dynamo.reset()"
)
SHALLOW = (
    "this model is a shallow copy (copy.copy) of one that kvpass compiled, and is not compiled itself: use "
    "copy.deepcopy, or kvpass.compile on the copy"
)
BATCHES = (
    "transformers' continuous batching keeps all requests in a paged cache of its own, which kvpass does not bound: "
    "use kvpass.DecodeLoop(model, ..., rows=N) and its add(), or an uncompiled model"
)


_RUNNING: contextvars.ContextVar[bool] = contextvars.ContextVar("_RUNNING", default=False)
"""Whether a compiled model runs in this thread, which checks its cache itself."""


class CompiledCall:
    """Calls a compiled model and checks that its cache is bounded.

    Attributes:
        call: what torch.compile made; None before the first call of a copied or unpickled model.
        strict: whether an ordinary cache that grows is an error.
        model, backend: the module that was compiled in place and by what; None for other calls.
        taken: the parameters of the model's forward; of what is called, if the model is not given.
    """

    def __init__(self, call: Callable[..., Any] | None, strict: bool, model: Any = None, backend: Any = None) -> None:
        self.call, self.strict, self.model, self.backend = call, strict, model, backend
        self.taken = cache_names.parameters(call if model is None else model)
        dynamo.never_a_frame_of_its_own(CompiledCall.__call__)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Raises: UnsupportedGraph: the cache is of a kind that has no place here, or the model ran uncompiled."""
        if self.call is None:
            return self._compiled_anew()(*arguments, **named)
        if torch.compiler.is_compiling():  # part of a larger graph
            return self.call(*arguments, **named)
        why = dynamo.why_uncompiled()
        if why is not None and self.strict:
            raise UnsupportedGraph(
                f"{why}, so the model would run uncompiled and its cache would grow: leave it out, or pass strict=False"
            )
        if why is not None and self.model is not None:  # torch would never again compile what it skips now
            return dynamo.uncompiled_call(self.model)(*arguments, **named)
        for given in (*arguments, *named.values()):
            _check_kind(getattr(given, "self_attention_cache", given))
        named = {name: _dense(value) for name, value in cache_names.renamed(named, self.taken).items()}
        given = (*arguments, *named.values())
        cache = next((value for value in given if _is_ours(value)), None)
        before = _ordinary(given) if self.strict else []
        with _for_length_of(cache, given), _for_counts_of(cache), _running():
            made = self.call(*arguments, **named)
        if self.strict and (_have_grown(before) or grows(made)):
            raise UnsupportedGraph(UNCOMPILED)
        return made

    def _compiled_anew(self) -> CompiledCall:
        """Compile a model that was copied or unpickled, as the one that it comes from was compiled."""
        if dynamo.compiled_call(self.model) is not self:
            raise UnsupportedGraph(SHALLOW)
        return compile_module(self.model, self.backend, self.strict)

    def for_copies(self) -> CompiledCall:
        """Return what a copy of the model is called by; `model` becomes the copy where the model is copied with it."""
        return CompiledCall(None, self.strict, self.model, self.backend)


class WatchedCall:
    """Calls a module inside of a compiled model that uncompiled code calls by itself, and refuses a cache that grows.

    Attributes:
        model: the module; whole: the name of the class that was compiled.
        around: what was compiled, where that is known; once another backend compiles it, nothing is checked.
    """

    def __init__(self, model: torch.nn.Module, whole: str, around: torch.nn.Module | None = None) -> None:
        self.model, self.whole, self.around = model, whole, None if around is None else weakref.ref(around)
        dynamo.never_a_frame_of_its_own(WatchedCall.__call__)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Raises: UnsupportedGraph: the module ran uncompiled and its cache has grown."""
        call = dynamo.uncompiled_call(self.model)
        if torch.compiler.is_compiling() or _RUNNING.get() or self._is_compiled_by_others():
            return call(*arguments, **named)
        before = _ordinary((*arguments, *named.values()))
        made = call(*arguments, **named)
        if _have_grown(before) or grows(made):
            inner = type(self.model).__name__
            raise UnsupportedGraph(
                f"{inner} was called by itself and ran uncompiled, so its cache grows: kvpass compiled the "
                f"{self.whole} around it. Call that, or kvpass.compile the {inner}, or pass strict=False"
            )
        return made

    def _is_compiled_by_others(self) -> bool:
        around = None if self.around is None else self.around()
        return around is not None and not isinstance(dynamo.compiled_call(around), CompiledCall)

    def for_copies(self) -> WatchedCall:
        """Return what a copy of the module is called by."""
        return WatchedCall(self.model, self.whole)


class _State:
    """Gives the state of a module to copies and pickles, with what calls it: torch leaves that out."""

    def __init__(self, caller: CompiledCall | WatchedCall) -> None:
        self.caller = caller

    def __call__(self) -> Any:
        model = self.caller.model
        state = type(model).__getstate__(model)
        if not isinstance(state, dict) or dynamo.compiled_call(model) is not self.caller:
            return state
        caller = self.caller.for_copies()
        return {**state, dynamo.COMPILED_CALL: caller, "__getstate__": _State(caller)}


class _NoBatches:
    """Refuses a way to generate that brings a cache of its own."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedGraph(BATCHES)


def compile_module(model: torch.nn.Module, backend: Any, strict: bool) -> CompiledCall:
    """Compile one module in place and return what it is called by."""
    model.compile(backend=backend)
    guarded = CompiledCall(dynamo.compiled_call(model), strict, model, backend)
    _put(model, guarded)
    for name in ("generate_batch", "init_continuous_batching"):
        if strict and hasattr(type(model), name):
            model.__dict__[name] = _NoBatches()
        elif isinstance(model.__dict__.get(name), _NoBatches):
            del model.__dict__[name]
    return guarded


def watch_module(model: torch.nn.Module, whole: torch.nn.Module) -> None:
    """Let a module inside of one that was compiled refuse to run uncompiled on a cache."""
    _put(model, WatchedCall(model, type(whole).__name__, whole))


def unwatch(model: torch.nn.Module) -> None:
    """Undo what `watch_module` did to the modules of a model."""
    for module in model.modules():
        if isinstance(dynamo.compiled_call(module), WatchedCall):
            dynamo.set_compiled_call(module, None)
            module.__dict__.pop("__getstate__", None)


def _put(model: torch.nn.Module, caller: CompiledCall | WatchedCall) -> None:
    dynamo.set_compiled_call(model, caller)
    model.__dict__["__getstate__"] = _State(caller)


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """A compiled model runs inside, and where torch raises its limit of graphs, that is an error of kvpass."""
    token = _RUNNING.set(True)
    try:
        yield
    except Exception as error:
        if dynamo.is_limit_of_graphs(error):
            raise UnsupportedGraph(MANY_GRAPHS) from error
        raise
    finally:
        _RUNNING.reset(token)


def _for_length_of(cache: Any, given: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """How a call on a cache is traced: after a prompt of one token, as encoder-decoders have, for any length.

    Dynamo takes a size of one for a constant, and would trace the step after such a prompt for that one length.  A bare
    backend cannot change this, as Dynamo traces before it calls a backend.  That the new tokens [B, 1] are one stays a
    fact: models ask for it.
    """
    first = next(iter(_keys(cache)), None)
    if not isinstance(first, Handle) or first.shape[2] != 1:
        return contextlib.nullcontext()
    for tokens in (value for value in given if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == 1):
        tensor_types.stays(tokens, 1)
    return dynamo.one_like_other_sizes()


def _for_counts_of(cache: Any) -> contextlib.AbstractContextManager[Any]:
    """How a call on a cache is traced whose layers count the tokens seen, as those with a sliding window do.

    Dynamo takes a number for one that stays the same until it has seen another; where an image in the prompt has broken
    its graph, the first step would be traced for this length alone, and nothing in it would tell a place from a number.
    """
    layers = getattr(cache, "layers", None)
    one_of_each = {type(layer): layer for layer in layers} if isinstance(layers, list) else {}
    names = {name for layer in one_of_each.values() for name in _counts(layer)}
    return dynamo.numbers_as_symbols(names) if names else contextlib.nullcontext()


def _counts(layer: Any) -> list[str]:
    """The attribute of a layer that says how many tokens it has seen, where its keys do not, as some of them are gone.

    Where two have that number, one of them may be the window, which does not change.
    """
    keys = getattr(layer, "keys", None)
    if not isinstance(keys, Handle) or keys.shape[2] == keys.seen:
        return []
    names = [name for name, value in vars(layer).items() if type(value) is int and value == keys.seen]
    return names if len(names) == 1 else []


def _check_kind(cache: Any) -> None:
    """Caches that store rows in their own way, which kvpass would have to do away with."""
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


def _dense(value: Any) -> Any:
    return dense(value) if isinstance(value, Tensor) and value.ndim == 2 else value


def dense(tokens: Tensor) -> Tensor:
    """Entries for tokens [B, n] by themselves in memory.

    Slices of longer ones, as chunks of a prompt bring, are traced anew for their strides, which those of a single row
    keep even when it is contiguous, and for the tensor that they are views of.
    """
    if tokens.stride() == (tokens.shape[1], 1) and not tensor_types.is_view(tokens):
        return tokens
    return tokens.clone(memory_format=torch.contiguous_format)


def grows(made: Any) -> bool:
    """Return whether a cache among what a model returned holds keys [B, H, S, D] and none that are kvpass's."""
    return any(ordinary_tokens(cache) > 0 for cache in _caches(made))


def _caches(made: Any) -> Iterator[Any]:
    """Yield the caches in a model's output: what is named so, cache objects, and pairs of keys and values."""
    if isinstance(made, (tuple, list)):
        named = [("", value) for value in made]
    else:
        named = list(made.items() if isinstance(made, Mapping) else getattr(made, "__dict__", {}).items())
    for name, value in named:
        pairs = isinstance(value, (tuple, list)) and bool(value) and isinstance(value[0], (tuple, list))
        if pairs or name in (cache_names.OLD, cache_names.NEW) or _is_object(value):
            yield value


def _is_object(value: Any) -> bool:
    """Return whether a value is a cache object: it has `layers`, of its own or for decoding."""
    return not isinstance(value, (Tensor, torch.nn.Module)) and isinstance(
        getattr(getattr(value, "self_attention_cache", value), "layers", None), list
    )


def _ordinary(given: tuple[Any, ...]) -> list[tuple[Any, int]]:
    """Return the cache objects among arguments that hold no handles, each with the tokens that it stores."""
    objects = [value for value in given if _is_object(value)]
    return [(value, ordinary_tokens(value)) for value in objects if not any(map(_is_handle, _keys(value)))]


def _have_grown(caches: list[tuple[Any, int]]) -> bool:
    """Return whether one of the caches stores more tokens than before."""
    return any(ordinary_tokens(cache) > before for cache, before in caches)


def ordinary_tokens(cache: Any) -> int:
    """Return how many tokens a cache object, or nested tuples, store in tensors; 0 for a cache of kvpass."""
    keys = _keys(cache)
    if any(map(_is_handle, keys)):
        return 0
    return max((key.shape[2] for key in keys if key.ndim == 4), default=0)


def _is_handle(key: Tensor) -> bool:
    return isinstance(key, Handle)


def _is_ours(value: Any) -> bool:
    """Return whether an argument is a cache, under whatever name, with handles for its keys."""
    return not isinstance(value, Tensor) and any(isinstance(key, Handle) for key in _keys(value))


def _keys(cache: Any) -> list[Tensor]:
    """The first tensor of each layer."""
    decoder = getattr(cache, "self_attention_cache", cache)
    layers = getattr(decoder, "layers", decoder)
    if not isinstance(layers, (list, tuple)):
        return []
    firsts = [layer[0] if isinstance(layer, (list, tuple)) and layer else layer for layer in layers]
    found = [first if isinstance(first, Tensor) else getattr(first, "keys", None) for first in firsts]
    return [key for key in found if isinstance(key, Tensor)]
