"""Let Dynamo trace one decoder layer for all equal layers of a model.

Dynamo traces every call of a layer anew, which is most of the time that a model of many layers takes to its first
token.  It reuses the trace of a nested compile region, under the guards of the first trace, if the region has no side
effects.  A layer has one: it appends to the model's cache.  So inside a compiled call each layer runs as a region that
takes the layer's cached keys and values and returns the longer ones, and the caller puts these into the cache.  The
backend inlines all regions before it reads the graph (`kvpass.torch_private.regions`).

Only layers that append to an ordinary `DynamicLayer` of their own become regions; all others are traced as before.  If
Dynamo cannot trace or reuse the regions of a model, its layers are traced one by one from then on.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.torch_private import regions

LEAST_LAYERS = 2
"""The fewest equal layers that are worth a region."""


_ACTIVE: contextvars.ContextVar[bool] = contextvars.ContextVar("_ACTIVE", default=False)


def are_active() -> bool:
    """Return whether layers that are traced in this context become regions."""
    return _ACTIVE.get()


class LayerRegions:
    """The regions of one model.

    Attributes:
        active: whether layers that are traced now become regions; Dynamo guards on it.
        usable: false once Dynamo could not trace or reuse a region of the model.
    """

    def __init__(self, usable: bool = True) -> None:
        self.active, self.usable = False, usable

    def run(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the compiled model with its layers as regions, or again without if Dynamo cannot trace or reuse them.

        Nothing has run when that shows: a graph with regions is refused before its first call.
        """
        if self.usable:
            try:
                with self._tracing():
                    return call(*arguments, **named)
            except Exception as error:
                if not regions.may_cause(error):
                    raise
                self.usable = False
        return call(*arguments, **named)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        before, self.active, token = self.active, True, _ACTIVE.set(True)
        try:
            yield
        finally:
            self.active = before
            _ACTIVE.reset(token)


class LayerCall:
    """The `forward` of a decoder layer, which runs as a region if the model's regions are active.

    Attributes:
        layers, index: the module list of the layer and its index.  Dynamo's guards name the layer by this path.
        regions: shared by all layers of the model.
        kinds: the exact types of a model's cache and of one layer's that can be passed in parts.
    """

    def __init__(self, layers: torch.nn.ModuleList, index: int, shared: LayerRegions, kinds: tuple[Any, Any]) -> None:
        self.layers, self.index, self.regions, self.kinds = layers, index, shared, kinds

    def __call__(self, *args: Any, **named: Any) -> Any:
        layer = self.layers[self.index]
        old, new = named.get(cache_names.OLD), named.get(cache_names.NEW)
        cache: Any = old if new is None else new
        keyword = cache_names.OLD if new is None else cache_names.NEW
        kind_of_cache, kind = self.kinds
        if not self.regions.active or type(cache) is not kind_of_cache or len(cache.layers) <= self.index:
            return type(layer).forward(layer, *args, **named)
        own = cache.layers[self.index]
        if type(own) is not kind:
            return type(layer).forward(layer, *args, **named)
        past = (own.keys, own.values) if own.is_initialized else (None, None)
        out, keys, values = _run_layer(layer, keyword, *past, *_flattened(args, named))
        _fill(own, keys, values)
        return out


class OneLayerCache:
    """The cache that a layer gets inside of a region: it holds the keys and values of that layer alone."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int | None = None, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; the index is not read, as Dynamo would guard on it and reuse no trace."""
        updated: tuple[Tensor, Tensor] = self.own.update(key, value, *args, **named)
        return updated

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens."""
        length: int = self.own.get_seq_length()
        return length


@torch.compiler.nested_compile_region
def _run_layer(
    layer: torch.nn.Module, keyword: str, keys: Tensor | None, values: Tensor | None, *flat: Any
) -> tuple[Any, Tensor, Tensor]:
    """Run a layer on its own cached keys and values; return its output and the longer keys and values."""
    own = layer.forward.kinds[1]()  # type: ignore[attr-defined]  # the forward is a LayerCall
    if keys is not None and values is not None:
        _fill(own, keys, values)
    args, named = _unflattened(flat)
    out = type(layer).forward(layer, *args, **named, **{keyword: OneLayerCache(own)})
    return out, own.keys, own.values


def _fill(own: Any, keys: Tensor, values: Tensor) -> None:
    """Make keys and values those of a layer's cache."""
    if not own.is_initialized:
        own.is_initialized, own.dtype, own.device = True, keys.dtype, keys.device
    own.keys, own.values = keys, values


def _flattened(args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """Return arguments but the cache as one list, in which the members of tuples stand behind their number.

    Dynamo compares the arguments of a region one by one, and traces torch's pytree functions for nested ones, which
    takes longer than the layer.
    """
    flat = [len(args), *args]
    for name, value in named.items():
        if name not in cache_names.BOTH:
            flat += [name, len(value), *value] if isinstance(value, tuple) else [name, None, value]
    return flat


def _unflattened(flat: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of which `_flattened` made a list."""
    begin = 1 + flat[0]
    args, named = flat[1:begin], {}
    while begin < len(flat):
        name, count, begin = flat[begin], flat[begin + 1], begin + 2
        end = begin + (1 if count is None else count)
        named[name] = flat[begin] if count is None else tuple(flat[begin:end])
        begin = end
    return args, named


def install(model: torch.nn.Module) -> LayerRegions:
    """Make the layers of a model run as regions in compiled calls; return what turns them on.

    Layers are members of a module list, of one class, whose forward takes a cache.  All their numbers are equal, except
    those that are the layer's index: so a layer cannot update the cache of another one.
    """
    calls = [call for module in model.modules() if isinstance(call := module.__dict__.get("forward"), LayerCall)]
    if calls:
        return calls[0].regions
    shared, kinds = LayerRegions(), _kinds_of_caches()
    shared.usable = kinds is not None and regions.are_reused()
    if kinds is None or not shared.usable:
        return shared
    for layers in [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]:
        for index in _indices_of_equal_layers(layers):
            layers[index].__dict__["forward"] = LayerCall(layers, index, shared, kinds)
    return shared


def _kinds_of_caches() -> tuple[Any, Any] | None:
    """Return the types of a cache and of its layers that grow by appending, if transformers is loaded."""
    module = sys.modules.get("transformers.cache_utils")
    return None if module is None else (module.DynamicCache, module.DynamicLayer)


def _indices_of_equal_layers(layers: torch.nn.ModuleList) -> list[int]:
    """Return the indices of the layers that may become regions."""
    found: dict[type, list[int]] = {}
    for index, layer in enumerate(layers):
        if "forward" not in layer.__dict__ and not cache_names.parameters(layer).isdisjoint(cache_names.BOTH):
            found.setdefault(type(layer), []).append(index)
    groups = [group for group in found.values() if len(group) >= LEAST_LAYERS and _count_alike(layers, group)]
    return list(itertools.chain.from_iterable(groups))


def _count_alike(layers: torch.nn.ModuleList, group: list[int]) -> bool:
    """Return whether all numbers of the layers are equal or the layer's index, and the index is among them."""
    numbers = [_numbers(layers[index]) for index in group]
    names = set().union(*numbers)
    varying = [name for name in names if len({each.get(name) for each in numbers}) > 1]
    return bool(varying) and all(
        each.get(name) == index for name in varying for each, index in zip(numbers, group, strict=True)
    )


def _numbers(layer: torch.nn.Module) -> dict[str, int]:
    """Return the integer attributes of a layer and its modules, by path."""
    return {
        f"{path}.{name}": value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }
