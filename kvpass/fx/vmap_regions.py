"""Find the calls that begin and end the regions of torch.vmap in a graph."""

from __future__ import annotations

import torch.fx as fx

from kvpass.torch_private import fx_nodes


class MappedRegions:
    """The calls that begin and end the regions of torch.vmap that a result needs.

    No node uses the results of these calls, yet the calls inside a region fail without them.
    """

    def __init__(self) -> None:
        self._ends: list[fx.Node] = []
        self._used: list[bool] = []
        self._any = False

    def markers(self, node: fx.Node, needed: bool) -> list[fx.Node]:
        """Return the region markers that are needed because of a node.

        Callers pass all nodes of a graph in reverse order.
        """
        kind = fx_nodes.batching_kind(node)
        if kind == "ends":
            self._ends.append(node)
            self._used.append(False)
        elif kind == "begins" and self._ends:
            end, used = self._ends.pop(), self._used.pop()
            return [node, end] if used else []
        elif kind == "prepares":
            return [node] if self._any else []
        elif kind == "maps" and needed:
            self._any, self._used = True, [True] * len(self._used)
        return []
