"""Describe the call that a step graph is rewritten for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.fx as fx

from kvpass.cache.slots import Layout, Slots
from kvpass.capture.sites import AttentionSite
from kvpass.fx.shapes import Sizes


@dataclasses.dataclass(frozen=True)
class PaddingInputs:
    """Name the inputs that mark padding, see `kvpass.capture.padding_analysis`.

    Attributes:
        sites: for each site, the inputs that mark padding in all masks on its cache.
        known: the inputs whose entry is known to be one for every cached token.
    """

    sites: tuple[tuple[fx.Node, ...], ...]
    known: frozenset[fx.Node]

    def moved(self, to: dict[fx.Node, fx.Node]) -> PaddingInputs:
        """Return the inputs in a copy of the graph; `to` maps each node to its copy."""
        sites = tuple(tuple(to[node] for node in nodes) for nodes in self.sites)
        return PaddingInputs(sites, frozenset(to[node] for node in self.known))


@dataclasses.dataclass(frozen=True)
class StepCall:
    """Combine a canonical step graph with the call that it is rewritten for.

    Attributes:
        gm, sites: the graph, which is not modified, and its attention on caches.
        layouts, slots: of each layer.
        arguments: Dynamo's arguments.
        sizes: the values of the graph's symbols in this call.
        seen: the number of tokens before this call.
        windows: for each layer, how many tokens the model stores, None for all.
        padding_inputs: the inputs that mark padding.
        compact: whether the policy compacts the slots in this step.
        dynamic_dims: the layouts with symbols for the sizes that differ between calls; empty if there are none.
    """

    gm: fx.GraphModule
    sites: list[AttentionSite]
    layouts: list[Layout]
    slots: list[Slots]
    arguments: tuple[Any, ...]
    sizes: Sizes
    seen: int
    windows: tuple[int | None, ...]
    padding_inputs: PaddingInputs
    compact: bool = False
    dynamic_dims: list[Layout] = dataclasses.field(default_factory=list)

    def with_layouts(self, change: Callable[[Layout], Layout]) -> StepCall:
        """Return the call with changed layouts; its slots then hold no data."""
        layouts, dynamic_dims = [change(each) for each in self.layouts], [change(each) for each in self.dynamic_dims]
        slots = [each.on_meta(layout) for each, layout in zip(self.slots, layouts, strict=True)]
        return dataclasses.replace(self, layouts=layouts, dynamic_dims=dynamic_dims, slots=slots)
