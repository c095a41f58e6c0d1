"""One trace of Dynamo's for several backends, for tests that compare policies on one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from kvpass.backend import Backend
from kvpass.cache.handle import Handle
from kvpass.torch_private import regions, symbolic_shapes


class Switch:
    """A backend of torch.compile that has each of Dynamo's graphs run as the backend makes it that is chosen then.

    What Dynamo traces, which takes most of a small model's time, is the model's code and no policy's: it is traced once
    for each way of calling the model.  Dynamo's guards hold as always.  What would be traced anew for a backend is
    traced anew for this one.

    Attributes:
        graphs: how many Dynamo made.
        ran: the numbers of those that ran since a backend was chosen.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.ran: set[int] = set()
        self._chosen: Backend | None = None
        self._open = False

    def to(self, chosen: Backend) -> Switch:
        """The same, and what runs from now on is what this backend makes of the graphs."""
        self._chosen, self.ran = chosen, set()
        return self

    def serves(self, chosen: Backend) -> bool:
        """Whether a backend can go on with what was traced.

        What compiles a prompt's graph for all lengths asks something of them, which Dynamo's guards must hold; and
        they are made by now.
        """
        return not self._open or chosen.inner in ("eager", "reference")

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        number, self.graphs = self.graphs, self.graphs + 1
        kept = regions.inline_regions(gm)  # Dynamo takes the shapes out of its own
        made = [self._made(kept, examples)]
        is_step = any(isinstance(example, Handle) for example in examples)
        self._open |= not is_step and any(symbolic_shapes.symbols(each) for each in examples)

        def run(*arguments: Any) -> Any:
            self.ran.add(number)
            if made[0][0] is not self._chosen:
                made[0] = self._made(kept, arguments)
            return made[0][1](*arguments)

        return run

    def _made(self, gm: fx.GraphModule, examples: Sequence[Any]) -> tuple[Backend, Callable[..., Any]]:
        """The chosen backend, and what it makes of a graph."""
        assert self._chosen is not None
        return self._chosen, self._chosen(gm, examples)
