"""Interpreting a graph node by node, so that values can be compared, and exchanged, on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg

from kvpass.fx import walk

Visit = Callable[["GraphRun", fx.Node, Any], Any]
"""Takes a node and its value; returns the value that the graph goes on with."""


class DoesNotRun(Exception):
    """A node of a graph fails; it is the graph's own failure, and not one of what looks on or of the memory's size."""


class GraphRun(fx.Interpreter):
    """Runs a graph; an argument is made when the first node reads it, and dropped behind the last one.

    Attributes:
        env: the values of nodes that are still read.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        argument: Callable[[int], Any],
        visits: Mapping[fx.Node, Visit],
        unread: Iterable[int] = (),
    ) -> None:
        """
        Args:
            argument: makes the argument of a number, from 0.
            visits: what to do at some of the nodes.
            unread: outputs that nobody wants, which `run_to` gives as None.
        """
        super().__init__(gm, garbage_collect_values=False)
        self._nodes = list(gm.graph.nodes)
        self._argument, self._visits = argument, visits
        self._numbers = {node: number for number, node in enumerate(walk.placeholders(gm.graph))}
        results = walk.results(gm.graph)
        self.results = [None if index in set(unread) else result for index, result in enumerate(results)]
        self._dropped = self._last_uses()
        self.env: dict[fx.Node, Any] = {}

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        wanted = {node for node in self.results if isinstance(node, fx.Node)}
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            if node.op != "output":
                last.update(dict.fromkeys((node, *node.all_input_nodes), node))
        dropped: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            if node not in wanted:
                dropped.setdefault(user, []).append(node)
        return dropped

    def run_to(self, last: fx.Node | None = None) -> list[Any]:
        """Run up to a node, by default to the end; returns the results that are computed by then, else None.

        Raises:
            DoesNotRun: a node fails.
        """
        for node in self._nodes:
            if node.op not in ("placeholder", "output"):
                value = self._run(node)
                visit = self._visits.get(node)
                self.env[node] = value if visit is None else visit(self, node, value)
            for done in self._dropped.get(node, ()):
                self.env.pop(done, None)
            if node is last:
                break
        return [self._result(result, whole=last is None) for result in self.results]

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self.load)
        try:
            return getattr(self, node.op)(node.target, args, kwargs)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise DoesNotRun(f"{node.name!r} fails with {type(error).__name__}: {error}") from error

    def load(self, node: fx.Node) -> Any:
        """The value of a node that was computed or is an argument."""
        if node not in self.env and node in self._numbers:
            self.env[node] = self._argument(self._numbers[node])
        return self.env[node]

    def _result(self, result: Any, whole: bool) -> Any:
        if not isinstance(result, fx.Node):
            return result
        return self.load(result) if whole or result in self.env else None


def copied(argument: Any) -> Any:
    """A copy of a tensor that a graph may write to."""
    written = isinstance(argument, Tensor) and not isinstance(argument, torch.nn.Parameter)
    return argument.clone() if written else argument
