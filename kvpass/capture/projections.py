"""Find the weights that project a site's new keys, and the weight that projects attention's output."""

from __future__ import annotations

import itertools
import math

import torch
import torch.fx as fx

from kvpass.capture.canonical import AttentionSite
from kvpass.fx import op_table, propagation, walk
from kvpass.policies.base import Policy
from kvpass.torch_private import dynamo


def key_projection_indices(site: AttentionSite) -> tuple[int, ...]:
    """Return the argument indices of the module tensors that project a site's new keys."""
    indices = {node: index for index, node in enumerate(walk.placeholders(site.call.graph))}

    def of_module(node: fx.Node) -> list[fx.Node]:
        return [parent for parent in node.all_input_nodes if dynamo.is_of_module(parent)]

    def following(node: fx.Node) -> list[fx.Node]:
        if any(walk.example_value(parent).ndim > 1 for parent in of_module(node)):
            return []  # inputs of a projection come from other layers
        return [parent for parent in node.all_input_nodes if not dynamo.is_of_module(parent)]

    return tuple(sorted({indices[p] for node in walk.reach([site.key], following) for p in of_module(node)}))


def output_projection_index(site: AttentionSite) -> int | None:
    """Return the argument index of a site's output projection [E, Hq Dv]; None if not proven.

    The operations between attention and a linear layer run on numbered elements, which shows that each query head's
    part of the output is multiplied by its own columns of the weight.
    """
    chain = [site.call]
    while (user := _only_user(chain[-1])) is not None and op_table.has_tag(user, "moves", "keeps"):
        chain.append(user)
    if user is None or op_table.operator_name(user) != "linear" or user.args[:1] != (chain[-1],):
        return None
    small = propagation.SmallSizes(chain)
    numbered = torch.arange(math.prod(small.shape(site.call))).view(small.shape(site.call))
    wanted, moved = numbered.transpose(1, 2).flatten(2), numbered
    for source, node in itertools.pairwise(chain):
        moved = small.try_run(node, {source: moved}) if op_table.has_tag(node, "moves") else moved
        if moved is None:
            return None
    weight, placeholders = [*user.args, *user.kwargs.values()][1], walk.placeholders(site.call.graph)
    proven = moved.shape[-1] == wanted.shape[-1] and torch.equal(moved.flatten(), wanted.flatten())
    return placeholders.index(weight) if proven and isinstance(weight, fx.Node) and weight in placeholders else None


def _only_user(node: fx.Node) -> fx.Node | None:
    users = [user for user in node.users if not walk.is_size(user)]
    return users[0] if len(users) == 1 else None


def required_projection_index(site: AttentionSite, policy: Policy) -> int | None:
    """Return the argument index of the weight that projects a site's output, for a policy that reads it."""
    index = output_projection_index(site) if policy.projects else None
    if policy.projects and index is None:
        weighs = f"{policy.name!r} weighs tokens by the projection of the output"
        unproven = "attention's output is not proven to enter one linear layer, head after head"
        walk.refuse(site.call, f"{weighs}, and {unproven}: use policy='ada_kv'")
    return index
