"""One trace for many backends: Dynamo, which takes most of a small model's time, sees each way of calling it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from kvpass import compat
from kvpass.backend import Backend


class Switch:
    """A backend of torch.compile that hands each of Dynamo's graphs to one backend of kvpass after the other.

    Dynamo's guards hold as always: what it would trace anew for a backend it traces anew, and `graphs` tells.

    Attributes:
        graphs: how many Dynamo made.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self._chosen: Backend | None = None

    def to(self, chosen: Backend) -> Switch:
        """The same, and what runs from now on is what this backend makes of the graphs."""
        self._chosen = chosen
        return self

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        kept, _ = compat.copy_graph_module(gm)  # Dynamo takes the shapes out of its own
        latest: tuple[Backend | None, Callable[..., Any]] = (None, gm.forward)

        def run(*arguments: Any) -> Any:
            nonlocal latest
            if latest[0] is not self._chosen:
                assert self._chosen is not None
                latest = self._chosen, self._chosen(kept, arguments)
            return latest[1](*arguments)

        return run


class Traced:
    """A model compiled in place with a `Switch`; what was compiled before is forgotten."""

    def __init__(self, model: Any) -> None:
        torch._dynamo.reset()
        self.model, self.switch = model, Switch()
        model.compile(backend=self.switch)

    @property
    def graphs(self) -> int:
        """How many Dynamo made."""
        return self.switch.graphs

    def under(self, chosen: Backend) -> Any:
        """The model, which from now on runs what this backend makes of its graphs."""
        self.switch.to(chosen)
        return self.model
