"""Let Dynamo trace one decoder layer for all equal layers of a model.

Without regions Dynamo traces every call of a layer, which is most of the time to the first token of a model with many
layers.  It reuses the trace of a nested compile region, under the guards of the first trace, if the region has no side
effects.  A layer has one: it appends to the model's cache.  So inside a compiled call each layer runs as a region that
takes the layer's cached keys and values and returns the longer ones, and the caller puts these into the cache.  The
backend inlines all regions before it reads the graph (`kvpass.torch_private.regions`).

Only layers that append to their own ordinary `DynamicLayer` become regions; all others are traced as before.  If Dynamo
cannot trace or reuse the regions of a model, its layers are traced separately afterwards.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass import model_access, versions
from kvpass.errors import KVPassWarning, UnsupportedGraph
from kvpass.torch_private import region_guards, regions

log = logging.getLogger("kvpass.regions")

MIN_LAYERS = 2
"""The fewest equal layers that are worth a region."""


class LayerList(NamedTuple):
    """A module list as it was when its layers became regions, and the module that has it under a name."""

    owner: torch.nn.Module
    name: str
    layers: torch.nn.ModuleList
    members: tuple[torch.nn.Module, ...]

    @property
    def is_unchanged(self) -> bool:
        """Whether the owner still has the list, with the same layers in the same order."""
        return getattr(self.owner, self.name, None) is self.layers and tuple(self.layers) == self.members


class LayerRegions:
    """The regions of one model.

    Attributes:
        indices: the attributes that hold the index of a layer, as paths from the layer; none if no layer is a region.
        name: the class of the model, which the log names.
        usable: false after Dynamo failed to trace a layer of the model as a region, or after a list has changed.
        lists: the lists of layers that are regions.
    """

    def __init__(self, indices: frozenset[str] = frozenset(), name: str = "") -> None:
        self.indices, self.name, self.usable = indices, name, bool(indices)
        self.lists: list[LayerList] = []

    def run(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the compiled model with its layers as regions, or again without if that is refused.

        Dynamo may be unable to trace a layer as a region, or kvpass to read the graph.  Both errors occur before any
        code of the call has run, as only the first graph of a call has regions.  Other errors are raised.
        """
        if not all(each.is_unchanged for each in self.lists):
            self._remove()
        if not self.usable or regions.are_errors_suppressed():
            return call(*arguments, **named)
        tracing = regions.Tracing(self.indices)
        try:
            return tracing.run(call, arguments, named)
        except Exception as error:
            if not tracing.may_run_again or not (regions.is_region_error(error) or isinstance(error, UnsupportedGraph)):
                raise
            tracing.forget()
            reason = (type(error).__name__, str(error))
        result = call(*arguments, **named)  # raises again if regions are not the cause
        self.usable = False
        _report(
            "%s: its layers are traced separately from now on, which takes longer: tracing one layer for all of "
            "them failed: %s: %s",
            *(self.name, *reason),
        )
        return result

    def _remove(self) -> None:
        """Let layers run their own forward again: `RegionForward` takes a layer and its cache by an index in a list."""
        for each in self.lists:
            for module in (*each.members, *each.owner.modules()):
                if isinstance(module.__dict__.get("forward"), RegionForward):
                    del module.__dict__["forward"]
        self.lists, self.usable = [], False
        log.info("%s: its layers are traced separately from now on, as its list of layers was changed", self.name)


def _report(text: str, *values: object) -> None:
    """Log why layers are traced separately, or warn if a newer torch or transformers may be the reason."""
    if versions.untested_version("torch") or versions.untested_version("transformers"):
        warnings.warn(text % values, KVPassWarning, stacklevel=2)
    else:
        log.info(text, *values)


