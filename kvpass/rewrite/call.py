"""The call that a step graph is rewritten for."""

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
    """Which inputs tell padding from real tokens, see `kvpass.capture.padding_analysis`.

    Attributes:
        sites: for each site those that do in all masks on its cache.
        known: those of which every held token is known to have an entry of one.
    """

    sites: tuple[tuple[fx.Node, ...], ...]
    known: frozenset[fx.Node]

    def moved(self, to: dict[fx.Node, fx.Node]) -> PaddingInputs:
        """The same in a copy of the graph."""
        sites = tuple(tuple(to[node] for node in told) for told in self.sites)
        return PaddingInputs(sites, frozenset(to[node] for node in self.known))


@dataclasses.dataclass(frozen=True)
class StepCall:
    """A canonical step graph and the call that it is rewritten for.

    Attributes:
        gm, sites: the graph, which stays as it is, and its attention on caches.
        layouts, slots: of each layer.
        arguments: Dynamo's.
        sizes: how the graph's symbols are to be read in this call.
        seen: tokens before it.
        windows: for each layer how many tokens the model stores, None for all.
        padding_inputs: the inputs that tell padding.
        compact: whether it is a step with the policy's sweep.
        dynamic_dims: the layouts with open sizes for what other calls may differ in, if there are any.
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

    def of(self, change: Callable[[Layout], Layout]) -> StepCall:
        """The same call on slots that are laid out otherwise; their rows hold no data."""
        layouts, dynamic_dims = [change(each) for each in self.layouts], [change(each) for each in self.dynamic_dims]
        slots = [each.on_meta(layout) for each, layout in zip(self.slots, layouts, strict=True)]
        return dataclasses.replace(self, layouts=layouts, dynamic_dims=dynamic_dims, slots=slots)
