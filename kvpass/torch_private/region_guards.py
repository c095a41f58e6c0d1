"""Check and guard each layer that reuses the trace of another layer.

Dynamo reuses a region's trace for a layer if the guards of that trace hold for it.  Up to version 2.15 torch looks only
for guards of the sources that the trace has read.  The guards of modules in a layer, on their classes and their own
`forward`, stand under sources of another kind with the same names.  Guards of aliases and hooks are not checked, so a
layer could get the code of another one.  And torch guards only the first layer, so later changes of others are missed.

Here all guards on parts of a layer are found by the chain of their sources, and apply to every layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from kvpass.torch_private import regions

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALIAS, _OF_HOOKS = "DUPLICATE_INPUT", "EMPTY_NN_MODULE_HOOKS_DICT"
_BY_PLACEHOLDER = "TENSOR_MATCH"
"""The guard that Dynamo itself adds for every weight that a graph gets."""


def install() -> bool:
    """Let Dynamo check and guard every layer, and return whether this version of torch allows it."""
    if not regions.are_supported():
        return False
    reuse = _torch_module()
    changed: dict[str, Callable[..., Any]]
    changed = {"build_reuse_condition": _find_condition, "is_reusable": _is_reusable}
    if not all(_has_parameters_of(getattr(reuse, name, None), function) for name, function in changed.items()):
        return False
    for name, function in changed.items():
        if not isinstance(of_torch := getattr(reuse, name), functools.partial):
            setattr(reuse, name, functools.partial(function, of_torch))
    return True


def _has_parameters_of(of_torch: Any, ours: Callable[..., Any]) -> bool:
    """Return whether torch's function has the parameters of our wrapper, without the wrapper's first one."""
    return callable(of_torch) and [*inspect.signature(of_torch).parameters] == [*inspect.signature(ours).parameters][1:]


def _torch_module() -> Any:
    """Return the module of torch that reuses traces, which older versions lack."""
    return importlib.import_module(regions.REUSE)


def _find_condition(of_torch: Callable[..., Any], tx: Any, fingerprint: Any, traced_sources: Any) -> Any:
    """Return torch's condition under which a trace can be reused, with all guards of the layer, or None."""
    layer = _source_of_layer(tx, fingerprint)
    if layer is None:
        return of_torch(tx, fingerprint, traced_sources)
    if _has_inner_hooks(tx.output.resolve_source_value(layer)):
        return None
    guards = [each for each in tx.output.guards if _belongs_to(each.originating_source, layer.name)]
    by_kind = {each: each.create_fn_name() for each in guards}
    single = {each.originating_source for each, kind in by_kind.items() if kind not in (_OF_ALIAS, _OF_HOOKS)}
    condition = of_torch(tx, fingerprint, traced_sources | single)
    if condition is not None:
        aliases = [each for each, kind in by_kind.items() if kind == _OF_ALIAS]
        condition.aliases = [(each.originating_source, each.create_fn.keywords["source_b"]) for each in aliases]
    return condition


def _is_reusable(of_torch: Callable[..., bool], tx: Any, condition: Any, fingerprint: Any, cached_entry: Any) -> bool:
    """Return whether a trace can be reused for a layer, and guard the layer if so."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    layer = _source_of_layer(tx, fingerprint)
    if layer is None:
        return of_torch(tx, condition, fingerprint, cached_entry)
    replaced = _torch_module().build_source_replacement(cached_entry.arg_sources, fingerprint.arg_sources)
    moved, value_of = functools.partial(_moved, known=replaced), tx.output.resolve_source_value
    with _cloning_by(moved):
        if not of_torch(tx, condition, fingerprint, cached_entry):
            return False
    aliases = [(moved(one), moved(other)) for one, other in condition.aliases]
    if _has_inner_hooks(value_of(layer)) or not all(value_of(one) is value_of(other) for one, other in aliases):
        return False
    for source, _, _, guard in condition.guards:
        if (own := moved(source)) != source and guard.create_fn_name() != _BY_PLACEHOLDER:
            install_guard(own.make_guard(guard.create_fn))
    for one, other in aliases:
        install_guard(one.make_guard(functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)))
    return True


@contextlib.contextmanager
def _cloning_by(moved: Callable[[Any], Any]) -> Iterator[None]:
    """Let torch's copies of sources share their parts; torch copies each whole, most of a reuse's time."""
    source: Any = importlib.import_module("torch._guards").ChainedSource
    of_torch = source.clone
    source.clone = lambda copied, transform_fn=None: moved(copied)
    try:
        yield
    finally:
        source.clone = of_torch


def _moved(source: Any, known: dict[Any, Any]) -> Any:
    """Return a source with parts replaced by `known`, which also gets the result: most sources share their parts."""
    if source not in known:
        parts = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
        own = {name: _moved(part, known) for name, part in parts.items() if hasattr(part, "make_guard")}
        known[source] = dataclasses.replace(source, **own) if own else source
    return known[source]


def _source_of_layer(tx: Any, fingerprint: Any) -> Any:
    """Return the source of the module that is a region's first argument, or None if layers are not regions."""
    first = next(iter(fingerprint.arg_sources), None) if regions.are_traced() else None
    return first if first is not None and isinstance(tx.output.resolve_source_value(first), nn.Module) else None


def _belongs_to(source: Any, layer: str) -> bool:
    """Return whether an object is reached through a layer, but not through the `forward` that makes it a region."""
    while source is not None and source.name != f"{layer}.forward":
        if source.name == layer:
            return True
        source = getattr(source, "base", None)
    return False


def _has_inner_hooks(layer: nn.Module) -> bool:
    """Return whether a module in a layer has hooks; hooks of the layer itself run outside of the region."""
    return any(getattr(module, name) for module in layer.modules() if module is not layer for name in _HOOKS)
