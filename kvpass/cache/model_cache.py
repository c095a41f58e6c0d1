"""Walk a model's own cache: an object with `layers`, an encoder-decoder's pair of objects, or nested tuples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from kvpass import model_access
from kvpass.cache.handle import Handle, current_cache, handle_like
from kvpass.cache.layer_cache import CacheOwner, LayerCache

COUNTER = "cumulative_length"
"""The attribute in which a layer of transformers counts its tokens, if its keys do not show how many there are."""


def layers_of(cache: Any) -> Sequence[Any]:
    """Return the layer objects of a cache: its `layers`, or the items of a list or tuple."""
    decoder = getattr(cache, "self_attention_cache", cache)
    layers = getattr(decoder, "layers", decoder)
    return layers if isinstance(layers, (list, tuple)) else ()


def is_cache_object(value: Any) -> bool:
    """Return whether a value is a cache object, which has `layers` itself or in its `self_attention_cache`."""
    return isinstance(layers_of(value), list) and not isinstance(value, (list, torch.nn.Module))


def caches_in(cache: Any) -> list[LayerCache]:
    """Return the caches of all layers in a DecodeLoop, a model's cache object or nested containers."""
    return list({id(handle.cache): handle.cache for handle in _handles(cache)}.values())


def usable_caches_in(cache: Any, backend: CacheOwner) -> list[LayerCache]:
    """Return the caches of all layers as `caches_in`, or raise CacheHandleError if one cannot be continued."""
    return list({id(each): each for each in (current_cache(x, x.kv, backend) for x in _handles(cache))}.values())


def _handles(cache: Any) -> Iterator[Handle]:
    """Yield every handle in a DecodeLoop, a cache object with `layers` that have `keys`, or nested containers."""
    inner = cache if isinstance(cache, Tensor) else model_access.cache_in(cache)  # a handle also has a `cache`
    tree: Any = layers_of(inner) or inner
    for leaf in optree.tree_leaves(tree):
        keys = leaf if isinstance(leaf, Tensor) else getattr(leaf, "keys", None)
        if isinstance(keys, Handle):
            yield keys


def key_tensors(cache: Any) -> list[Tensor]:
    """Return the key tensor of each layer: the first tensor of a tuple, or the attribute `keys`."""
    holders = [layer[0] if isinstance(layer, (list, tuple)) and layer else layer for layer in layers_of(cache)]
    keys = [holder if isinstance(holder, Tensor) else getattr(holder, "keys", None) for holder in holders]
    return [key for key in keys if isinstance(key, Tensor)]


def tensors_of(cache: Any) -> list[Tensor]:
    """Return the tensors of keys and values of all layers, in tuples or as the attributes `keys` and `values`."""
    pairs = [
        layer if isinstance(layer, (list, tuple)) else (getattr(layer, "keys", None), getattr(layer, "values", None))
        for layer in layers_of(cache)
    ]
    return [value for pair in pairs for value in pair if isinstance(value, Tensor)]


def has_handles(value: Any) -> bool:
    """Return whether a value is a cache whose keys are handles."""
    return not isinstance(value, Tensor) and any(isinstance(key, Handle) for key in key_tensors(value))


def ordinary_keys(cache: Any) -> int:
    """Return the number of keys of all heads and layers in a cache; 0 for a cache of kvpass."""
    counts = [key.shape[1] * key.shape[2] for key in key_tensors(cache) if key.ndim == 4]  # in either order
    return 0 if has_handles(cache) else sum(counts)


def ordinary_caches(arguments: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return the cache objects among arguments that hold no handles, each with its number of stored tokens."""
    objects = [value for value in arguments if is_cache_object(value)]
    return [(value, ordinary_keys(value)) for value in objects if not has_handles(value)]


def have_grown(caches: list[tuple[Any, int]]) -> bool:
    """Return whether one of the caches stores more tokens than before."""
    return any(ordinary_keys(cache) > before for cache, before in caches)


def returns_growing_cache(output: Any) -> bool:
    """Return whether a model's output has a cache with keys of four dimensions that are not handles."""
    return any(ordinary_keys(cache) > 0 for cache in _caches_of_output(output))


def _caches_of_output(output: Any) -> Iterator[Any]:
    """Yield the caches in a model's output: entries with a cache's name, cache objects, and key-value pairs."""
    if isinstance(output, (tuple, list)):
        named = [("", value) for value in output]
    else:
        named = list(output.items() if isinstance(output, Mapping) else getattr(output, "__dict__", {}).items())
    for name, value in named:
        pairs = isinstance(value, (tuple, list)) and bool(value) and isinstance(value[0], (tuple, list))
        if pairs or name in (model_access.OLD_KEYWORD, model_access.NEW_KEYWORD) or is_cache_object(value):
            yield value


def refresh_handles(cache: Any, steps: int, become: Mapping[int, LayerCache] | None = None) -> Any:
    """Return a model's cache object, or nested tuples of tensors, with handles of the current length.

    Args:
        steps: the number of new tokens, which is added to a layer's own count.
        become: the new cache of each handle, by the id of its current one; None to keep the caches.
    """
    if isinstance(cache, Handle):
        return handle_like(cache, cache.cache if become is None else become[id(cache.cache)])
    if isinstance(cache, (tuple, list)):
        return tuple(refresh_handles(part, steps, become) for part in cache)
    for layer in getattr(cache, "layers", ()):
        for name in ("keys", "values"):
            setattr(layer, name, refresh_handles(getattr(layer, name, None), steps, become))
        if isinstance(getattr(layer, COUNTER, None), int):
            setattr(layer, COUNTER, getattr(layer, COUNTER) + steps)
    return cache


def other_integers(holder: Any) -> dict[str, int]:
    """Return the integer attributes of a cache object or a layer of it that `refresh_handles` does not advance."""
    attributes = getattr(holder, "__dict__", {}).items()
    return {name: value for name, value in attributes if type(value) is int and name != COUNTER}
