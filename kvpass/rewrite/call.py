"""The call that a step graph is rewritten for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.fx as fx

from kvpass.capture.sites import AttentionSite
from kvpass.graphs import Sizes
from kvpass.layer.slots import Layout, Slots


@dataclasses.dataclass(frozen=True)
class Telling:
    """Which inputs tell padding from real tokens, see `kvpass.capture.hiding`.

    Attributes:
        sites: for each site those that do in all masks on its cache.
        known: those of which every held token is known to have an entry of one.
    """

    sites: tuple[tuple[fx.Node, ...], ...]
    known: frozenset[fx.Node]

    def moved(self, to: dict[fx.Node, fx.Node]) -> Telling:
        """The same in a copy of the graph."""
        sites = tuple(tuple(to[node] for node in told) for told in self.sites)
        return Telling(sites, frozenset(to[node] for node in self.known))


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
        telling: the inputs that tell padding.
        sweep: whether it is a step with the policy's sweep.
        opened: the layouts with open sizes for what other calls may differ in, if there are any.
    """

    gm: fx.GraphModule
    sites: list[AttentionSite]
    layouts: list[Layout]
    slots: list[Slots]
    arguments: tuple[Any, ...]
    sizes: Sizes
    seen: int
    windows: tuple[int | None, ...]
    telling: Telling
    sweep: bool = False
    opened: list[Layout] = dataclasses.field(default_factory=list)

    def of(self, change: Callable[[Layout], Layout]) -> StepCall:
        """The same call on slots that are laid out otherwise; their rows hold no data."""
        layouts, opened = [change(each) for each in self.layouts], [change(each) for each in self.opened]
        slots = [each.described(layout) for each, layout in zip(self.slots, layouts, strict=True)]
        return dataclasses.replace(self, layouts=layouts, opened=opened, slots=slots)
