"""Find the weight that projects attention's output, for policies that weigh tokens by it."""

from __future__ import annotations

import math

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import AttentionSite
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.fx import op_table, propagation, walk
from kvpass.policies.base import Policy


def output_projection_index(site: AttentionSite) -> int | None:
    """Return the argument index of a site's output projection [E, Hq Dv]; None if not proven.

    The operations between attention and a linear layer run on numbered elements, which shows that each query head's
    part of the output meets its own columns of the weight.
    """
    shape, node = propagation.concrete_shape(walk.value(site.call).shape), site.call
    numbered = torch.arange(math.prod(shape)).view(shape)
    wanted, moved = numbered.transpose(1, 2).flatten(2), numbered
    while True:
        users = [user for user in node.users if not walk.is_size(user)]
        if len(users) == 1 and walk.name_of(users[0]) == "linear" and users[0].args[:1] == (node,):
            break
        if len(users) != 1 or not op_table.is_a(users[0], "moves", "keeps"):
            return None
        try:
            moved = propagation.run_on(users[0], {node: moved}) if op_table.is_a(users[0], "moves") else moved
        except (RuntimeError, TypeError, IndexError):
            return None
        node = users[0]
    weight, holders = [*users[0].args, *users[0].kwargs.values()][1], walk.placeholders(site.call.graph)
    proven = moved.shape[-1] == wanted.shape[-1] and torch.equal(moved.flatten(), wanted.flatten())
    return holders.index(weight) if proven and isinstance(weight, fx.Node) and weight in holders else None


def required_projection_index(site: AttentionSite, policy: Policy) -> int | None:
    """Return the argument index of the weight that projects a site's output, for a policy that reads it."""
    index = output_projection_index(site) if policy.projects else None
    if policy.projects and index is None:
        raise UnsupportedGraph(
            f"{walk.source_line(site.call)}: {policy.name!r} weighs tokens by the projection of the output, and "
            "attention's output is not seen to enter one linear layer, head after head: use policy='ada_kv'"
        )
    return index


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
