"""Entry points of a model: the modules that uncompiled code calls.

The entry points are the model, the modules that its `generate` calls, and the model inside a wrapper.  A call of a
compiled model runs its inner modules in its graph.  The `generate` of one model often runs an inner model instead,
with a cache of that inner model: BLIP-2 calls its language model's, Bark calls three models in a row.  Wrappers, such
as those of PEFT, of value heads and of distributed training, hand out the model that they wrap.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch

_NAMES = re.compile(r"(^|_)(past|caches?|kv|kvs)(_|$)")
_OTHERS = frozenset({"use_cache", "cache_position", "cache_implementation"})


def set_up_compiled(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules to compile in place: the model, its base model, and inner modules that generate on a cache."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else None
    found = [model, *([base] if isinstance(base, torch.nn.Module) else [])]
    found += [module for module in model.modules() if _generates(module)]
    return list({id(module): module for module in found}.values())


def set_up_watched(model: torch.nn.Module, others: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the other modules whose forward takes a cache, without members of module lists such as layers."""
    known = {id(module) for module in others}
    paths = [(path.split("."), module) for path, module in model.named_modules() if id(module) not in known]
    return [module for path, module in paths if takes_a_cache(module) and not any(part.isdigit() for part in path)]


def takes_a_cache(module: torch.nn.Module) -> bool:
    """Return whether a parameter of a module's forward has the name of a cache."""
    return any(_NAMES.search(name) and name not in _OTHERS for name in _parameters(module))


def _generates(module: torch.nn.Module) -> bool:
    """Return whether a module has a `generate` and a forward that may take a cache."""
    if not callable(getattr(module, "generate", None)):
        return False
    kinds = (parameter.kind for parameter in _parameters(module).values())
    return takes_a_cache(module) or inspect.Parameter.VAR_KEYWORD in kinds


def _parameters(module: torch.nn.Module) -> dict[str, Any]:
    try:
        return dict(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # `forward` is not a Python function
        return {}
