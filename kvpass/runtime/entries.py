"""Which modules of a model uncompiled code calls: the model, what its `generate` calls, and what wrappers wrap.

A compiled model's own call runs the modules inside of it in its graph.  `generate` of one model often runs another one
inside of it instead, with a cache of that one: BLIP-2 calls its language model's, Bark three models in a row.
Wrappers, such as those of PEFT, of value heads and of distributed training, hand out the model that they wrap.
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
    """Return the modules to compile in place: the model, what it adapts, and those inside that generate on a cache."""
    asked = getattr(model, "get_base_model", None)
    base = asked() if callable(asked) else None
    found = [model, *([base] if isinstance(base, torch.nn.Module) else [])]
    found += [module for module in model.modules() if _generates(module)]
    return list({id(module): module for module in found}.values())


def set_up_watched(model: torch.nn.Module, others: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the further modules whose forward takes a cache, without those that stand in lists, as layers do."""
    known = {id(module) for module in others}
    paths = [(path.split("."), module) for path, module in model.named_modules() if id(module) not in known]
    return [module for path, module in paths if takes_a_cache(module) and not any(part.isdigit() for part in path)]


def takes_a_cache(module: torch.nn.Module) -> bool:
    """Return whether a parameter of a module's forward is named like a cache."""
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
    except (TypeError, ValueError):  # a forward that is no function of Python
        return {}
