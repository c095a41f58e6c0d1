"""Share one Dynamo trace among many backends: tracing takes most of a small model's time."""

from __future__ import annotations

from typing import Any

import torch

from kvpass.backend import Backend
from tests.switch import Switch


class Traced:
    """A model compiled in place with a `Switch`; earlier compiled code is discarded."""

    def __init__(self, model: Any) -> None:
        torch._dynamo.reset()
        self.model, self.switch = model, Switch()
        model.compile(backend=self.switch)

    @property
    def graphs(self) -> int:
        """Return the number of graphs that Dynamo has traced."""
        return self.switch.graphs

    def under(self, backend: Backend) -> Any:
        """Select the backend that compiles the graphs from now on, and return the model."""
        self.switch.to(backend)
        return self.model
