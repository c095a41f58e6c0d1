"""Whose a graph is: models and layers are known by the tensors of their modules that graphs are given.

One graph may serve several models, or several layers of one, so that it is the arguments of a call that tell.  All are
held weakly: a tensor that is made later, even at the same address, is another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor

from kvpass.capture.sites import AttentionSite
from kvpass.fx import walk
from kvpass.policies.base import Plan
from kvpass.torch_private import dynamo

Weights = tuple["weakref.ref[Any]", ...]


def owned(gm: fx.GraphModule) -> list[int]:
    """The places of the inputs that are tensors of modules."""
    return [index for index, node in enumerate(walk.placeholders(gm.graph)) if dynamo.is_of_module(node)]


def constants(gm: fx.GraphModule) -> list[Tensor]:
    """The tensors of modules that a graph has as attributes, where Dynamo makes no inputs of them."""
    return [*gm.parameters(), *gm.buffers()]


def projecting(site: AttentionSite) -> tuple[int, ...]:
    """The places of the inputs that are tensors of modules and of which a site's new keys are made."""
    indices = {node: index for index, node in enumerate(walk.placeholders(site.call.graph))}
    seen: set[fx.Node] = set()
    found, todo = [], [site.key]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        mine = [parent for parent in node.all_input_nodes if dynamo.is_of_module(parent)]
        found += [indices[parent] for parent in mine]
        if not any(walk.value(parent).ndim > 1 for parent in mine):  # else a projection, behind which are others'
            todo.extend(parent for parent in node.all_input_nodes if parent not in mine)
    return tuple(sorted(set(found)))


def held_weakly(tensors: Iterable[Any]) -> Weights:
    return tuple(weakref.ref(tensor) for tensor in tensors)


class SeenTensors:
    """Tensors that were met before."""

    def __init__(self) -> None:
        self._met: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in self:
                self._met[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: object) -> bool:
        met = self._met.get(id(tensor))
        return met is not None and met() is tensor


class PlansByModel:
    """What the layers of each model were given first, for policies that keep to it."""

    def __init__(self) -> None:
        self._made: list[tuple[Weights, Any, list[Plan]]] = []

    def of(self, model: Sequence[Any], shape: Any) -> list[Plan] | None:
        """The plan of a model, as `model`, with that number of layers and heads, as `shape`; None if it has none."""
        mine = {id(part) for part in model}
        for weights, known_shape, plan in self._made:
            alive = {id(part) for part in (weight() for weight in weights) if part is not None}
            if known_shape == shape and 2 * len(mine & alive) > min(len(mine), len(weights)):
                return plan
        return None

    def keep(self, model: Sequence[Any], shape: Any, plan: list[Plan]) -> None:
        """A model's plan; those of models that are gone are forgotten."""
        self._made = [made for made in self._made if any(weight() is not None for weight in made[0])]
        self._made.append((held_weakly({id(part): part for part in model}.values()), shape, plan))


def made_elsewhere(weights: Weights, here: Sequence[Tensor], known: SeenTensors) -> bool:
    """Whether a cache that was made with `weights` is of another layer among the known than that which has `here`.

    A layer that nothing is known of, say of a copy of the model that ran the prompt alone, may be the same.
    """
    made = [tensor for tensor in (weight() for weight in weights) if tensor is not None]
    if not made or not here or any(one is other for one in made for other in here):
        return False
    return any(tensor in known for tensor in made)
