"""Call a model with its cache, as `cache` or `past_key_values`, and read its outputs and device.

transformers 5.24 renamed `past_key_values` to `cache`.  For older models the old name is an alias.  Models added
after it swallow the old name among their other keyword arguments.  Every call of a model takes the name from here.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import KVPassError
from kvpass.torch_private import dynamo

OLD_KEYWORD, NEW_KEYWORD = "past_key_values", "cache"


def forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's forward, or of a function; none if Python does not know them."""
    forward = getattr(model, "forward", model)
    try:
        if inspect.ismethod(forward) and "forward" not in getattr(forward.__self__, "__dict__", {}):
            _, *others = _parameters_in_class(forward.__func__).items()
            return dict(others)
        return inspect.signature(forward).parameters  # of one model, which a cache would keep alive
    except (TypeError, ValueError):
        return {}


@functools.lru_cache(maxsize=256)
def _parameters_in_class(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def cache_keyword(model: Any) -> str:
    """Return the keyword under which a model's forward takes its cache.

    Args:
        model: a module, a compiled one, one that wraps another as PEFT's and DDP's do, or a function.
    """
    for each in _wrapped_models(model):
        taken = forward_parameters(each)
        for name in (OLD_KEYWORD, NEW_KEYWORD):  # a model from before the rename may use `cache` for something else
            if name in taken:
                return name
    return OLD_KEYWORD


def keyword_names(model: Any) -> tuple[str, ...]:
    """Return the names of the arguments that a call of a model reaches, through wrappers that pass others on."""
    names = dict[str, None]()
    for each in _wrapped_models(model):
        names |= dict.fromkeys(forward_parameters(each))
        if not takes_any_keyword(each):
            break
    return tuple(names)


def _wrapped_models(model: Any) -> Iterator[Any]:
    """Yield a model and the models that it wraps, outermost first."""
    seen: list[Any] = []
    while callable(model) and not any(model is each for each in seen):
        seen.append(model)
        yield model
        model = _wrapped(model)


def _wrapped(model: Any) -> Any:
    """Return the model that a wrapper calls, or None."""
    base: Callable[[], Any] | None = getattr(model, "get_base_model", None)
    if callable(base):
        return base()
    inner = dynamo.before_compilation(model)
    if inner is not model:
        return inner
    wrapped = (getattr(model, name, None) for name in ("module", "pretrained_model"))
    return next((each for each in wrapped if each is not None), None)


def cache_arguments(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model; none for no cache."""
    return {} if cache is None else {cache_keyword(model): cache}


def rename_cache(given: dict[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Return keyword arguments with the cache under the name, of the two, that is among the parameters `taken`."""
    for name, other in ((OLD_KEYWORD, NEW_KEYWORD), (NEW_KEYWORD, OLD_KEYWORD)):
        if name in given and other not in given and name not in taken and other in taken:
            return {other if key == name else key: value for key, value in given.items()}
    return given


def cache_of_output(output: Any) -> Any:
    """Return the cache in a model's output, or None."""
    for name in (NEW_KEYWORD, OLD_KEYWORD):  # where the old name is an alias, it warns
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if found is not None:
            return found
    return None


def cache_in(value: Any) -> Any:
    """Return the cache of a model's output or a DecodeLoop, and any other value unchanged."""
    found = cache_of_output(value)
    return value if found is None else found


def keys_and_values(cache: Any) -> list[tuple[Any, Any]]:
    """Return each layer's keys and values in a cache object or nested tuples, None if missing; [] without a cache."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return [(each[0], each[1]) for each in cache or ()]
    return [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]


def stored_windows(cache: Any) -> list[int | None]:
    """Return how many last tokens each layer of a model's own cache stores, None for all; [] without a cache."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return [None for _ in cache or ()]
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    return [None if window is None else window - 1 for window in windows]


def checked_keys_and_values(model: Any, cache: Any, error: type[KVPassError]) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's keys and values [B, Hkv, n, D or Dv] of a cache, or raise `error`."""
    rows = keys_and_values(cache)
    if not rows or any(not isinstance(x, Tensor) or x.ndim != 4 for pair in rows for x in pair):
        raise error(f"{architecture_of(model)} returns no cache with keys and values [B, heads, tokens, dimension]")
    return rows


def architecture_of(model: Any) -> str:
    """Return the architecture in the model's configuration, else the name of its class."""
    return str(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU for a model without parameters."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def call_model(model: Any, ids: Any, cache: Any = None, **named: Any) -> Any:
    """Return a model's output for tokens that follow a cache, None for an empty one."""
    return model(ids, **cache_arguments(model, cache), use_cache=True, **named)


_NAMES = re.compile(r"(^|_)(past|caches?|kv|kvs)(_|$)")
_OTHERS = frozenset({"use_cache", "cache_position", "cache_implementation"})


def cache_parameter(module: Any) -> tuple[str, int] | None:
    """Return the name and position of the parameter of a module's forward for a cache, or None."""
    for position, name in enumerate(forward_parameters(module)):
        if name not in _OTHERS and not name.endswith("_length") and _NAMES.search(name):
            return name, position
    return None


def nested_parameters(module: Any) -> tuple[str, ...]:
    """Return the parameters of a module's forward that are annotated as tuples."""
    parameters = forward_parameters(module).items()
    return tuple(name for name, parameter in parameters if "tuple[" in str(parameter.annotation).lower())


def takes_any_keyword(module: Any) -> bool:
    """Return whether a module's forward takes keyword arguments that it does not name."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in forward_parameters(module).values())


def makes_empty_cache(model: Any, named: Mapping[str, Any]) -> bool:
    """Return whether a call without a cache would make one as `empty_cache` does, as far as its code shows."""
    uses = named.get("use_cache")
    if hasattr(sys.modules.get(type(model).__module__), "EncoderDecoderCache"):  # it may make one of this class
        return False
    return bool(getattr(getattr(model, "config", None), "use_cache", False) if uses is None else uses)


def empty_cache(model: Any) -> Any:
    """Return an empty cache as `generate` of transformers makes it; None for models that make their own.

    If the model makes the cache while Dynamo traces, the cache's counts become numbers in the graph the first time that
    they are above zero.
    """
    supports, config = getattr(model, "_supports_default_dynamic_cache", None), getattr(model, "config", None)
    if supports is None or not supports() or getattr(config, "is_encoder_decoder", False):
        return None
    from transformers import DynamicCache

    return DynamicCache(config=config.get_text_config(decoder=True))  # type: ignore[union-attr]
