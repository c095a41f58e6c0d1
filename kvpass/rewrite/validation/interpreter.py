"""Interpret a graph node by node, so that values can be compared, and replaced, on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg

from kvpass.errors import OUT_OF_MEMORY
from kvpass.fx import alias, walk
from kvpass.lowering.float32_products import InFloat32
from kvpass.torch_private import operators

Visit = Callable[["GraphRun", fx.Node, Any], Any]
"""Take a node and its value, and return the value with which the graph continues."""


class DoesNotRun(Exception):
    """A node of a graph fails by itself, not because of a visit or for lack of memory."""


class GraphRun(fx.Interpreter):
    """Run a graph; arguments are created when a node first reads them, and values are dropped after their last use.

    Attributes:
        env: the values of nodes that later nodes read.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        argument: Callable[[int], Any],
        visits: Mapping[fx.Node, Visit],
        skipped_outputs: Iterable[int] = (),
    ) -> None:
        """Prepare a run.

        Args:
            argument: creates the argument of an index.
            visits: functions that are called at some of the nodes.
            skipped_outputs: indices of outputs that `run_to` returns as None.
        """
        super().__init__(gm, garbage_collect_values=False)
        self._nodes = list(gm.graph.nodes)
        self._argument, self._visits = argument, visits
        self._indices = {node: index for index, node in enumerate(walk.placeholders(gm.graph))}
        results = walk.results(gm.graph)
        self.results = [None if index in set(skipped_outputs) else result for index, result in enumerate(results)]
        self._dropped = self._last_uses()
        self.env: dict[fx.Node, Any] = {}

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        results = {node for node in self.results if isinstance(node, fx.Node)}
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            if node.op != "output":
                last.update(dict.fromkeys((node, *node.all_input_nodes), node))
        dropped: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            if node not in results:
                dropped.setdefault(user, []).append(node)
        return dropped

    def run_to(self, last: fx.Node | None) -> list[Any]:
        """Run up to a node, or to the end for None; return the results that exist by then, else None.

        Raises:
            DoesNotRun: a node fails.
        """
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            generator.manual_seed(0)  # so that all graphs of a comparison draw the same random numbers
        # A run may end between the nodes that enter and exit an autocast region.
        with operators.preserving_autocast(), InFloat32():
            for node in self._nodes:
                if node.op not in ("placeholder", "output"):
                    value = self._run(node)
                    visit = self._visits.get(node)
                    self.env[node] = value if visit is None else visit(self, node, value)
                for unused in self._dropped.get(node, ()):
                    self.env.pop(unused, None)
                if node is last:
                    break
        return [self._result(result, whole=last is None) for result in self.results]

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self.load)
        try:
            return getattr(self, node.op)(node.target, args, kwargs)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            raise DoesNotRun(f"{node.name!r} fails with {type(error).__name__}: {error}") from error

    def load(self, node: fx.Node) -> Any:
        """Return the value of a computed node or an argument."""
        if node not in self.env and node in self._indices:
            self.env[node] = self._argument(self._indices[node])
        return self.env[node]

    def _result(self, result: Any, whole: bool) -> Any:
        if not isinstance(result, fx.Node):
            return result
        return self.load(result) if whole or result in self.env else None


def written_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """Return the indices of the inputs to whose memory a graph writes in place."""
    alias_sets = alias.AliasSets(gm.graph)
    return frozenset(index for index, node in enumerate(walk.placeholders(gm.graph)) if alias_sets.writers(node))


def copy_unless_constant(argument: Any, is_written: bool) -> Any:
    """Return a copy of a tensor, or itself for a weight that the graph does not write to."""
    shared = not isinstance(argument, Tensor) or (isinstance(argument, torch.nn.Parameter) and not is_written)
    return argument if shared else argument.detach().clone()
