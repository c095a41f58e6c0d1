"""Provide the weight that projects the output of attention, for policies that weigh tokens by it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.cache.layer_cache import LayerCache
from kvpass.errors import CacheHandleError


def output_weight_by_head(weight: Tensor, heads: int, dim: int) -> Tensor:
    """Return the weight [E, Hq Dv] of an output projection as `TokensToAdmit.output_projection`, [1, Hkv, G, Dv, E]."""
    return torch.unflatten(weight.T, 0, (1, heads, -1, dim))


def output_projection_of(cache: LayerCache) -> Tensor | None:
    """Return `TokensToAdmit.output_projection` for a chunk of a layer; None for a policy that does not read it."""
    if not cache.layout.policy.projects:
        return None
    weight = None if cache.output_projection is None else cache.output_projection()
    if weight is None:
        raise CacheHandleError(
            f"{cache.layout.policy.name!r} weighs the tokens of a turn by the model's output projection, which is not "
            "known of a cache from a file or of a model that is gone: start again with the whole conversation"
        )
    return output_weight_by_head(weight.detach(), cache.layout.heads, cache.layout.value_dim)
