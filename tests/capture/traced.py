"""Get graphs from Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.fx as fx

T = TypeVar("T")


def query_graph(function: Callable[..., Any], arguments: tuple[Any, ...], question: Callable[[fx.GraphModule], T]) -> T:
    """Call `question` on the graph that Dynamo traces of a function, and return its result."""
    answers: list[T] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        answers.append(question(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*arguments)
    (answer,) = answers
    return answer


def result(gm: fx.GraphModule) -> fx.Node:
    """Return the single node that a graph returns."""
    (returned,) = gm.graph.output_node().args[0]  # type: ignore[misc, union-attr]
    assert isinstance(returned, fx.Node)
    return returned
