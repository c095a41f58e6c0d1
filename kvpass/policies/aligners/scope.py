"""Define what an aligner is trained for, and read it from a model by running it once."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import AlignerError
from kvpass.model_access import architecture_of, cache_of_output, checked_keys_and_values, device_of


@dataclasses.dataclass(frozen=True)
class AlignerScope:
    """The model and the settings that an aligner is trained for.

    Attributes:
        architecture: the model's architecture, as its configuration names it.
        layers, heads: the layers that cache keys and values, and KV heads.
        key_dim, value_dim: the dimensions of one head.
        window: the largest window M; position ids go from 0 to M.
        sinks: how many first tokens of a window stay unchanged.
        every: how many tokens are evicted together; a "direct" aligner serves any number.
    """

    architecture: str
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    window: int
    sinks: int = 4
    every: int = 1


def scope_of(model: Any, window: int, sinks: int = 4, every: int = 1) -> AlignerScope:
    """Return the scope of an aligner for a model and settings.

    Args:
        model: a causal language model with the interface of transformers: `model(input_ids=..., use_cache=True)`
            returns an object with `cache` or `past_key_values`.

    Raises:
        AlignerError: it returns no cache of keys and values, or its layers differ in heads or head dimension.
    """
    vectors = cached_vectors(model, torch.zeros(1, 2, dtype=torch.int64, device=device_of(model)))
    shapes = {(key.shape[1], key.shape[3], value.shape[3]) for key, value in vectors}
    if len(shapes) != 1:
        raise AlignerError(
            f"{architecture_of(model)} caches keys and values of shapes {sorted(shapes)}: an aligner needs equal shapes"
        )
    heads, key_dim, value_dim = shapes.pop()
    return AlignerScope(architecture_of(model), len(vectors), heads, key_dim, value_dim, window, sinks, every)


@torch.no_grad()
def cached_vectors(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's keys and values [B, Hkv, n, D or Dv] of token ids, int64 [B, n]."""
    body = getattr(model, "base_model", model)  # without the head, because only the cache is needed
    return checked_keys_and_values(model, cache_of_output(body(input_ids=ids, use_cache=True)), AlignerError)
