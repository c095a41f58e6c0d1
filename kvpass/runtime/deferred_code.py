"""Compile a graph at its second run, if its first run may be the only one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx as fx

from kvpass.lowering.float32_products import InFloat32
from kvpass.torch_private import dynamo, fx_nodes, inductor


class DeferredCode:
    """The code of a graph; None until the graph is compiled, at its first run or at its second."""

    def __init__(self, compiled: inductor.Compiled | None = None) -> None:
        self.compiled, self._has_run = compiled, False

    def for_run(self, graph: fx.GraphModule | None, compile: Callable[[], inductor.Compiled]) -> inductor.Compiled:
        """Return the code for the run that begins now.

        Args:
            graph: runs uncompiled at first; None to compile at the first run.
            compile: called once, unless it raises an error; it may release the graph.
        """
        if self.compiled is not None:  # without the lock, which another thread may hold while it compiles
            return self.compiled
        with dynamo.compile_lock():
            if graph is not None and self.compiled is None and not self._has_run:
                self._has_run = True
                return UncompiledCode(graph)
            if self.compiled is None:  # no other thread has compiled it meanwhile
                self.compiled = compile()
        return self.compiled


class UncompiledCode:
    """The code of a graph that runs uncompiled, with the fastest products that the processor has."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._code = fx_nodes.code_of(graph)

    def __call__(self, *arguments: Any) -> Any:
        with InFloat32():
            return self._code(*arguments)
