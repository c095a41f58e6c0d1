"""Compile a model in place: choose the modules that users call, and watch the modules inside of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpass import model_access
from kvpass.model_access import cache_parameter
from kvpass.runtime.calling import layer_regions
from kvpass.runtime.calling.compiled_call import RedirectedForward, WatchedCall, compile_module, install_caller
from kvpass.torch_private import dynamo


def compile_in_place(model: torch.nn.Module, backend: Callable[..., Any], strict: bool) -> None:
    """Compile the modules of a model that users call, with a backend of kvpass or a wrapper of one.

    With `strict`, modules inside of the model refuse to run uncompiled on a growing cache.
    """
    _unwatch(model)
    compiled, shared = _modules_to_compile(model), layer_regions.install_regions(model)
    for called in compiled:
        compile_module(called, backend, strict, shared)
    watched = _modules_to_watch(model, compiled) if strict else []
    for inner in watched:
        install_caller(inner, WatchedCall(inner, type(model).__name__, model))
    if strict and not watched and "forward" not in vars(model):  # no watched module would notice a call of `forward`
        vars(model)["forward"] = RedirectedForward(model)


def _unwatch(model: torch.nn.Module) -> None:
    """Remove the watching calls from the modules of a model."""
    if isinstance(vars(model).get("forward"), RedirectedForward):
        del vars(model)["forward"]
    for module in model.modules():
        if isinstance(dynamo.compiled_call(module), WatchedCall):
            dynamo.set_compiled_call(module, None)
            module.__dict__.pop("__getstate__", None)


def _modules_to_compile(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules to compile in place: the model, its base model, and inner modules that generate on a cache.

    A call of a compiled model runs its inner modules in its graph.  The `generate` of a model often runs an inner
    model instead, with a cache of that inner model: BLIP-2 calls its language model's, Bark calls three models in a
    row.  Wrappers, such as PEFT's, value heads and distributed training, hand out the model that they
    wrap.
    """
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else None
    found = [model, *([base] if isinstance(base, torch.nn.Module) else [])]
    found += [module for module in model.modules() if _generates(module)]
    return list({id(module): module for module in found}.values())


def _modules_to_watch(model: torch.nn.Module, compiled: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the other modules whose forward takes a cache, without members of module lists such as layers."""
    compiled_ids = {id(module) for module in compiled}
    paths = [(path.split("."), module) for path, module in model.named_modules() if id(module) not in compiled_ids]
    return [module for path, module in paths if cache_parameter(module) and not any(part.isdigit() for part in path)]


def _generates(module: torch.nn.Module) -> bool:
    """Return whether a module has a `generate` and a forward that may take a cache."""
    if not callable(getattr(module, "generate", None)):
        return False
    return cache_parameter(module) is not None or model_access.takes_any_keyword(module)
