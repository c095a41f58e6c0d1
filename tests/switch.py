"""Trace a model once for several backends, in tests that compare policies on one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from kvpass.backend import Backend
from kvpass.cache.handle import Handle
from kvpass.torch_private import regions, symbolic_shapes


class Switch:
    """A backend that traces each graph once and runs it as compiled by the backend selected at call time.

    Tracing takes most of the time of a small model, and depends on the model's code, not on the policy. Dynamo traces
    once for each way of calling the model. Dynamo's guards stay in force: a call that needs a new trace under a backend
    of kvpass needs one here too.

    Attributes:
        graphs: number of graphs that Dynamo has traced.
        ran: numbers of the graphs that have run since the last selection of a backend.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.ran: set[int] = set()
        self._selected: Backend | None = None
        self._has_dynamic_prompt = False

    def to(self, backend: Backend) -> Switch:
        """Select the backend that compiles the graphs from now on, and return the switch."""
        self._selected, self.ran = backend, set()
        return self

    def can_reuse_traces(self, backend: Backend) -> bool:
        """True if a backend can use the existing traces.

        A backend that compiles prompts for dynamic lengths adds Dynamo guards on them, which existing traces lack.
        """
        return not self._has_dynamic_prompt or backend.inner == "eager"

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        number, self.graphs = self.graphs, self.graphs + 1
        graph = regions.inline_regions(gm)  # Dynamo clears the shapes of its own graph after this call
        compiled = [self._compile(graph, examples)]
        is_step = any(isinstance(example, Handle) for example in examples)
        self._has_dynamic_prompt |= not is_step and any(symbolic_shapes.symbols(each) for each in examples)

        def run(*arguments: Any) -> Any:
            self.ran.add(number)
            if compiled[0][0] is not self._selected:
                compiled[0] = self._compile(graph, arguments)
            return compiled[0][1](*arguments)

        return run

    def _compile(self, gm: fx.GraphModule, examples: Sequence[Any]) -> tuple[Backend, Callable[..., Any]]:
        """Compile a graph with the selected backend, and return both."""
        assert self._selected is not None
        return self._selected, self._selected(gm, examples)
