"""Share tables of angles among the layers of a step graph."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor

from kvpass.fx import walk
from kvpass.lowering.attend import RotaryPairs
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.rotary_subgraph import RotarySubgraph


class RotaryTables:
    """The tables of a step graph, each emitted once."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._tables: dict[Any, list[fx.Node]] = {}
        self._pairs: dict[Any, RotaryPairs | None] = {}

    def angles(self, rotary: RotarySubgraph, capacity: int) -> list[fx.Node]:
        """Return the nodes of the table of angles for ranks 0 .. capacity - 1."""
        key = (rotary.angles.key, str(rotary.position_shape), str(capacity))
        if key not in self._tables:
            context, first = self._context, self._context.sites[0].call
            nodes = [context.length, *rotary.angles.bound]  # the length only gives the device
            for node in rotary.angles.bound:  # a later module of the model may make it
                walk.move_before(first, node)

            def function(length: Tensor, *bound: Tensor) -> list[Tensor]:
                return rotary.table(capacity, list(bound), length.device)

            self._tables[key] = context.compute(function, nodes, first, f"kvpass_table_{len(self._tables)}")
        return self._tables[key]

    def pairs(self, rotary: RotarySubgraph | None) -> RotaryPairs | None:
        """Return the dimensions that an embedding mixes, if a kernel can rotate the keys itself; else None."""
        if rotary is None or not self._context.decodes_on_gpu:
            return None
        if rotary.key not in self._pairs:
            self._pairs[rotary.key] = rotary.pairs()
        return self._pairs[rotary.key]

    def mixing(self, rotary: RotarySubgraph, pairs: RotaryPairs, capacity: int, before: fx.Node) -> list[fx.Node]:
        """Return the nodes of a `Rope`'s weights for ranks 0 .. capacity - 1."""
        key = (rotary.key, rotary.rotate.bound, str(capacity))
        if key not in self._tables:
            table = self.angles(rotary, capacity)

            def function(*tensors: Tensor) -> list[Tensor]:
                return list(rotary.mixing_weights(pairs, list(tensors[: len(table)]), list(tensors[len(table) :])))

            nodes = [*table, *rotary.rotate.bound]
            self._tables[key] = self._context.compute(function, nodes, before, f"kvpass_mixed_{len(self._tables)}")
        return self._tables[key]
