"""Check the arguments of a model's call, and prepare them so that Dynamo traces few graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cache import model_cache
from kvpass.cache.handle import Handle
from kvpass.errors import UnsupportedGraph
from kvpass.torch_private import dynamo, tensors


def check_kind(cache: Any) -> None:
    """Raise UnsupportedGraph for a cache of transformers that offloads layers or quantizes keys and values."""
    cache = getattr(cache, "self_attention_cache", cache)
    if getattr(cache, "offloading", False):
        raise UnsupportedGraph(
            "an offloaded cache moves layers between devices, and slots stay on their device, as they do not grow: "
            "leave out cache_implementation='offloaded'"
        )
    if any("Quantized" in type(each).__name__ for each in (cache, *model_cache.layers_of(cache))):
        raise UnsupportedGraph(
            "a quantized cache stores keys and values in its own way: leave out cache_implementation='quantized', and "
            "pass kv_dtype='int8' or 'int4' to kvpass"
        )


def as_contiguous_tokens(argument: Any) -> Any:
    """Return an argument, tokens [B, n] as a contiguous tensor that is not a view.

    Chunks of a prompt arrive as slices of a longer tensor.  Dynamo traces a slice again for its strides and for the
    tensor that it views.  A slice of one row keeps its strides even when it is contiguous.
    """
    if not isinstance(argument, Tensor) or argument.ndim != 2:
        return argument
    if argument.stride() == (argument.shape[1], 1) and not tensors.is_view(argument):
        return argument
    return argument.clone(memory_format=torch.contiguous_format)


def with_dynamic_length(tokens: Tensor) -> Tensor:
    """Return tokens [B, n], n > 1, not as a view and with a length that Dynamo traces as dynamic."""
    tokens = as_contiguous_tokens(tokens)
    if tokens.shape[-1] > 1:
        dynamo.mark_dynamic_dim(tokens, tokens.ndim - 1)
    return tokens


def with_dynamic_lengths(values: Sequence[Any], new_tokens: Any, cache: Any) -> tuple[Any, ...]:
    """Return the arguments of a call, with a dynamic length for each that is as long as the tokens.

    Otherwise the first prompt would be traced for its length alone, and the second for all lengths.  Graphs for GPUs
    stay static.

    Args:
        values: the arguments.
        new_tokens: the argument with the token ids, [B, n]; it may be anything, and decode steps have n = 1.
        cache: a cache of kvpass among the arguments, or None.
    """
    if not isinstance(new_tokens, Tensor) or new_tokens.ndim != 2 or new_tokens.shape[1] < 2:
        return tuple(values)
    count = new_tokens.shape[1]
    seen = next((layer.length for layer in model_cache.caches_in(cache)), 0)

    def has_length(value: Any) -> bool:
        if not isinstance(value, Tensor) or value.is_floating_point() or value.device.type != "cpu":
            return False
        return value.ndim in (1, 2, 3) and value.shape[-1] in (count, seen + count)

    def marked(value: Tensor) -> Tensor:
        """Return a copy, so that no tensor of the caller is marked."""
        if dynamo.is_dynamic_dim(value, value.ndim - 1):
            return value
        return with_dynamic_length(value.clone(memory_format=torch.contiguous_format))

    return tuple(marked(value) if has_length(value) else value for value in values)


def write_back(originals: Sequence[Any], copies: Sequence[Any]) -> None:
    """Write to the caller's tensors what a model has written to their copies."""
    for original, copy in zip(originals, copies, strict=True):
        if copy is not original and _was_written(copy, original):
            original.copy_(copy)


def _was_written(copy: Tensor, original: Tensor) -> bool:
    """Return whether a copy was written to, without a wait for the device if torch counts its writes."""
    if copy.is_inference():
        return not torch.isclose(copy, original, 0, 0, equal_nan=copy.is_floating_point()).all()
    return tensors.write_count(copy) > 0


def length_context(cache: Any, arguments: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """Return a context that traces a call after a prompt of one token for any cache length.

    Encoder-decoders have prompts of one token.  The new tokens [B, 1] keep a static length of 1, because models branch
    on it.  A single row stays static too: after calls of several rows, torch would trace the rows of some arguments as
    a symbol and of others as 1.
    """
    key = next(iter(model_cache.key_tensors(cache)), None)  # of the first layer
    if not isinstance(key, Handle) or key.shape[key.token_dim] != 1:
        return contextlib.nullcontext()
    passed = [value for value in arguments if isinstance(value, Tensor) and value.ndim > 1]
    for tokens in (value for value in passed if value.shape[1] == 1):
        dynamo.mark_static_dim(tokens, 1)
    for single_row in (value for value in (*passed, *model_cache.tensors_of(cache)) if value.shape[:1] == (1,)):
        dynamo.mark_static_dim(single_row, 0)
    return dynamo.tracing_one_as_symbol()


def counter_context(cache: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that traces a cache's own token counts as symbols, such as the counts of sliding-window layers.

    Dynamo takes an integer for a constant until it has seen another value.  If an image in the prompt broke the graph,
    Dynamo would trace the first step for this one length, and positions would be constants of its graph.
    """
    one_of_each = {type(layer): layer for layer in model_cache.layers_of(cache)}
    names = {name for layer in one_of_each.values() for name in _counter_names(layer)}
    return dynamo.tracing_attributes_as_symbols(names) if names else contextlib.nullcontext()


def _counter_names(layer: Any) -> list[str]:
    """Return the attribute of a layer that counts the tokens seen, if its keys do not show that count.

    The keys are shorter than the count after tokens were evicted.  The list is empty if two attributes have that value,
    because one of them may be the window, which does not change.
    """
    keys = getattr(layer, "keys", None)
    if not isinstance(keys, Handle) or keys.shape[keys.token_dim] == keys.length:
        return []
    # type() instead of isinstance(), because True equals 1
    names = [name for name, value in vars(layer).items() if type(value) is int and value == keys.length]
    return names if len(names) == 1 else []
