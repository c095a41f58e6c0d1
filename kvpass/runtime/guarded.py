"""Calls of a model that kvpass compiled itself: with room for many graphs, and with no cache that grows unseen.

Where torch gives a function up, because of its limit of graphs or because it cannot go on behind a graph break, the
function runs uncompiled and no backend is asked.  What comes back shows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpass import cache_names, compat
from kvpass.errors import UnsupportedGraph
from kvpass.runtime.handle import Handle


class Guarded:
    """A compiled model's call.

    Attributes:
        call: what torch.compile made.
        strict: whether an ordinary cache among the outputs is an error.
        taken: the parameters of the model's forward; of what is called, if the model is not given.
    """

    def __init__(self, call: Callable[..., Any], strict: bool, model: Any = None) -> None:
        self.call, self.strict = call, strict
        self.taken = cache_names.parameters(call if model is None else model)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Raises: UnsupportedGraph: the cache is of a kind that has no place here, or the model ran uncompiled."""
        for given in (*arguments, *named.values()):
            _check_kind(getattr(given, "self_attention_cache", given))
        named = {name: _dense(value) for name, value in cache_names.renamed(named, self.taken).items()}
        given = (*arguments, *named.values())
        cache = next((value for value in given if _is_ours(value)), None)
        with compat.room_for_graphs(), _for_length_of(cache, given), _for_counts_of(cache):
            made = self.call(*arguments, **named)
        if self.strict and not compat.is_disabled() and grows(cache_names.returned(made)):
            raise UnsupportedGraph(
                "the model returned an ordinary cache, which grows: torch ran the attention, or the update of the "
                "cache, uncompiled. Look for what breaks the graph with TORCH_LOGS=graph_breaks,recompiles, such as a "
                "function under torch.compiler.disable or a break within a loop, or pass strict=False"
            )
        return made


def _for_length_of(cache: Any, given: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """How a call on a cache is traced: after a prompt of one token, as encoder-decoders have, for any length.

    That the new tokens [B, 1] are one stays a fact: models ask for it.
    """
    first = next(iter(_keys(cache)), None)
    if not isinstance(first, Handle) or first.shape[2] != 1:
        return contextlib.nullcontext()
    for tokens in (value for value in given if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == 1):
        compat.stays(tokens, 1)
    return compat.one_like_other_sizes()


def _for_counts_of(cache: Any) -> contextlib.AbstractContextManager[Any]:
    """How a call on a cache is traced whose layers count the tokens seen, as those with a sliding window do.

    Dynamo takes a number for one that stays the same until it has seen another; where an image in the prompt has broken
    its graph, the first step would be traced for this length alone, and nothing in it would tell a place from a number.
    """
    layers = getattr(cache, "layers", None)
    one_of_each = {type(layer): layer for layer in layers} if isinstance(layers, list) else {}
    names = {name for layer in one_of_each.values() for name in _counts(layer)}
    return compat.numbers_as_symbols(names) if names else contextlib.nullcontext()


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
    if tokens.stride() == (tokens.shape[1], 1) and not compat.is_view(tokens):
        return tokens
    return tokens.clone(memory_format=torch.contiguous_format)


def grows(cache: Any) -> bool:
    """Whether a cache object, or nested tuples, hold keys [B, H, S, D] and none that are kvpass's."""
    keys = _keys(cache)
    return any(key.ndim == 4 and key.shape[2] > 0 for key in keys) and not any(isinstance(k, Handle) for k in keys)


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
