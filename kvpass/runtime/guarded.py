"""Calls of a model that kvpass compiled itself: with room for many graphs, and with no cache that grows unseen.

Where torch gives a function up, because of its limit of graphs or because it cannot go on behind a graph break, the
function runs uncompiled and no backend is asked.  What comes back shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvpass import compat
from kvpass.errors import UnsupportedGraph
from kvpass.runtime.handle import Handle


class Guarded:
    """A compiled model's call.

    Attributes:
        call: what torch.compile made.
        strict: whether an ordinary cache among the outputs is an error.
    """

    def __init__(self, call: Callable[..., Any], strict: bool) -> None:
        self.call, self.strict = call, strict

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Raises: UnsupportedGraph: the cache is of a kind that has no place here, or the model ran uncompiled."""
        _check_kind(named.get("past_key_values"))
        with compat.room_for_graphs():
            made = self.call(*arguments, **{name: _dense(value) for name, value in named.items()})
        if self.strict and not compat.is_disabled() and grows(getattr(made, "past_key_values", None)):
            raise UnsupportedGraph(
                "the model returned an ordinary cache, which grows: torch ran the attention, or the update of the "
                "cache, uncompiled. Look for what breaks the graph with TORCH_LOGS=graph_breaks,recompiles, such as a "
                "function under torch.compiler.disable or a break within a loop, or pass strict=False"
            )
        return made


def _check_kind(cache: Any) -> None:
    """Caches that store rows in their own way, which kvpass would have to do away with."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", [])}
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
    """Entries for tokens [B, n] by themselves in memory: slices of longer ones, as chunks of a prompt bring, are traced
    anew for their strides."""
    return value.contiguous() if isinstance(value, Tensor) and value.ndim == 2 else value


def grows(cache: Any) -> bool:
    """Whether a cache object, or nested tuples, hold keys [B, H, S, D] and none that are kvpass's."""
    keys = _keys(cache)
    return any(key.ndim == 4 and key.shape[2] > 0 for key in keys) and not any(isinstance(k, Handle) for k in keys)


def _keys(cache: Any) -> list[Tensor]:
    """The first tensor of each layer."""
    own = getattr(cache, "self_attention_cache", cache)
    layers = getattr(own, "layers", own)
    if not isinstance(layers, (list, tuple)):
        return []
    firsts = [layer[0] if isinstance(layer, (list, tuple)) and layer else layer for layer in layers]
    found = [first if isinstance(first, Tensor) else getattr(first, "keys", None) for first in firsts]
    return [key for key in found if isinstance(key, Tensor)]