class RegionForward:
    """The `forward` of a decoder layer, which Dynamo traces as one region if `LayerRegions.run` calls it.

    Dynamo traces this code for every layer, so it has few instructions.

    Attributes:
        layer: the layer.
        layers, index: the module list of the layer and its index.  Dynamo's guards name the layer by this path.
        regions: the regions of the last compiled model that contains the layer; the call does not read them.
        kinds: the exact classes of the model's cache and of a layer's cache whose keys and values a region takes.
        replacements: the classes that replace `kinds` inside a region.
        cache: the name and the position of the layer's parameter for its cache.
        nested: the names of parameters that may be tuples; others may too, but Dynamo takes longer to trace them.
    """

    cache: tuple[str, int]

    def __init__(self, layers: torch.nn.ModuleList, index: int, shared: LayerRegions, kinds: tuple[Any, Any]) -> None:
        self.layer, self.layers, self.index, self.regions, self.kinds = layers[index], layers, index, shared, kinds
        self.replacements = (one_layer_cache(kinds[0]), kinds[1])
        parameter = model_access.cache_parameter(layers[index])
        assert parameter is not None
        self.cache, self.nested = parameter, model_access.nested_parameters(layers[index])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "replacements"}  # made in this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, replacements=(one_layer_cache(state["kinds"][0]), state["kinds"][1]))

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return type(self.layer).forward(self.layer, *args, **named)
        layer = self.layers[self.index]
        # Dynamo guards on the one mark that it reads, so marks of other calls' graphs cause no recompilation.
        is_region = regions.begins_call() and getattr(regions.MARKS, regions.mark())
        own = self._own_cache(args, named) if is_region else None
        if own is None:
            return type(layer).forward(layer, *args, **named)
        past = (own.keys, own.values) if own.is_initialized else (None, None)
        name, position = self.cache
        if name in named:
            named[name] = None
        else:
            args = (*args[:position], None, *args[position + 1 :])
        counts, parts = self._take_nested(named)
        with regions.without_breaks():
            out, keys, values = _run_layer(
                layer, *past, len(args), " ".join(named), *counts, *args, *named.values(), *parts
            )
        _set_keys_and_values(own, keys, values)
        return out

    def _own_cache(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the layer's part of the cache among the arguments, or None."""
        (name, position), (of_model, of_layer) = self.cache, self.kinds
        cache: Any = named[name] if name in named else args[position] if len(args) > position else None
        if type(cache) is not of_model or len(cache.layers) <= self.index:
            return None
        own = cache.layers[self.index]
        return own if type(own) is of_layer else None

    def _take_nested(self, named: dict[str, Any]) -> tuple[list[int], list[Any]]:
        """Take the tuples out of keyword arguments; return the number of parts of each, or -1, and the parts.

        Dynamo traces torch's pytree functions for nested and for keyword arguments of a region, which takes longer than
        the layer.
        """
        counts: list[int] = []
        parts: list[Any] = []
        for name in self.nested:
            value = named.get(name)
            if type(value) is tuple:
                named[name] = None
                counts.append(len(value))
                parts += value
            else:
                counts.append(-1)
        return counts, parts


class OneLayerCache:
    """The cache that a layer gets inside of a region: it contains the keys and values of that layer alone.

    `one_layer_cache` makes a subclass of it for the caches of regions.
    """

    def __init__(self, own: Any) -> None:
        self.own = own

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int | None = None, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; the index is not read, as Dynamo would guard on it and reuse no trace."""
        regions.require_own_index(layer_idx)
        updated: tuple[Tensor, Tensor] = self.own.update(key, value, *args, **named)
        return updated

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the number of tokens that the layer has cached; other layers may have cached more or fewer by now."""
        regions.require_own_index(layer_idx)
        length: int = self.own.get_seq_length()
        return length

    def __getattr__(self, name: str) -> Any:
        """Refuse to trace one layer for all: the model's cache may have an unknown attribute."""
        regions.refuse_attribute(name)
        raise AttributeError(name)

    def __bool__(self) -> bool:
        """Return True, as the model's cache has layers."""
        return True


@functools.cache
def one_layer_cache(of_model: type) -> type[OneLayerCache]:
    """Return a subclass of the model's class of caches that has only the members of `OneLayerCache`."""
    names = {name for base in of_model.__mro__ for name in vars(base)} - set(dir(OneLayerCache))
    members = {name: _refused_method(name) if name.startswith("__") else _refused(name) for name in names}
    return type(OneLayerCache.__name__, (OneLayerCache, of_model), members)


def _refused(name: str) -> property:
    """Return a member that refuses to trace one layer for all."""
    return property(_refused_method(name))


def _refused_method(name: str) -> Callable[..., Any]:
    def refuse(self: OneLayerCache, *args: Any) -> Any:
        return self.__getattr__(name)

    return refuse


@torch.compiler.nested_compile_region
def _run_layer(
    layer: torch.nn.Module, keys: Tensor | None, values: Tensor | None, positional: int, names: str, *flat: Any
) -> tuple[Any, Tensor, Tensor]:
    """Run a layer on its cached keys and values; return its output and the longer keys and values.

    Args:
        positional, names: the number of positional arguments, and the names of the others.
        flat: the numbers of parts of nested arguments, the arguments, and these parts.
    """
    forward: RegionForward = layer.forward  # type: ignore[assignment]
    of_region, of_layer = forward.replacements
    own = of_layer()
    if keys is not None and values is not None:
        _set_keys_and_values(own, keys, values)
    first, name = len(forward.nested), forward.cache[0]
    begin = first + positional + len(names.split())
    args, named = (
        list(flat[first : first + positional]),
        dict(zip(names.split(), flat[first + positional :], strict=False)),
    )
    for nested, count in zip(forward.nested, flat, strict=False):
        if count >= 0:
            named[nested], begin = tuple(flat[begin : begin + count]), begin + count
    if name in named:
        named[name] = of_region(own)
    else:
        args[forward.cache[1]] = of_region(own)
    return type(layer).forward(layer, *args, **named), own.keys, own.values


def _set_keys_and_values(own: Any, keys: Tensor, values: Tensor) -> None:
    """Set the keys and values of a layer's cache."""
    if not own.is_initialized:
        own.is_initialized, own.dtype, own.device = True, keys.dtype, keys.device
    own.keys, own.values = keys, values


def install_regions(model: torch.nn.Module) -> LayerRegions:
    """Make the layers of a model run as regions in calls of `LayerRegions.run`; return these regions.

    Layers are members of one module list and of one class, and their forward takes a cache.  Layers of models inside of
    this one may be regions already.
    """
    calls = [call for module in model.modules() if isinstance(call := module.__dict__.get("forward"), RegionForward)]
    earlier = list({id(call.regions): call.regions for call in calls}.values())
    caches = sys.modules.get("transformers.cache_utils")
    kinds = (getattr(caches, "DynamicCache", None), getattr(caches, "DynamicLayer", None))
    if not _are_as_known(kinds) or not region_guards.install():
        report = _report if caches is not None and regions.are_supported() else log.info
        report("layers are traced separately, which takes longer: this torch or transformers cannot support regions")
        return LayerRegions()
    lists = [
        LayerList(owner, name, module, tuple(module))
        for owner in model.modules()
        for name, module in owner.named_children()
        if isinstance(module, torch.nn.ModuleList)
    ]
    equal_layers = [(each.layers, group) for each in lists for group in _equal_layers(each.layers)]
    indices = frozenset().union(*(_index_attributes(layers, group) for layers, group in equal_layers))
    if len(earlier) == 1 and not indices:
        return earlier[0]
    shared = LayerRegions(indices.union(*(each.indices for each in earlier)), type(model).__name__)
    shared.usable = shared.usable and all(each.usable for each in earlier)
    for call in calls:
        call.regions = shared
    for layers, group in equal_layers:
        for index in group if _index_attributes(layers, group) else ():
            layers[index].__dict__["forward"] = RegionForward(layers, index, shared, kinds)
    shared.lists = [
        each for each in lists if any(isinstance(x.__dict__.get("forward"), RegionForward) for x in each.members)
    ]
    return shared


_LAYER_ATTRIBUTES = {"keys", "values", "is_initialized", "dtype", "device"}
"""The attributes of a layer's cache that `_set_keys_and_values` sets; a region would lose any other attribute."""


def _are_as_known(kinds: tuple[Any, Any]) -> bool:
    """Return whether a layer of transformers' cache has the attributes that regions pass on, and no others."""
    if None in kinds:
        return False
    try:
        layer = kinds[1]()
        layer.update(*torch.zeros(2, 1, 1, 1, 1, device="cpu"))
        layer.get_seq_length()
    except Exception:  # of members that another version has changed
        return False
    attributes: set[str] = {*vars(layer)}
    return {"keys", "values", "is_initialized"} <= attributes <= _LAYER_ATTRIBUTES


def _equal_layers(layers: torch.nn.ModuleList) -> list[list[int]]:
    """Group the layers that take a cache by class; return the indices of each group of at least `MIN_LAYERS`."""
    found: dict[type, list[int]] = {}
    for index, layer in enumerate(layers):
        if "forward" not in layer.__dict__ and model_access.cache_parameter(layer):
            found.setdefault(type(layer), []).append(index)
    return [group for group in found.values() if len(group) >= MIN_LAYERS]


def _index_attributes(layers: torch.nn.ModuleList, group: list[int]) -> frozenset[str]:
    """Return the attributes, as paths from the layer, that hold the index of each layer of a group.

    There are none if another number differs from layer to layer: it may be the index of a cache.
    """
    numbers = [_integer_attributes(layers[index]) for index in group]
    varying = [name for name in set().union(*numbers) if len({each.get(name) for each in numbers}) > 1]
    own = all(each.get(name) == index for name in varying for each, index in zip(numbers, group, strict=True))
    return frozenset(varying) if own else frozenset()


def _integer_attributes(layer: torch.nn.Module) -> dict[str, int]:
    """Return the integer attributes of a layer and its modules, by path."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }
